"""What OTLP costs: ``quiver bench otlp``.

Requests come from ``quiver.testing.Telemetry``: about 590 bytes a span with 12 attributes, 285 a
log record, 215 a data point. Every figure is items per second of CPU time of the calling thread,
the best of all rounds; the ratio is to the plain way, upb objects and loops, in the same round.
The plain way checks nothing; ``decode`` checks ids, limits and depth, also where it decodes a group
of a dozen items the plain way itself.

=====================  =======================================================================
figure                 what is measured
=====================  =======================================================================
results                by signal, then by group (``1x10``: one request of 10 items): ``decode``,
                       ``to_otap`` and ``encode`` in items per CPU second, each with its
                       ``..._ratio`` to the plain way, and ``bytes_per_item``
decode                 requests to a flat table in the lake's schema
to_otap                requests to OTAP tables
encode                 the flat table to requests
=====================  =======================================================================

The rounds are a third of those asked for, because the plain way takes long.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.bench.measure import Benchmark, Plan, Results, Table, Tick
from quiver.bundle import Signal
from quiver.disk import Disk
from quiver.otlp.convert import Decoded, decode, encode, to_otap
from quiver.otlp.plain import plain_rows
from quiver.otlp.schema import lake_schema
from quiver.testing.plain_otap import plain_otap
from quiver.testing.plain_requests import plain_request
from quiver.testing.telemetry import Shape, Telemetry

GROUPS: Final = ((1, 10), (1, 500), (4, 500), (50, 10))
"""Requests, and items in each."""
_SEED: Final = 20_261_115
_ROUND_SHARE: Final = 3
_SHORT: Final = 100
_REPEATS: Final = 10  # of groups that take less than a millisecond or two
_CIRCUMSTANCES: Final = ("python", "pyarrow", "ptars", "protobuf", "cpu_count", "rounds")


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Results:  # noqa: ARG001 - no files
    """Measure; nothing is written."""
    rounds = _rounds(plan)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for signal in Signal:
        for requests, items in GROUPS:
            group = _Group.make(signal, requests, items)
            tasks = _tasks(group)
            best = {name: _Times() for name in tasks}
            for _ in range(rounds):
                tick(f"{signal}, {requests} x {items}")
                _one_round(tasks, best, _REPEATS if group.items <= _SHORT else 1)
            results.setdefault(signal, {})[f"{requests}x{items}"] = _row(group, best)
    figures = {
        "benchmark": BENCHMARK.name,
        "results": results,
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "ptars": version("ptars"),
        "protobuf": version("protobuf"),
        "cpu_count": os.cpu_count(),
        "rounds": rounds,
    }
    return Results(figures, _table(results))


def _rounds(plan: Plan) -> int:
    return max(1, plan.rounds // _ROUND_SHARE)


BENCHMARK: Final = Benchmark(
    name="otlp",
    run=run,
    count_ticks=lambda plan: _rounds(plan) * len(Signal) * len(GROUPS),
    count_bytes=lambda _: 0,
    facts=_CIRCUMSTANCES,
)


class _Group(NamedTuple):
    """Requests, and the same as rows."""

    signal: Signal
    requests: list[bytes]
    items: int
    decoded: Decoded

    @classmethod
    def make(cls, signal: Signal, requests: int, items: int) -> _Group:
        shape = Shape(items_per_request=items)
        made = Telemetry(_SEED, shape).take(signal, requests)
        decoded = decode(signal, made)
        if decoded.failures:
            raise decoded.failures[0]
        return cls(signal, made, decoded.table.num_rows, decoded)


class _Task(NamedTuple):
    """Something to do, and the plain way to do it."""

    ours: Callable[[], object]
    plain: Callable[[], object]


def _tasks(group: _Group) -> dict[str, _Task]:
    signal, requests = group.signal, group.requests
    table, numbers = group.decoded.table, group.decoded.requests

    def plain_decode() -> object:
        rows = [row for _, row in plain_rows(signal, requests)]
        return pa.RecordBatch.from_pylist(rows, schema=lake_schema(signal))

    def plain_encode() -> object:
        by_request: dict[int, list[Mapping[str, Any]]] = {}
        for row, number in zip(table.to_pylist(), numbers.to_pylist(), strict=True):
            by_request.setdefault(number or 0, []).append(row)
        return [plain_request(signal, rows) for rows in by_request.values()]

    if plain_encode() != requests or encode(signal, table, numbers) != requests:
        raise RuntimeError(f"{signal}: what was encoded is not what was decoded")
    return {
        "decode": _Task(lambda: decode(signal, requests), plain_decode),
        "to_otap": _Task(lambda: to_otap(signal, requests), lambda: plain_otap(signal, requests)),
        "encode": _Task(lambda: encode(signal, table, numbers), plain_encode),
    }


class _Times:
    """The best times so far."""

    def __init__(self) -> None:
        self.ours = self.plain = float("inf")


def _one_round(tasks: Mapping[str, _Task], best: Mapping[str, _Times], repeats: int) -> None:
    gc.collect()
    gc.freeze()
    try:
        for name, task in tasks.items():
            for _ in range(repeats):
                best[name].plain = min(best[name].plain, _cpu_seconds(task.plain))
                best[name].ours = min(best[name].ours, _cpu_seconds(task.ours))
    finally:
        gc.unfreeze()


def _cpu_seconds(action: Callable[[], object]) -> float:
    start = time.thread_time()
    action()
    return time.thread_time() - start


def _row(group: _Group, best: Mapping[str, _Times]) -> dict[str, float]:
    row = {"bytes_per_item": round(sum(map(len, group.requests)) / group.items, 1)}
    for name, times in best.items():
        row[name] = round(group.items / times.ours)
        row[f"{name}_ratio"] = round(times.plain / times.ours, 2)
    return row


def _table(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    names = ("decode", "to_otap", "encode")
    columns = [column for name in names for column in (f"{name}/s", "to plain")]
    return Table(
        "Items per CPU second, and how many times the plain way",
        ("", *columns),
        tuple(
            (
                f"{signal}, {group}",
                *(
                    text
                    for name in names
                    for text in (f"{row[name]:,.0f}", f"{row[f'{name}_ratio']:.1f}")
                ),
            )
            for signal, by_group in results.items()
            for group, row in by_group.items()
        ),
    )
