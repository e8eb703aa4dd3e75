"""Fetching one batch: what is checked, and what counts as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import google_crc32c
import pytest
from memory_objects import MemoryObjects, failing, location, simulate

from quiver.buffer import fetching
from quiver.buffer.batch import encode_batch
from quiver.buffer.fetching import fetch_batch
from quiver.buffer.types import Batch, Facts, QueueEntry
from quiver.config import BatchCompression
from quiver.errors import BatchLost, Conflict, InvalidName, ObjectsUnavailable

RECORDS = (b"one", b"", b"three" * 100)
DATA = encode_batch(RECORDS, BatchCompression.ZSTD)
LIMIT = 1 << 20
FACTS = Facts(len(DATA), len(RECORDS), google_crc32c.value(DATA), "p")


def fetched(
    facts: Facts = FACTS,
    data: bytes | None = DATA,
    limit: int = LIMIT,
    prepare: Callable[[MemoryObjects], None] = lambda _: None,
) -> tuple[Batch, MemoryObjects]:
    async def scenario() -> tuple[Batch, MemoryObjects]:
        objects = MemoryObjects()
        if data is not None:
            objects.store(location(1), data)
        prepare(objects)
        entry = QueueEntry(7, location(1), (), facts)
        return await fetch_batch(objects, entry, limit, attempt_timeout=5), objects

    return simulate(scenario())


@pytest.mark.parametrize("facts", [FACTS, Facts(), Facts(record_count=3)])
def test_a_batch_comes_with_its_entry_in_one_call(facts: Facts) -> None:
    batch, objects = fetched(facts)
    assert batch.records == RECORDS
    assert batch.entry.sequence == 7
    assert objects.calls.total() == 1


@pytest.mark.parametrize(
    ("facts", "data", "reason"),
    [
        (FACTS, None, "no such object"),
        (Facts(), None, "no such object"),
        (FACTS, DATA + b"x", "bytes, the manifest says"),
        (FACTS, DATA[:10] + bytes([DATA[10] ^ 1]) + DATA[11:], "checksum"),
        (Facts(crc32c=1), DATA, "checksum"),
        (Facts(record_count=4), DATA, "3 records, the manifest says 4"),
        (Facts(), b"", "at byte"),
        (Facts(), DATA[:-1], "at byte"),
        (Facts(object_size=LIMIT + 1), DATA, "the limit"),
        (Facts(), bytes(LIMIT + 1), "the limit"),
    ],
)
def test_what_is_missing_or_not_as_the_entry_says_is_lost(
    facts: Facts, data: bytes | None, reason: str
) -> None:
    with pytest.raises(BatchLost, match=reason) as lost:
        fetched(facts, data)
    assert (lost.value.sequence, lost.value.location) == (7, location(1))


def test_a_batch_that_decompresses_to_too_much_is_lost() -> None:
    bomb = encode_batch([bytes(LIMIT)], BatchCompression.ZSTD)
    with pytest.raises(BatchLost):
        fetched(Facts(), bomb)


def test_an_object_over_the_limit_is_not_downloaded() -> None:
    store: list[MemoryObjects] = []
    with pytest.raises(BatchLost):
        fetched(Facts(), bytes(5000), 1000, store.append)
    assert store[0].bytes_read == 1001


def test_a_large_object_of_unknown_size_comes_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FIRST_READ", 16)
    batch, objects = fetched(Facts())
    assert batch.records == RECORDS
    assert objects.calls == {"get_tail": 1, "get_range": 1}


def test_an_object_written_again_between_its_parts_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "FIRST_READ", 16)

    def prepare(objects: MemoryObjects) -> None:
        objects.before["get_range"] = [failing(Conflict("x"))]

    with pytest.raises(ObjectsUnavailable, match="written again"):
        fetched(Facts(), prepare=prepare)


def test_a_name_that_no_object_can_have_is_lost() -> None:
    def prepare(objects: MemoryObjects) -> None:
        objects.before["get"] = [failing(InvalidName("a b"))]

    with pytest.raises(BatchLost, match="no object can have that name"):
        fetched(prepare=prepare)


def test_a_store_that_fails_is_no_lost_batch() -> None:
    def prepare(objects: MemoryObjects) -> None:
        objects.before["get"] = [failing(ObjectsUnavailable("down"))]

    with pytest.raises(ObjectsUnavailable, match="down"):
        fetched(prepare=prepare)


def test_a_store_that_does_not_answer_is_given_up() -> None:
    async def hang(_path: str) -> None:
        await asyncio.sleep(3600)

    def prepare(objects: MemoryObjects) -> None:
        objects.before["get"] = [hang]

    with pytest.raises(ObjectsUnavailable, match="no answer within 5 s"):
        fetched(prepare=prepare)
