"""What the store acknowledged survives a power cut at any point, and any call that fails.

The promises checked on every disk that a power cut may leave (``stores.check``):

* the store opens;
* every acknowledged bundle that a registered subscriber has not resolved is delivered to it, to the
  last value; what it resolved durably is not delivered again;
* who registered is known, who left is not;
* no sequence number and no segment number that was given out before is given out again;
* the store takes another bundle and delivers it after another restart.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import stores
from logs import flip
from planted import Believed, rotate_without_directory_sync, start_without_sync
from store_protocols import FAILURES, PROTOCOLS, killed_finalise
from stores import CONFIG, ROOT, Fact, Session, check, check_losses, open_core, take

from quiver.config import Ack, WalConfig
from quiver.disk import BytesLike, Disk
from quiver.errors import QuiverError, WalPoisoned
from quiver.segment import writer as segment_writer
from quiver.store import core, ledger, retention
from quiver.store.core import Start, StoreCore
from quiver.store.intake import Intake
from quiver.store.ledger import Ledger
from quiver.store.segments import SegmentInfo, SegmentSet
from quiver.subscriber import progress, registry
from quiver.subscriber.progress import progress_path
from quiver.subscriber.registry import Registry
from quiver.testing import SimulatedDisk, error_loop, explore
from quiver.testing.calls import Call
from quiver.testing.crash import Violation
from quiver.wal import scan, writer
from quiver.wal.entry import PreparedEntry
from quiver.wal.recovery import OnEntry, Recovery, recover
from quiver.wal.writer import Appended, WalWriter

SEED = 20261115
SHORT = {"append", "rotate", "finalise", "expire"}
LONG = {"reclaim", "drop oldest"}


@pytest.mark.parametrize("name", [*PROTOCOLS, *list(FAILURES)[::3]])
def test_power_cut_at_every_call(name: str) -> None:
    """A sample of the states at each point; ``make crash`` looks at many more."""
    script = {**PROTOCOLS, **FAILURES}[name]
    report = explore(script, check, limit_per_point=3 if name in LONG else 6, seed=SEED)
    assert report.points > 30
    assert report.states > 60
    assert report.violations == [], str(report)


@pytest.mark.parametrize("name", ["cursor", "failed sync"])
def test_power_cut_during_recovery(name: str) -> None:
    """From a sample of disks that need mending, cut the power at every call of the opening."""
    disk = SimulatedDisk()
    facts: list[Fact] = []
    broken: list[tuple[SimulatedDisk, list[Fact]]] = []

    def cut_power(_call: Call) -> None:
        if len(disk.calls) % 12 == 0:
            states = disk.crash_states(limit=2, seed=SEED)
            broken.extend((state, list(facts)) for state in states)

    disk.after_call = cut_power
    {**PROTOCOLS, **FAILURES}[name](disk, facts.append)
    found = 0
    for state, promised in broken:
        report = explore(
            lambda d, _tell: open_core(d).close(),
            lambda d, _facts, promised=promised: check(d, promised),  # type: ignore[misc]
            limit_per_point=3,
            seed=SEED,
            new_disk=lambda state=state: state.crash_state(()),  # type: ignore[misc]
        )
        assert report.violations == [], str(report)
        found += report.states
    assert found > 100


# --- errors -----------------------------------------------------------------------------------


def _used_disk() -> SimulatedDisk:
    """A disk with an empty store: the first opening has a test of its own."""
    disk = SimulatedDisk()
    open_core(disk).close()
    return disk


@functools.cache
def _errors(name: str) -> list[tuple[Call, Violation]]:
    """What went wrong when calls failed in turn and were made again, with the call that failed."""
    script = PROTOCOLS[name]
    calm = _used_disk()
    before = len(calm.calls)
    script(calm, lambda _fact: None)
    found = []
    kinds: list[tuple[int, int | None]] = [(errno.EIO, None), (errno.ENOSPC, 1)]
    for error, partial in kinds if name in SHORT else kinds[:1]:
        report = error_loop(
            script,
            check,
            errors=[error],
            partials=[partial],
            limit_per_run=1,
            seed=SEED,
            new_disk=_used_disk,
        )
        assert report.points > 15
        for violation in report.violations:
            assert violation.injected is not None
            found.append((calm.calls[before + violation.injected.call - 1], violation))
    return found


def _is_directory_sync(call: Call) -> bool:
    return call.kind == "sync_dir"


def _together(name: str, *marks: pytest.MarkDecorator) -> object:
    """Tests of one protocol run in one worker, so that its errors are explored once."""
    slow = [pytest.mark.slow] if name in LONG else []
    group = pytest.mark.xdist_group(f"errors of {name}")
    return pytest.param(name, marks=[group, *slow, *marks])


@pytest.mark.parametrize("name", [_together(name) for name in PROTOCOLS])
def test_every_call_fails_in_turn_and_is_made_again(name: str) -> None:
    """All but the syncs of directories."""
    assert [found for found in _errors(name) if not _is_directory_sync(found[0])] == []


@pytest.mark.parametrize("name", [_together(name) for name in PROTOCOLS])
def test_every_directory_sync_fails_in_turn_and_is_made_again(name: str) -> None:
    assert [found for found in _errors(name) if _is_directory_sync(found[0])] == []


def test_a_store_that_stops_at_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tries again: what was acknowledged before the error is there."""
    monkeypatch.setattr(stores, "ATTEMPTS", 1)
    for name in ("append", "finalise"):
        report = error_loop(
            PROTOCOLS[name], check, errors=[errno.EIO], partials=[1], limit_per_run=2, seed=SEED
        )
        assert report.points > 25
        assert report.violations == [], str(report)


