"""An object store in memory that counts, and does on demand what others would just then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ulid import ULID

from quiver.buffer import manifest
from quiver.buffer.batch import encode_batch
from quiver.buffer.names import batch_location
from quiver.buffer.objects import Fetched, ObjectInfo, Objects, Version
from quiver.buffer.types import Metadata, NewEntry
from quiver.config import BatchCompression
from quiver.errors import Conflict, ObjectNotFound
from quiver.testing.virtual_time import EPOCH_MS, now_ms, run

T = TypeVar("T")
START_MS = EPOCH_MS
NAMED_MS = START_MS - 10_000
"""When batch 0 was named; each number is a millisecond later."""
MANIFEST = "ingest/manifest"
PREFIX = "ingest"

Hook = Callable[[str], Awaitable[None]]


def simulate(scenario: Coroutine[Any, Any, T]) -> T:
    """Run it in virtual time."""
    return run(scenario)


class MemoryObjects(Objects):
    """``before`` and ``after`` hold what is to happen around the next calls of a method.

    A hook takes the path; what it raises is what the caller gets. One that raises after a write is
    an answer that got lost.
    """

    def __init__(self, clock: Callable[[], int] = now_ms) -> None:
        self.objects: dict[str, tuple[bytes, Version, int]] = {}
        self.calls: Counter[str] = Counter()
        self.bytes_read = 0
        self.before: dict[str, list[Hook]] = {}
        self.after: dict[str, list[Hook]] = {}
        self.clock = clock
        self._writes = 0

    # --- the protocol ---

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._call("get", path, lambda: self._read(path, 0, None, unless))

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        return await self._call("get_tail", path, lambda: self._read(path, -length, None, unless))

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        def read() -> Fetched:
            if self._at(path)[1] != version:
                raise Conflict(path)
            found = self._read(path, start, end, None)
            assert found is not None
            return found

        return await self._call("get_range", path, read)

    async def put(self, path: str, data: bytes) -> Version:
        return await self._call("put", path, lambda: self.store(path, data))

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        def write() -> Version:
            there = self.objects.get(path)
            if (there[1] if there else None) != expected:
                raise Conflict(path)
            return self.store(path, data)

        return await self._call("put_if", path, write)

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        def listing() -> list[ObjectInfo]:
            return [
                ObjectInfo(path, len(data), modified)
                for path, (data, _version, modified) in self.objects.items()
                if path.startswith(f"{prefix}/") and "/" not in path[len(prefix) + 1 :]
            ]

        return await self._call("list_children", prefix, listing)

    async def delete(self, paths: Sequence[str]) -> None:
        def remove() -> None:
            for path in paths:
                self.objects.pop(path, None)

        await self._call("delete", ",".join(paths), remove)

    # --- for tests ---

    def store(self, path: str, data: bytes) -> Version:
        self._writes += 1
        version = Version(f"v{self._writes}")
        self.objects[path] = (data, version, self.clock())
        return version

    def data(self, path: str) -> bytes:
        return self._at(path)[0]

    def reset_counts(self) -> None:
        self.calls.clear()
        self.bytes_read = 0

    def _at(self, path: str) -> tuple[bytes, Version, int]:
        if path not in self.objects:
            raise ObjectNotFound(path)
        return self.objects[path]

    def _read(
        self, path: str, start: int, end: int | None, unless: Version | None
    ) -> Fetched | None:
        data, version, _modified = self._at(path)
        if version == unless:
            return None
        self.bytes_read += len(data[start:end])
        return Fetched(data[start:end], version, len(data))

    async def _call(self, method: str, path: str, do: Callable[[], T]) -> T:
        self.calls[method] += 1
        await asyncio.sleep(0)
        if hooks := self.before.get(method):
            await hooks.pop(0)(path)
        result = do()
        if hooks := self.after.get(method):
            await hooks.pop(0)(path)
        return result


def failing(error: Exception) -> Hook:
    async def fail(_path: str) -> None:
        raise error

    return fail


def doing(action: Callable[[], object]) -> Hook:
    async def act(_path: str) -> None:
        action()

    return act


def location(number: int, prefix: str = PREFIX, *, time_ms: int | None = None) -> str:
    """The name of a batch; the same number and time make the same name."""
    milliseconds = NAMED_MS + number if time_ms is None else time_ms
    ulid = ULID(milliseconds.to_bytes(6, "big") + number.to_bytes(10, "big"))
    return batch_location(prefix, ulid)


def new_entry(number: int) -> NewEntry:
    return NewEntry(location(number), (Metadata(0, START_MS, b"\1\1\1\0"),))


def enqueue(objects: MemoryObjects, *new: NewEntry, path: str = MANIFEST) -> None:
    """Append as a producer does, in no time."""
    there = objects.data(path) if path in objects.objects else manifest.EMPTY
    objects.store(path, manifest.append(there, new, source=path))


def enqueue_again(objects: MemoryObjects, number: int) -> None:
    """List a batch that is in the manifest already, as producers of other kinds may."""
    data = objects.data(MANIFEST)
    footer = manifest.decode_footer(data, source=MANIFEST)
    empty = footer._replace(entry_count=0).encode()
    entry = manifest.append(empty, [new_entry(number)], source=MANIFEST)[: -manifest.FOOTER_SIZE]
    after = footer._replace(
        entry_count=footer.entry_count + 1, next_sequence=footer.next_sequence + 1
    )
    objects.store(MANIFEST, data[: -manifest.FOOTER_SIZE] + entry + after.encode())


def produce(objects: MemoryObjects, *numbers: int) -> None:
    """Upload batches of one record, ``record {number}``, and list them."""
    for number in numbers:
        data = encode_batch([f"record {number}".encode()], BatchCompression.NONE)
        objects.store(location(number), data)
    enqueue(objects, *(new_entry(number) for number in numbers))
