"""The calls that change a disk: a log of them, a hook around each, and errors in their place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

CallKind: TypeAlias = Literal[
    "create",
    "append",
    "truncate",
    "sync",
    "rename",
    "unlink",
    "make_directory",
    "sync_dir",
    "make_read_only",
]


class Call(NamedTuple):
    """One call that may have changed the disk."""

    kind: CallKind
    path: Path
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.detail}".rstrip()


Hook: TypeAlias = Callable[[Call], None]


class Fault(NamedTuple):
    """An error that waits for its call. What ``partial`` counts is said at ``fail_call``."""

    errno_value: int
    partial: int


class CallRecorder:
    """What ``SimulatedDisk`` does around each mutating call.

    A call that its arguments doom (no such file, a closed handle) changes nothing, and so it is not
    logged, does not run the hooks and does not use up a fault.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.before_call: Hook | None = None
        self.after_call: Hook | None = None  # runs when the call failed, too
        self._call_count = 0
        self._faults: dict[int, Fault] = {}

    @property
    def faults_waiting(self) -> int:
        """How many errors were ordered and have not struck yet."""
        return len(self._faults)

    def fail_call(self, n: int, errno_value: int, *, partial: int | None = None) -> None:
        """Let the ``n``-th mutating call from now on raise ``OSError``; 1 is the next one.

        A failed call does nothing, with two exceptions. ``append`` first writes ``partial`` bytes.
        ``sync`` and ``sync_dir`` forget what was pending after the first ``partial`` pieces: it is
        still read by this process, but no later sync makes it durable.
        """
        if n < 1:
            raise ValueError(f"calls are counted from 1, not {n}")
        self._faults[self._call_count + n] = Fault(errno_value, partial or 0)

    @contextlib.contextmanager
    def call(
        self,
        kind: CallKind,
        path: Path,
        detail: str = "",
        *,
        target: Path | None = None,
        on_fault: Callable[[int], None] | None = None,
    ) -> Iterator[None]:
        """Surround one change: log, hooks, and the fault in its place if one waits for it."""
        call = Call(kind, path, detail)
        if self.before_call:
            self.before_call(call)
        self.calls.append(call)
        self._call_count += 1
        fault = self._faults.pop(self._call_count, None)
        try:
            if fault:
                if on_fault:
                    on_fault(fault.partial)
                raise os_error(fault.errno_value, path, target)
            yield
        finally:
            if self.after_call:
                self.after_call(call)


def os_error(errno_value: int, path: Path | None = None, target: Path | None = None) -> OSError:
    """The error of a system call, of the subclass that belongs to its number."""
    reason = os.strerror(errno_value)
    if path is None:
        return OSError(errno_value, reason)
    if target is None:
        return OSError(errno_value, reason, str(path))
    return OSError(errno_value, reason, str(path), None, str(target))
