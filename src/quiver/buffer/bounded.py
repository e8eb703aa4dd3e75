"""An object store whose every call ends in time.

A call that takes longer is an ``ObjectsUnavailable``: nobody knows whether a write happened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

from quiver.buffer.objects import Fetched, ObjectInfo, Objects, Version
from quiver.buffer.retrying import within

Result = TypeVar("Result")


class BoundedObjects(Objects):
    """``objects``, with at most ``seconds`` for each call."""

    def __init__(self, objects: Objects, seconds: float) -> None:
        self._objects = objects
        self._seconds = seconds

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._bounded(path, self._objects.get(path, unless=unless))

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        return await self._bounded(path, self._objects.get_tail(path, length, unless=unless))

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        return await self._bounded(path, self._objects.get_range(path, start, end, version=version))

    async def put(self, path: str, data: bytes) -> Version:
        return await self._bounded(path, self._objects.put(path, data))

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        return await self._bounded(path, self._objects.put_if(path, data, expected))

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        return await self._bounded(prefix, self._objects.list_children(prefix))

    async def delete(self, paths: Sequence[str]) -> None:
        await self._bounded(f"{len(paths)} objects", self._objects.delete(paths))

    async def _bounded(self, what: str, call: Awaitable[Result]) -> Result:
        return await within(self._seconds, what, call)
