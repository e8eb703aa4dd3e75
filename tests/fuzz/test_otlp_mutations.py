"""Damaged requests: taken exactly if upb takes them and they keep the rules, and then as upb reads.

The cases run in a process of their own, because a case may kill it::

    PYTHONPATH=tests/support \
    python -m tests.fuzz.test_otlp_mutations <signal> <small|large> <run seed> <first> <count>

Requests of this size are small. ``large`` sends them the way of large ones, where some damage stays
unseen; each such case has to be of a kind that is listed in ``quiver.otlp.wire``.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import cast
from unittest import mock

import pyarrow as pa
import pytest
from google.protobuf.descriptor import Descriptor
from otlp_wire import (
    attribute,
    breaks_a_rule,
    expected,
    fixed64,
    gauge_point,
    histogram_point,
    item,
    lists,
    maps,
    meaning,
    number,
    parsed,
    part,
    same,
    span,
)
from tests.fuzz.mutations import mutate

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp import wire
from quiver.otlp.decode import find_break
from quiver.otlp.messages import REQUEST_TYPES
from quiver.otlp.wire import read_requests, write_requests
from quiver.testing.telemetry import Shape, Telemetry

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("QUIVER_SEED", "0"))
EXAMPLES = int(os.environ.get("QUIVER_EXAMPLES", "20000"))
LIMITS = OtlpConfig(max_depth=4, max_items=12, max_attributes=20)
GROUP = 10
ROUTES = {"small": wire.SMALL, "large": -1}
SECONDS_PER_GROUP = 20
MEMORY_LIMIT = 64 * 2**20

UNSEEN = (
    "the end of a group",
    "a group has no end",
    "more than 100",
    "a tag is too large",
    "a tag has no end",
    "inside a group",
    "bucket_counts has",
    "explicit_bounds has",
)
"""Damage that is not seen in large requests."""


@cache
def seeds(signal: Signal) -> list[bytes]:
    shapes = [
        Shape(items_per_request=items, resources_per_request=resources, attributes_per_item=4)
        for items, resources in ((1, 1), (3, 1), (5, 2))
    ]
    made = [request for shape in shapes for request in Telemetry(11, shape).take(signal, 4)]
    by_hand = {
        Signal.TRACES: [
            attribute(lists(4)),
            attribute(maps(4)),
            attribute(part(1, b"text"), number(3, 5)),
            span(part(15, part(2, b"m")), part(15, number(3, 2))),
            attribute(lists(5)),
            attribute(maps(5)),
            span(part(4, b"parent")),
            span(part(9, part(1, b"k")) * 21),
        ],
        Signal.LOGS: [
            item(part(5, lists(3))),
            item(part(5, maps(4))),
            item(part(5, lists(6))),
            item(part(9, b"trace")) + item(),
            item(fixed64(11, 2**63)),
            item() * 13,
            b"",
        ],
        Signal.METRICS: [
            gauge_point(fixed64(3, 2**63)) + gauge_point(),
            gauge_point(part(5, part(4, b"span"))),
            histogram_point(part(6, b"\xff" * 16)),
            gauge_point(part(7, part(1, b"k"), part(2, maps(5)))),
            gauge_point(part(5, number(3, 1))),
            histogram_point(part(6, bytes(range(24))), part(7, bytes(16))),
            item(part(10, part(1, part(8, part(2, b"\x01\x80\x01"))))),
        ],
    }
    return made + by_hand[signal]


def case(run_seed: int, signal: Signal, number_: int) -> bytes:
    rng = random.Random(f"{run_seed}/{signal}/{number_}")
    return mutate(rng, rng.choice(seeds(signal)), rng.choice(seeds(signal)))


# --- what has to be ----------------------------------------------------------------------------


def check(signal: Signal, requests: list[bytes], route: str) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with mock.patch.object(wire, "SMALL", ROUTES[route]):
        result = read_requests(signal, requests, LIMITS)
    failures = {failure.request: failure for failure in result.failures}
    rows = {request: row for row, request in enumerate(result.requests.tolist())}
    assert sorted([*failures, *rows]) == list(range(len(requests)))
    result.batch.validate(full=True)
    for index, request in enumerate(requests):
        if index in failures:
            outcomes[check_failure(signal, request, failures[index], route)] += 1
        else:
            row = result.batch.slice(rows[index], 1)
            outcomes[check_row(signal, request, row, route)] += 1
    return outcomes


def descriptor(signal: Signal) -> Descriptor:
    return cast("Descriptor", REQUEST_TYPES[signal].DESCRIPTOR)


def check_failure(signal: Signal, request: bytes, failure: InvalidRequest, route: str) -> str:
    message = parsed(signal, request)
    if message is None:
        assert failure.where or "data points" in failure.reason, failure
        assert route == "large" or failure.reason.startswith("not OTLP: "), failure
        return "not OTLP"
    assert find_break(descriptor(signal), request) is None
    assert breaks_a_rule(message, LIMITS), failure
    return "against the rules"


def check_row(signal: Signal, request: bytes, row: pa.RecordBatch, route: str) -> str:
    message = parsed(signal, request)
    otherwise = route == "large" and read_otherwise(descriptor(signal), request)
    if message is None:
        place = find_break(descriptor(signal), request)
        assert route == "large", place
        assert place is not None
        assert otherwise or any(reason in place[1] for reason in UNSEEN), place
        return "unseen damage"
    if otherwise:
        return "read otherwise"
    assert not breaks_a_rule(message, LIMITS)
    wanted = expected(signal, request)
    if route == "small":
        assert same(signal, row, wanted)
    (written,), (by_hand,) = (write_requests(signal, batch) for batch in (row, wanted))
    assert meaning(signal, written) == meaning(signal, by_hand)
    return "taken"


def read_otherwise(described: Descriptor, data: bytes) -> bool:
    """Whether a list, a map or a message around one comes twice, or an index after a string."""
    try:
        return _read_otherwise(described, data)
    except IndexError:  # damaged
        return False


def _read_otherwise(described: Descriptor, data: bytes) -> bool:
    seen: set[int] = set()
    at = 0
    while at < len(data):
        tag, at = varint_at(data, at)
        number_, wire_type = tag >> 3, tag & 7
        field = described.fields_by_number.get(number_)
        if wire_type == 3:
            return True  # not worth the trouble: a group, unknown to OTLP
        if wire_type in {1, 5}:
            at += 8 if wire_type == 1 else 4
        elif wire_type == 0:
            at = varint_at(data, at)[1]
            if described.name == "AnyValue" and number_ == 8:
                return True
        else:
            length, at = varint_at(data, at)
            if field is not None and field.message_type is not None:
                if not field.is_repeated and number_ in seen:
                    return True
                seen.add(number_)
                if read_otherwise(field.message_type, data[at : at + length]):
                    return True
            at += length
    return False


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7


# --- the process -------------------------------------------------------------------------------


def resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(signal: str, route: str, *numbers: str) -> None:
    run_seed, first, count = map(int, numbers)
    faulthandler.enable()
    outcomes: Counter[str] = Counter()
    grown_from = 0
    for start in range(first, first + count, GROUP):
        os.write(1, f"{start}\n".encode())
        faulthandler.dump_traceback_later(SECONDS_PER_GROUP, exit=True)
        requests = [case(run_seed, Signal(signal), start + i) for i in range(GROUP)]
        outcomes.update(check(Signal(signal), requests, route))
        faulthandler.cancel_dump_traceback_later()
        if start == first + count // 4 // GROUP * GROUP:
            grown_from = resident_peak()
    grown = resident_peak() - grown_from
    assert grown <= MEMORY_LIMIT, f"the process grew by {grown} bytes"
    assert pa.total_allocated_bytes() < MEMORY_LIMIT
    os.write(1, "".join(f"{name}={n}\n" for name, n in outcomes.most_common()).encode())


def run(signal: Signal, route: str, first: int, count: int) -> Counter[str]:
    arguments = (signal.value, route, str(SEED), str(first), str(count))
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.test_otlp_mutations", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    if result.returncode != 0:
        last = lines[-1] if lines else str(first)
        pytest.fail(
            f"a case from {last} on, of {signal} ({route}) with seed {SEED}: "
            f"{result.returncode}.\nAgain: "
            f"PYTHONPATH=tests/support python -m tests.fuzz.test_otlp_mutations "
            f"{signal} {route} {SEED} {last} {GROUP}\n" + result.stderr[-4000:],
            pytrace=False,
        )
    outcomes = (line.partition("=") for line in lines if "=" in line)
    return Counter({name: int(n) for name, _, n in outcomes})


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("signal", list(Signal))
def test_damaged_requests(signal: Signal, route: str) -> None:
    outcomes = run(signal, route, 0, 2000)
    assert min(outcomes[name] for name in ("taken", "not OTLP", "against the rules")) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("signal", list(Signal))
def test_many_damaged_requests(signal: Signal, route: str) -> None:
    run(signal, route, 2000, EXAMPLES)


if __name__ == "__main__":
    main(*sys.argv[1:])
