"""Damaged manifests and batches: a ``FormatError``, or exactly what a plain second reader finds.

The cases run in a process of their own, because a case may kill it::

    python -m tests.fuzz.test_buffer_formats <manifest|batch> <run seed> <first> <count>

The second reader (``sound``, ``plain_records``) is slow and simple and shares no code with ours.
A manifest is taken exactly if it is sound, by every function that reads or rewrites one; what is
rewritten is sound again, and no entry of it has changed.
"""

from __future__ import annotations

import faulthandler
import os
import random
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fuzz.child import limit_memory
from tests.fuzz.decoders import check_error
from tests.fuzz.mutations import mutate

from quiver.buffer import manifest as codec
from quiver.buffer.batch import decode_batch, encode_batch
from quiver.buffer.types import Facts, Metadata, NewEntry
from quiver.config import BatchCompression
from quiver.errors import FormatError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "buffer"
SEED = int(os.environ.get("QUIVER_SEED", "0"))
EXAMPLES = int(os.environ.get("QUIVER_EXAMPLES", "50000"))
SOURCE: Final = "somewhere/file"
BATCH_LIMIT = 2**16
SECONDS_PER_CASE = 20
NEW = NewEntry("new/one", (Metadata(0, 7, b"new"),), Facts(1, 2, 3, "fuzz"))


# --- where the cases come from -----------------------------------------------------------------


@cache
def seeds(kind: str) -> list[bytes]:
    return manifests() if kind == "manifest" else batches()


def manifests() -> list[bytes]:
    made = [path.read_bytes() for path in sorted(GOLDEN.glob("M*.bin"))]
    several = [
        NewEntry(
            f"in/{number}",
            tuple(Metadata(3 * index, -index, bytes(index)) for index in range(number % 4)),
            Facts(number, 5, 77, "me") if number % 2 else Facts(),
        )
        for number in range(8)
    ]
    many = codec.append(codec.EMPTY, several, source=SOURCE)
    return [
        *made,
        many,
        codec.set_epoch(codec.dequeue(many, 2, source=SOURCE), 4, source=SOURCE),
        codec.append(struct.pack("<IQQH", 0, 2**63, 9, 1), several[:3], source=SOURCE),
    ]


def batches() -> list[bytes]:
    made = [path.read_bytes() for path in sorted(GOLDEN.glob("B*.bin"))]
    records = [b"", b"one", b"two" * 100, bytes(range(256)) * 3]
    plain = encode_batch(records, BatchCompression.NONE)
    writer = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    unsized = writer.compress(plain[:-7]) + writer.flush()
    frames = [zstandard.ZstdCompressor().compress(part) for part in (plain[:300], plain[300:-7])]
    footer = struct.pack("<BIH", 1, len(records), 1)
    return [
        *made,
        plain,
        encode_batch(records, BatchCompression.ZSTD),
        encode_batch([bytes(60_000)], BatchCompression.ZSTD),
        unsized + footer,
        b"".join(frames) + footer,
    ]


def case(run_seed: int, kind: str, number: int) -> bytes:
    rng = random.Random(f"{run_seed}/buffer/{kind}/{number}")
    data = rng.choice(seeds(kind))
    damaged = mutate(rng, data, rng.choice(seeds(kind)))
    footer_size = 22 if kind == "manifest" else 7
    if rng.random() < 0.5:  # a good footer, so that the damage behind it is reached
        damaged = damaged[: max(0, len(damaged) - footer_size)] + data[-footer_size:]
    return damaged


# --- a second reader ---------------------------------------------------------------------------


