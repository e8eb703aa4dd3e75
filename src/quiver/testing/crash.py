"""Cut the power at every point of a script, and fail every call of it, and check what is left.

A *script* does something with a disk and says what must survive from then on::

    def script(disk: SimulatedDisk, acknowledge: Callable[[bytes], None]) -> None:
        publish(disk, Path("/name"), [b"new"])
        acknowledge(b"new")

A *check* is called with a disk as it may be after the restart, and with all that was acknowledged
before the power went. It opens what it finds there, as a recovery does, and raises when the promise
is broken::

    def check(disk: SimulatedDisk, acknowledged: Sequence[bytes]) -> None:
        if acknowledged:
            assert disk.read(Path("/name")) == acknowledged[-1]

Both must do the same each time they are called: only then ``replay`` finds a violation again. Each
run starts with the disk that ``new_disk`` makes, an empty one by default.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from quiver.errors import QuiverError
from quiver.testing.calls import Call
from quiver.testing.disk import SimulatedDisk
from quiver.testing.medium import Choice

Token = TypeVar("Token")
Acknowledge: TypeAlias = Callable[[Token], None]
Script: TypeAlias = Callable[[SimulatedDisk, Acknowledge[Token]], None]
Check: TypeAlias = Callable[[SimulatedDisk, Sequence[Token]], None]
NewDisk: TypeAlias = Callable[[], SimulatedDisk]

_TAIL_CALLS = 8  # as many as the longest protocol of Quiver has, from create to sync_dir


class InjectedError(NamedTuple):
    """The call that failed in a run of ``error_loop``, counted from 1, and how."""

    call: int
    errno_value: int
    partial: int | None

    def __str__(self) -> str:
        partial = "" if self.partial is None else f" after {self.partial}"
        return f"call {self.call} failed with {errno.errorcode[self.errno_value]}{partial}"


@dataclass(frozen=True, slots=True, repr=False)
class Violation:
    """A check that did not hold, and how to see it again: hand it to ``replay``."""

    point: int
    choice: Choice | None
    """Which pieces had survived; ``None`` when the script failed, not the check."""
    error: str
    calls: tuple[Call, ...]
    """The last calls before the point."""
    injected: InjectedError | None = None

    def __str__(self) -> str:
        where = f"point {self.point}" if self.injected is None else str(self.injected)
        last = f" after {self.calls[-1]}" if self.calls else ""
        masks = ", ".join(f"{mask:#x}" for mask in self.choice or ())
        return f"{where}{last}, survivors ({masks}): {self.error}"

    __repr__ = __str__  # a mask may have more digits than Python agrees to print


@dataclass(slots=True)
class ExplorationReport:
    """How much was looked at, and what was wrong."""

    seed: int
    points: int = 0
    """Where the power was cut, or how many runs had an error injected."""
    states: int = 0
    violations: list[Violation] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{self.states} crash states at {self.points} points, "
            f"{len(self.violations)} violations (seed {self.seed})"
        )
        return f"{text}, first: {self.violations[0]}" if self.violations else text


def explore(
    script: Script[Token],
    check: Check[Token],
    *,
    limit_per_point: int = 256,
    seed: int = 0,
    new_disk: NewDisk = SimulatedDisk,
) -> ExplorationReport:
    """Run the script once and cut the power before, between and after all its mutating calls.

    An acknowledgement is a point as well: the disk is the same, but more is promised. A script may
    call ``fail_call`` on its disk, and so combine errors with power cuts. To cut the power during a
    recovery, explore the recovery, from a disk that needs it.
    """
    inspection = _Inspection(check, limit_per_point, seed)
    inspection.report.points = inspection.run(script, new_disk()).points
    return inspection.report


def error_loop(
    script: Script[Token],
    check: Check[Token],
    *,
    errors: Sequence[int] = (errno.EIO, errno.ENOSPC),
    partials: Sequence[int | None] = (None, 1),
    limit_per_run: int = 64,
    seed: int = 0,
    new_disk: NewDisk = SimulatedDisk,
) -> ExplorationReport:
    """Run the script again and again, and fail its first call, its second, until none is left.

    The power is cut at the end of each run, and whenever something is acknowledged in spite of the
    error: it must be there. The script may raise what a user of Quiver is told to expect,
    ``OSError`` or ``QuiverError``; any other exception is a violation. ``partials`` are given to
    ``fail_call``, one run for each.
    """
    inspection = _Inspection(check, limit_per_run, seed)
    for errno_value, partial in itertools.product(errors, partials):
        for call in itertools.count(1):
            disk = new_disk()
            inspection.run(script, disk, InjectedError(call, errno_value, partial))
            if disk.faults_waiting:
                break
            inspection.report.points += 1
    return inspection.report


def replay(
    script: Script[Token],
    check: Check[Token],
    violation: Violation,
    *,
    new_disk: NewDisk = SimulatedDisk,
) -> None:
    """Raise what the violation found, from the same state, for a debugger to stop at."""
    found: list[tuple[SimulatedDisk, Sequence[Token]]] = []

    def keep(point: int, acknowledged: Sequence[Token]) -> None:
        if point == violation.point and violation.choice is not None:
            found.append((disk.crash_state(violation.choice), acknowledged))

    disk = new_disk()
    walk = _Walk(disk, keep, violation.injected)
    walk.run(script)
    for state, acknowledged in found:
        check(state, acknowledged)
    if walk.failure:
        raise walk.failure


class _Walk(Generic[Token]):
    """Runs a script and visits the points where the power is to be cut."""

    def __init__(
        self,
        disk: SimulatedDisk,
        visit: Callable[[int, Sequence[Token]], None],
        injected: InjectedError | None,
    ) -> None:
        self.points = 0
        self.failure: Exception | None = None
        self._disk = disk
        self._visit = visit
        self._injected = injected
        self._acknowledged: list[Token] = []
        self._promises_unvisited = False

    def run(self, script: Script[Token]) -> None:
        self._disk.before_call = lambda _call: self._visit_promises()
        try:
            if self._injected:
                self._run_with_error(script, self._injected)
            else:
                self._disk.after_call = lambda _call: self._visit_point()
                self._visit_point()
                script(self._disk, self._acknowledge)
            self._visit_promises()
        finally:
            self._disk.before_call = self._disk.after_call = None

    def _run_with_error(self, script: Script[Token], injected: InjectedError) -> None:
        self._disk.fail_call(injected.call, injected.errno_value, partial=injected.partial)
        try:
            script(self._disk, self._acknowledge)
        except Exception as error:
            if self._disk.faults_waiting:
                raise  # the script fails by itself
            if not isinstance(error, OSError | QuiverError):
                self.failure = error
        self._promises_unvisited = True  # whatever was promised, it is time to look

    def _acknowledge(self, token: Token) -> None:
        self._acknowledged.append(token)
        self._promises_unvisited = True

    def _visit_promises(self) -> None:
        error_to_come = self._injected is not None and self._disk.faults_waiting
        if self._promises_unvisited and not error_to_come:
            self._visit_point()

    def _visit_point(self) -> None:
        self._promises_unvisited = False
        self._visit(self.points, tuple(self._acknowledged))
        self.points += 1


class _Inspection(Generic[Token]):
    """Checks the states after power cuts and writes the report."""

    def __init__(self, check: Check[Token], limit: int, seed: int) -> None:
        self.report = ExplorationReport(seed)
        self._check = check
        self._limit = limit

    def run(
        self, script: Script[Token], disk: SimulatedDisk, injected: InjectedError | None = None
    ) -> _Walk[Token]:
        def blame(point: int, choice: Choice | None, error: Exception) -> None:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            calls = tuple(disk.calls[-_TAIL_CALLS:])
            self.report.violations.append(Violation(point, choice, what, calls, injected))

        def cut_power(point: int, acknowledged: Sequence[Token]) -> None:
            seed = f"{self.report.seed}/{self.report.points}/{point}"
            for state in disk.crash_states(limit=self._limit, seed=seed):
                self.report.states += 1
                try:
                    self._check(state, acknowledged)
                except Exception as error:  # noqa: BLE001 - a recovery that fails is a finding
                    blame(point, state.choice, error)

        walk = _Walk(disk, cut_power, injected)
        walk.run(script)
        if walk.failure:
            blame(walk.points, None, walk.failure)
        return walk