# --- defects that these explorations found ------------------------------------------------------


def _first_opening(disk: SimulatedDisk, tell: stores.Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.take(0)


def test_the_first_opening_fails_and_is_made_again() -> None:
    report = error_loop(_first_opening, check, limit_per_run=4, seed=SEED)
    assert report.violations == [], str(report)


def test_a_process_ends_before_the_name_of_a_segment_is_durable() -> None:
    report = explore(killed_finalise, check, limit_per_point=16, seed=SEED)
    assert report.violations == [], str(report)


@pytest.mark.parametrize("name", ["drop oldest", "expire", "unregister"])
def test_what_is_dropped_is_counted(name: str) -> None:
    report = explore(PROTOCOLS[name], check_losses, limit_per_point=8, seed=SEED)
    assert report.violations == [], str(report)


def test_a_store_that_cannot_be_closed_lets_the_lock_go() -> None:
    disk = SimulatedDisk()
    open_store = open_core(disk, replace(CONFIG, ack=Ack.WRITTEN))
    take(open_store, [0])
    disk.fail_call(1, errno.EIO)  # the segment
    disk.fail_call(2, errno.EIO)  # the sync of the log
    with pytest.raises((OSError, QuiverError)):
        open_store.close()
    open_core(disk)


def test_a_subscriber_with_a_damaged_file_stays_known() -> None:
    disk = SimulatedDisk()
    first = open_core(disk)
    first.register("a", Start.earliest())
    take(first, [0])
    first.close()
    flip(disk, progress_path(ROOT, "a"), 20)
    for _ in range(2):
        again = open_core(disk)
        assert [info.subscriber_id for info in again.registry.infos()] == ["a"]
        again.close()


# --- planted bugs -------------------------------------------------------------------------------


def _publish(*, sync: bool = True, sync_dir: bool = True) -> Callable[..., int]:
    """``publish`` without one of its steps."""

    def publish(disk: Disk, path: Path, buffers: Iterable[BytesLike], **_options: object) -> int:
        temporary = path.with_name(path.name + ".tmp")
        file = disk.create(temporary)
        file.append(list(buffers))
        if sync:
            file.sync()
        disk.rename(temporary, path)
        if sync_dir:
            disk.sync_dir(path.parent)
        return file.size

    return publish


def _sync_later(taking: Intake, entries: list[PreparedEntry]) -> list[Appended]:
    """Acknowledge a group before the sync that covers it."""
    taking.wal.sync()
    return taking.wal.append(entries)


def _move_cursor_first(taking: Intake) -> SegmentInfo | None:
    growing = taking._frozen[0]
    if growing.end_position is not None and growing.end_position > taking.wal.cursor:
        taking.wal.advance_cursor(growing.end_position)
    return _FINALISE(taking)


def _give_up_when_writing_fails(taking: Intake) -> SegmentInfo | None:
    """Go on with the next segment, which takes the cursor past the one that failed."""
    try:
        return _FINALISE(taking)
    except OSError:
        taking._frozen.popleft()
        raise


def _overlook_errors(log: WalWriter) -> int:
    """Try a failed sync again, which succeeds and means nothing."""
    try:
        return _SYNC(log)
    except WalPoisoned:
        log._poison = None
        return _SYNC(log)


def _scan_without_numbers(found: SegmentSet) -> None:
    _SCAN(found)
    found.highest_seen = -1


def _recover_without_numbers(
    disk: Disk, directory: Path, config: WalConfig, on_entry: OnEntry | None
) -> Recovery:
    recovery = recover(disk, directory, config, on_entry)
    recovery.next_sequence = 0
    return recovery


def _remove_from_memory(known: Registry, name: str) -> int:
    return known._subscribers.pop(name).state.unresolved_count()


def _delete_at_once(keeping: retention.Retention, numbers: Iterable[int], _reason: str) -> int:
    """No progress file and no ledger before the files go."""
    chosen = list(numbers)
    keeping.segments.delete(chosen)
    keeping.registry.forget_segments(chosen)
    return len(chosen)


def _deletes_everything(known: Registry) -> list[int]:
    """Complete is what one subscriber has resolved."""
    return [
        number
        for number in known._segments
        if any(s.state.is_complete(number) for s in known._subscribers.values())
    ]


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


_FINALISE = Intake.finalise
_SCAN = SegmentSet.scan
_SYNC = WalWriter.sync
_HIGHEST = StoreCore._highest_sequence


@pytest.mark.parametrize(
    ("script", "target", "name", "bug"),
    [
        ("append", WalWriter, "sync", lambda log: log.end_position),
        ("append", Intake, "_append", _sync_later),
        ("append", writer, "recover", _recover_without_numbers),
        ("append", scan, "crc32", lambda _data: Believed()),
        ("rotate", writer, "retire_file", rotate_without_directory_sync),
        ("rotate", writer, "start_file", start_without_sync),
        ("finalise", segment_writer, "publish", _publish(sync=False)),
        ("finalise", segment_writer, "publish", _publish(sync_dir=False)),
        ("finalise", Intake, "finalise", _move_cursor_first),
        ("register", SegmentSet, "scan", _scan_without_numbers),
        ("failed finalise, call 3", Intake, "finalise", _give_up_when_writing_fails),
        ("failed sync", WalWriter, "sync", _overlook_errors),
        ("progress", progress, "publish", _publish(sync=False)),
        ("progress", Registry, "flush", lambda _known: 0),
        ("register", registry, "store_progress", _nothing),
        ("register", progress, "publish", _publish(sync_dir=False)),
        ("progress", Registry, "complete_segments", _deletes_everything),
        ("reclaim", core, "load_ledger", lambda _disk, _root: Ledger()),
        ("reclaim", retention.Retention, "_delete", _delete_at_once),
        ("reclaim", ledger, "publish", _publish(sync=False)),
        ("unregister", Registry, "remove", _remove_from_memory),
        ("finalise", StoreCore, "_highest_sequence", lambda store: _HIGHEST(store) + 1),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    target: object,
    name: str,
    bug: Callable[..., object],
) -> None:
    """The exploration can fail: each of these makes it."""
    monkeypatch.setattr(target, name, bug)
    limit = 12 if script == "append" else 4
    report = explore({**PROTOCOLS, **FAILURES}[script], check, limit_per_point=limit, seed=SEED)
    assert report.violations, str(report)
