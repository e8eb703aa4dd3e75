"""An event loop whose time jumps: hours of timeouts and retries in milliseconds, always the same.

``run`` takes the place of ``asyncio.run``. Time stands still while anything can run, and jumps to
the next timer when nothing can. When there is no timer either, nobody will ever wake anybody up:
that is a ``Deadlock``, and the tasks that wait are named.

With ``shuffle`` the callbacks that are ready run in an order drawn by lot. Every order is one that
a program has to bear whose tasks wait for something outside, and a seed finds it again. Streams and
transports of asyncio count on the order, so they have no place in such a test.

A callback that raises, which asyncio would only log, makes ``run`` fail at its end.

Nothing may come from outside the loop: no threads, sockets or processes. A future that only a
thread resolves looks like a deadlock.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final, TypeVar, cast

_T = TypeVar("_T")

EPOCH_MS: Final = 1_800_000_000_000  # what the wall clock shows when virtual time is 0


class Deadlock(Exception):
    """Nothing is ready, and no timer is set."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits. ``shuffler`` decides the order of what is ready."""

    def __init__(self, shuffler: random.Random | None = None) -> None:
        self._virtual_time = 0.0
        self._shuffler = shuffler
        self.callback_errors: list[Exception] = []
        super().__init__(_JumpingSelector(self))
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._virtual_time

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._virtual_time += seconds

    def waiting(self) -> list[str]:
        """The names of the tasks that are not done, with the place where each one waits."""
        return sorted(_describe(task) for task in asyncio.all_tasks(self))

    def _on_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            self.callback_errors.append(error)
        else:
            self.default_exception_handler(context)

    def _run_once(self) -> None:
        if self._shuffler:
            # asyncio has no other place to say it. Timers join later, in the order of their time;
            # the tasks that they wake are ready for the next round, and are shuffled then.
            ready = cast("deque[Any]", self._ready)  # type: ignore[attr-defined] # not public
            order = list(ready)
            self._shuffler.shuffle(order)
            ready.clear()
            ready.extend(order)
        super()._run_once()  # type: ignore[misc] # not public


class _JumpingSelector(selectors.SelectSelector):
    """Where a loop waits, time passes at once instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise Deadlock(
                "nothing is ready and no timer is set; " + "; ".join(self._loop.waiting())
            )
        if not events and timeout:
            self._loop.jump(timeout)
        return events


def run(main: Coroutine[Any, Any, _T], *, seed: int | str = 0, shuffle: bool = False) -> _T:
    """Run a coroutine to its end in virtual time, then cancel what is left, as asyncio does."""
    # Repeatable, not secret.
    shuffler = random.Random(f"virtual time {seed}") if shuffle else None  # noqa: S311
    loop = VirtualTimeLoop(shuffler)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main)
    if loop.callback_errors:
        raise ExceptionGroup("callbacks failed", loop.callback_errors)
    return result


def now_ms() -> int:
    """A wall clock that goes with the running loop, in milliseconds since 1970."""
    return EPOCH_MS + round(asyncio.get_running_loop().time() * 1000)


def _describe(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return f"{task.get_name()} waits"
    code = frames[-1].f_code
    return f"{task.get_name()} waits in {code.co_qualname}, line {frames[-1].f_lineno}"
