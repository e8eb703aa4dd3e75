"""An object store in memory that is slow, loses answers and delivers twice: ``SimulatedObjects``.

All chance comes from one ``random.Random`` and all waiting from the event loop, so a run under
``quiver.testing.virtual_time`` takes no time and is the same each time. What can go wrong with a
call, other than its own outcome:

==============  ===========================  ===================================================
``Fault``       it happens                   the caller gets
==============  ===========================  ===================================================
``LOST``        never                        ``ObjectsUnavailable``
``UNANSWERED``  once                         ``ObjectsUnavailable``
``REPEATED``    twice, a little later again  the second answer: ``Conflict``, for a ``put_if``
                                             that has met itself
``LATE``        once, long after the answer  ``ObjectsUnavailable``
``SLOW``        once                         its outcome, after a long time; what is slow is the
                                             way there or the way back
==============  ===========================  ===================================================

A request that was sent arrives, also when its caller has stopped waiting: a timeout says nothing
about a write.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from quiver.buffer.directory_objects import check_path
from quiver.buffer.objects import Fetched, ObjectInfo, Version
from quiver.errors import Conflict, ObjectNotFound, ObjectsUnavailable
from quiver.testing.virtual_time import now_ms as virtual_now_ms

_T = TypeVar("_T")

Kind: TypeAlias = Literal[
    "get", "get_tail", "get_range", "put", "put_if", "list_children", "delete"
]


class Fault(enum.StrEnum):
    """What goes wrong with a call; see the table above."""

    LOST = "lost"
    UNANSWERED = "unanswered"
    REPEATED = "repeated"
    LATE = "late"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How likely each of them is, from 0 to 1; together at most 1."""

    lost: float = 0.0
    unanswered: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    slow: float = 0.0

    def __post_init__(self) -> None:
        chances = [getattr(self, fault.value) for fault in Fault]
        if min(chances) < 0 or sum(chances) > 1:
            raise ValueError(f"these are no probabilities: {self}")

    def draw(self, generator: random.Random) -> Fault | None:
        """One of them, or none."""
        left = generator.random()
        for fault in Fault:
            left -= getattr(self, fault.value)
            if left < 0:
                return fault
        return None


NO_FAULTS = Faults()


class ObjectCall(NamedTuple):
    """A call in the log: when it reached the store, and what it did there."""

    at: float
    kind: Kind
    path: str
    """The first path of a ``delete``."""
    outcome: str
    """``done``, or the name of the error; ``arrives`` before that, ``never arrived`` if lost."""
    fault: Fault | None = None

    def __str__(self) -> str:
        fault = f" ({self.fault})" if self.fault else ""
        return f"{self.at:.3f} {self.kind} {self.path}: {self.outcome}{fault}"


class _Stored(NamedTuple):
    data: bytes
    version: Version
    modified_ms: int


class _Order(NamedTuple):
    """A fault that waits for its call."""

    fault: Fault
    kind: Kind | None
    path: str | None


class _Outcome(NamedTuple, Generic[_T]):
    """A result or an error, on its way back."""

    value: _T | None
    error: Exception | None