class Bytes:
    """Takes from the front; ``EOFError`` when there is not enough."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, size: int) -> bytes:
        if size > len(self.left):
            raise EOFError
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)


class PlainEntry(NamedTuple):
    sequence: int
    location: str
    metadata: list[tuple[int, int, bytes]]
    bytes_: bytes


class Plain(NamedTuple):
    next_sequence: int
    epoch: int
    entries: list[PlainEntry]


def sound(data: bytes) -> Plain | None:
    """A manifest, if it keeps all the rules."""
    try:
        found = _plain_manifest(data)
    except (EOFError, UnicodeDecodeError):
        return None
    places = [entry.location for entry in found.entries]
    first = found.next_sequence - len(found.entries)
    expected = list(range(first, found.next_sequence))
    ok = first >= 0 and [entry.sequence for entry in found.entries] == expected
    ok = ok and all(places)
    for entry in found.entries:
        starts = [item[0] for item in entry.metadata]
        ok = ok and starts == sorted(set(starts)) and starts[:1] in ([], [0])
    return found if ok else None


def _plain_manifest(data: bytes) -> Plain:
    if len(data) < 22:
        raise EOFError
    end, body = Bytes(data[-22:]), Bytes(data[:-22])
    count, next_sequence, epoch, version = (end.number(size) for size in (4, 8, 8, 2))
    entries = []
    while body.left:
        before = body.left
        entry = Bytes(body.take(body.number(4)))
        sequence = entry.number(8)
        location = entry.take(entry.number(2)).decode()
        items = []
        for _ in range(entry.number(4)):
            start, time = entry.number(4), entry.number(8, signed=True)
            items.append((start, time, entry.take(entry.number(4))))
        whole = before[: len(before) - len(body.left)]
        entries.append(PlainEntry(sequence, location, items, whole))
    if version != 1 or count != len(entries):
        raise EOFError
    return Plain(next_sequence, epoch, entries)


def plain_records(data: bytes) -> list[bytes] | None:
    """The records of a batch that is not damaged visibly."""
    if len(data) < 7:
        return None
    compression, count, version = struct.unpack("<BIH", data[-7:])
    block = data[:-7]
    if version != 1 or compression > 1:
        return None
    if compression:
        reader = zstandard.ZstdDecompressor().stream_reader(block, read_across_frames=True)
        try:
            block = reader.read(BATCH_LIMIT + 1)
        except zstandard.ZstdError:
            return None
        if len(block) > BATCH_LIMIT:
            return None
    body = Bytes(block)
    try:
        return [body.take(body.number(4)) for _ in range(count)]
    except EOFError:
        return None


# --- what has to be ----------------------------------------------------------------------------

REWRITES: dict[str, Callable[[bytes], bytes]] = {
    "append": lambda data: codec.append(data, [NEW], source=SOURCE),
    "append nothing": lambda data: codec.append(data, [], source=SOURCE),
    "dequeue nothing": lambda data: codec.dequeue(data, -1, source=SOURCE),
    "dequeue all": lambda data: codec.dequeue(data, 2**64, source=SOURCE),
    "epoch": lambda data: codec.set_epoch(data, 5, source=SOURCE),
}
READS: dict[str, Callable[[bytes], object]] = {
    "check": lambda data: codec.check(data, source=SOURCE),
    "locations": lambda data: codec.locations(data, source=SOURCE),
    "entries": lambda data: codec.entries(data, source=SOURCE),
}


def exercise_manifest(data: bytes) -> str:
    plain = sound(data)
    if plain is None:
        errors = {name: refusal(call, data) for name, call in {**READS, **REWRITES}.items()}
        assert len({(type(error), str(error)) for error in errors.values()}) == 1, errors
        return type(errors["check"]).__name__
    count = len(plain.entries)
    assert codec.check(data, source=SOURCE) == (count, plain.next_sequence, plain.epoch)
    decoded = codec.entries(data, source=SOURCE)
    assert [entry[:2] for entry in decoded] == [entry[:2] for entry in plain.entries]
    assert [list(entry.metadata) for entry in decoded] == [e.metadata for e in plain.entries]
    assert codec.locations(data, source=SOURCE) == {
        e.location: e.sequence for e in reversed(plain.entries)
    }
    assert REWRITES["append nothing"](data) == REWRITES["dequeue nothing"](data) == data
    assert REWRITES["epoch"](data)[:-22] == data[:-22]
    check_rewrites(data, plain)
    return "value"


def check_rewrites(data: bytes, plain: Plain) -> None:
    whole = [entry.bytes_ for entry in plain.entries]
    assert sound(REWRITES["dequeue all"](data)) == plain._replace(entries=[])
    through = plain.next_sequence - len(whole) // 2 - 1
    kept = sound(codec.dequeue(data, through, source=SOURCE))
    assert kept == plain._replace(entries=plain.entries[len(whole) - len(whole) // 2 :])
    if plain.next_sequence == 2**64 - 1:
        refusal(REWRITES["append"], data)
        return
    longer = sound(REWRITES["append"](data))
    assert longer is not None
    assert [entry.bytes_ for entry in longer.entries[:-1]] == whole
    assert longer.entries[-1][:3] == (plain.next_sequence, NEW.location, list(NEW.metadata))
    assert longer[:2] == (plain.next_sequence + 1, plain.epoch)


def refusal(call: Callable[[bytes], object], data: bytes) -> FormatError:
    with pytest.raises(FormatError) as caught:
        call(data)
    check_error(caught.value, SOURCE)
    assert caught.value.offset <= len(data)
    return caught.value


def exercise_batch(data: bytes) -> str:
    try:
        records = decode_batch(data, source=SOURCE, limit=BATCH_LIMIT)
    except FormatError as error:
        check_error(error, SOURCE)
        assert data[-7:-6] != b"\0" or len(data) > BATCH_LIMIT or plain_records(data) is None
        return type(error).__name__
    assert list(records) == plain_records(data)
    return "value"


EXERCISES = {"manifest": exercise_manifest, "batch": exercise_batch}


# --- the process -------------------------------------------------------------------------------


def main(kind: str, *numbers: str) -> None:
    run_seed, first, count = map(int, numbers)
    faulthandler.enable()
    seeds(kind)
    limit_memory()
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        os.write(1, f"{number}\n".encode())
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
        outcomes[EXERCISES[kind](case(run_seed, kind, number))] += 1
        faulthandler.cancel_dump_traceback_later()
    os.write(1, "".join(f"{name}={n}\n" for name, n in outcomes.most_common()).encode())


def run(kind: str, first: int, count: int) -> Counter[str]:
    numbers = (str(SEED), str(first), str(count))
    result = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.test_buffer_formats", kind, *numbers],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.splitlines()
    if result.returncode != 0:
        last = lines[-1] if lines else str(first)
        pytest.fail(
            f"case {last} of kind {kind} with seed {SEED}: {result.returncode}.\n"
            f"Again: python -m tests.fuzz.test_buffer_formats {kind} {SEED} {last} 1\n"
            + result.stderr[-4000:],
            pytrace=False,
        )
    outcomes = (line.partition("=") for line in lines if "=" in line)
    return Counter({name: int(n) for name, _, n in outcomes})


@pytest.mark.parametrize("kind", EXERCISES)
def test_every_seed_is_good(kind: str) -> None:
    assert {EXERCISES[kind](data) for data in seeds(kind)} == {"value"}


@pytest.mark.parametrize("kind", EXERCISES)
@given(data=st.binary(max_size=200))
@example(data=b"")
@example(data=bytes(200))
@example(data=b"\xff" * 200)
def test_bytes_without_structure(kind: str, data: bytes) -> None:
    EXERCISES[kind](data)


def test_no_beginning_and_no_end_of_a_manifest_is_taken() -> None:
    """Except for the footer of one that may be empty: that is a manifest."""
    for data in manifests():
        for size in range(len(data)):
            assert exercise_manifest(data[:size]) != "value"
            exercise_manifest(data[size:])


def test_every_beginning_and_every_end_of_a_batch() -> None:
    for data in batches():
        for size in range(len(data)):
            exercise_batch(data[:size])
            exercise_batch(data[:size] + data[-7:])
            exercise_batch(data[size:])


@pytest.mark.parametrize("kind", EXERCISES)
def test_damaged_files(kind: str) -> None:
    outcomes = run(kind, 0, 2000)
    assert sum(outcomes.values()) == 2000
    assert min(outcomes[name] for name in ("value", "FormatError", "Truncated")) > 20
    assert outcomes["LimitExceeded"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", EXERCISES)
def test_many_damaged_files(kind: str) -> None:
    run(kind, 2000, EXAMPLES)


if __name__ == "__main__":
    main(*sys.argv[1:])
