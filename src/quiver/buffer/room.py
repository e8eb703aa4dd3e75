"""How much a producer may hold: calls and bytes, and who waits for room, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quiver.errors import QueueError


class Room:
    """Space for so many calls with so many bytes.

    A call that is larger than all of it may enter when it is empty: it could never otherwise.
    """

    def __init__(self, max_calls: int, max_bytes: int, when_full: Callable[[], None]) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._when_full = when_full
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.calls = 0
        self.bytes = 0

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    async def enter(self, size: int) -> None:
        """Wait until there is room, behind those who wait already, and take it."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        entered = asyncio.get_running_loop().create_future()
        self._waiting.append((size, entered))
        self._when_full()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled() and entered.exception() is None:
                self.leave(1, size)
            else:
                self._let_in()  # it may have stood in front of one that fits
            raise

    def leave(self, calls: int, size: int) -> None:
        """Give room back."""
        self.calls -= calls
        self.bytes -= size
        self._let_in()

    def refuse(self, error: QueueError) -> None:
        """Send everybody away who waits."""
        while self._waiting:
            _size, entered = self._waiting.popleft()
            if not entered.done():
                entered.set_exception(error)

    def _let_in(self) -> None:
        while self._waiting:
            size, entered = self._waiting[0]
            if entered.done():  # cancelled
                self._waiting.popleft()
                continue
            if not self._fits(size):
                return
            self._waiting.popleft()
            self._take(size)
            entered.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.calls or (
            self.calls < self._max_calls and self.bytes + size <= self._max_bytes
        )

    def _take(self, size: int) -> None:
        self.calls += 1
        self.bytes += size
