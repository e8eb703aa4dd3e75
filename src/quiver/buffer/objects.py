"""What the queue needs of an object store, and nothing more.

Everything above this file talks to ``Objects``; ``obstore`` stands behind one implementation, a
directory and a simulated store behind others. All calls are coroutines.

==================  ========================================================================
``get``             an object with its version; None when ``unless`` is its version still
``get_tail``        its last bytes only, the same way
``get_range``       some of its bytes, if it still has the version that was named
``put``             write it, whatever is there
``put_if``          write it if the one that is there has this version; None: if none is there
``list_children``   the objects directly below a prefix, not those below another ``/``
``delete``          remove objects; those that are not there already are no error
==================  ========================================================================

An error of a write says whether it may have happened all the same: ``Conflict`` and
``ObjectNotFound`` never mean that it surely did not, because a store that answers late is asked
again by the client library below, which then meets its own first attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType, Protocol

Version = NewType("Version", str)
"""Which write an object comes from. Only good for comparing."""


class Fetched(NamedTuple):
    """Bytes of an object; ``size`` is that of the whole object."""

    data: bytes
    version: Version
    size: int


class ObjectInfo(NamedTuple):
    """An object in a listing."""

    path: str
    size: int
    modified_ms: int


class Objects(Protocol):
    """An object store. Paths are relative to its root, without a leading slash.

    Raises ``ObjectNotFound``, ``Conflict`` (``put_if``, ``get_range``) and ``ObjectsUnavailable``
    (everything else that went wrong: a write may or may not have happened).
    """

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None: ...

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None: ...

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched: ...

    async def put(self, path: str, data: bytes) -> Version: ...

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version: ...

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]: ...

    async def delete(self, paths: Sequence[str]) -> None: ...