class SimulatedObjects:
    """``Objects`` in memory. Without ``faults`` it is only slow.

    ``latency`` bounds one way, there or back, and ``slow`` what ``SLOW`` and ``LATE`` add to it, in
    seconds. ``faults`` holds for all calls, or for those of a kind.
    """

    def __init__(
        self,
        random: random.Random,
        *,
        latency: tuple[float, float] = (0.005, 0.05),
        slow: tuple[float, float] = (5.0, 90.0),
        faults: Faults | Mapping[Kind, Faults] = NO_FAULTS,
        now_ms: Callable[[], int] = virtual_now_ms,
    ) -> None:
        self.faults = faults
        self.calls: list[ObjectCall] = []
        self.on_arrival: Callable[[ObjectCall], None] | None = None
        """Called when a call reaches the store, before it does anything. It may plant or remove
        objects, as somebody else would just then, and raise what the caller shall get."""
        self._random = random
        self._latency = latency
        self._slow = slow
        self._now_ms = now_ms
        self._objects: dict[str, _Stored] = {}
        self._writes = 0
        self._orders: list[_Order] = []

    # --- What a test does ---------------------------------------------------------------------

    def order(self, fault: Fault, kind: Kind | None = None, path: str | None = None) -> None:
        """Let this happen to the next call of the kind and path; None: of any."""
        self._orders.append(_Order(fault, kind, path))

    def plant(self, path: str, data: bytes) -> Version:
        """Write at once, as somebody else would."""
        check_path(path)
        self._writes += 1
        version = Version(f"v{self._writes}")
        self._objects[path] = _Stored(bytes(data), version, self._now_ms())
        return version

    def remove(self, path: str) -> None:
        """Delete at once, as somebody else would."""
        self._objects.pop(path, None)

    def peek(self, path: str) -> bytes | None:
        """What is there now; None for nothing."""
        stored = self._objects.get(path)
        return None if stored is None else stored.data

    def paths(self) -> list[str]:
        """All objects, sorted."""
        return sorted(self._objects)

    # --- Objects ------------------------------------------------------------------------------

    async def get(self, path: str, *, unless: Version | None = None) -> Fetched | None:
        return await self._call("get", path, lambda: self._fetch(path, 0, None, unless))

    async def get_tail(
        self, path: str, length: int, *, unless: Version | None = None
    ) -> Fetched | None:
        if length < 1:
            raise ValueError(f"the last {length} bytes of an object cannot be asked for")
        return await self._call("get_tail", path, lambda: self._fetch(path, -length, None, unless))

    async def get_range(self, path: str, start: int, end: int, *, version: Version) -> Fetched:
        if not 0 <= start < end:
            raise ValueError(f"bytes {start} to {end} are no range")

        def apply() -> Fetched:
            found = self._fetch(path, start, end, None)
            if found is None or found.version != version:
                raise Conflict(f"{path} is not the version that was read before")
            return found

        return await self._call("get_range", path, apply)

    async def put(self, path: str, data: bytes) -> Version:
        return await self._call("put", path, lambda: self.plant(path, data))

    async def put_if(self, path: str, data: bytes, expected: Version | None) -> Version:
        def apply() -> Version:
            stored = self._objects.get(path)
            if expected != (None if stored is None else stored.version):
                raise Conflict(f"{path} is not the version that was expected")
            return self.plant(path, data)

        return await self._call("put_if", path, apply)

    async def list_children(self, prefix: str) -> Sequence[ObjectInfo]:
        def apply() -> list[ObjectInfo]:
            return [
                ObjectInfo(path, len(stored.data), stored.modified_ms)
                for path, stored in sorted(self._objects.items())
                if path.startswith(prefix + "/") and "/" not in path[len(prefix) + 1 :]
            ]

        return await self._call("list_children", prefix, apply)

    async def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            check_path(path)
        if not paths:
            return

        def apply() -> None:
            for path in paths:
                self.remove(path)

        await self._call("delete", paths[0], apply)

    # --- How a call goes ----------------------------------------------------------------------

    async def _call(self, kind: Kind, path: str, apply: Callable[[], _T]) -> _T:
        check_path(path)
        fault = self._fault(kind, path)
        there, back = self._one_way(), self._one_way()
        delay = self._random.uniform(*self._slow) if fault in {Fault.SLOW, Fault.LATE} else 0.0
        if fault is Fault.SLOW and self._random.random() < 0.5:  # noqa: PLR2004 - even odds
            back, delay = back + delay, 0.0
        call = ObjectCall(0.0, kind, path, "arrives", fault)
        if fault is Fault.LOST:
            await asyncio.sleep(there + back)
            self._log(call, "never arrived")
            raise ObjectsUnavailable(f"{kind} of {path} did not arrive")
        answer = self._send(there + delay, call, apply)
        if fault is Fault.LATE:
            await asyncio.sleep(there + back)
            raise ObjectsUnavailable(f"{kind} of {path} was not answered")
        if fault is Fault.REPEATED:
            answer = self._send(there + back + self._one_way(), call, apply)
        outcome = await answer
        await asyncio.sleep(back)
        if fault is Fault.UNANSWERED:
            raise ObjectsUnavailable(f"{kind} of {path} was not answered")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value] # None only where it is the result

    def _send(
        self, delay: float, call: ObjectCall, apply: Callable[[], _T]
    ) -> asyncio.Future[_Outcome[_T]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Outcome[_T]] = loop.create_future()
        loop.call_later(delay, self._arrive, call, apply, answer)
        return answer

    def _arrive(
        self, call: ObjectCall, apply: Callable[[], Any], answer: asyncio.Future[_Outcome[Any]]
    ) -> None:
        outcome: _Outcome[Any]
        try:
            if self.on_arrival:
                self.on_arrival(call._replace(at=asyncio.get_running_loop().time()))
            outcome = _Outcome(apply(), None)
        except Exception as error:  # noqa: BLE001 - a caller waits for it, whatever it is
            outcome = _Outcome(None, error)
        self._log(call, type(outcome.error).__name__ if outcome.error else "done")
        if not answer.done():  # a caller that stopped waiting has cancelled it
            answer.set_result(outcome)

    def _fetch(
        self, path: str, start: int, end: int | None, unless: Version | None
    ) -> Fetched | None:
        stored = self._objects.get(path)
        if stored is None:
            raise ObjectNotFound(f"there is no {path}")
        if stored.version == unless:
            return None
        return Fetched(stored.data[start:end], stored.version, len(stored.data))

    def _fault(self, kind: Kind, path: str) -> Fault | None:
        for order in self._orders:
            if order.kind in {None, kind} and order.path in {None, path}:
                self._orders.remove(order)
                return order.fault
        faults = self.faults
        chances = faults if isinstance(faults, Faults) else faults.get(kind, NO_FAULTS)
        return chances.draw(self._random)

    def _one_way(self) -> float:
        return self._random.uniform(*self._latency)

    def _log(self, call: ObjectCall, outcome: str) -> None:
        at = asyncio.get_running_loop().time()
        self.calls.append(call._replace(at=at, outcome=outcome))
