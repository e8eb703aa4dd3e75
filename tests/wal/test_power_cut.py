"""What was acknowledged survives a power cut at any point, also during the recovery from another.

The promises checked on every disk that a power cut may leave:

* the log opens;
* every entry whose sync returned, and that the cursor has not passed, is replayed once, in order;
* no sequence number and no position that was given out before is given out again;
* the log takes entries again, and they are there the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from bundles import numbers
from logs import WAL, values
from planted import Believed, rotate_without_directory_sync, start_without_sync

from quiver.bundle import RecordBundle
from quiver.config import WalConfig
from quiver.disk import Disk
from quiver.testing import SimulatedDisk, error_loop, explore
from quiver.wal import recovery, scan, writer
from quiver.wal.entry import prepare_entry
from quiver.wal.replay import ReplayedEntry
from quiver.wal.writer import Appended, WalWriter

SEED = 20261115
CONFIG = WalConfig(rotation_target=4000, max_size=100_000)


@dataclass(frozen=True)
class Promise:
    """An entry that must be replayed, or from now on need not be."""

    index: int
    appended: Appended
    forgotten: bool = False


Acknowledge = Callable[[Promise], None]


def bundle(index: int) -> RecordBundle:
    return RecordBundle.from_batches(
        {30: numbers(*range(index, index + 120))}, ingestion_time_ns=index
    )


def append(log: WalWriter, indices: Sequence[int], acknowledge: Acknowledge) -> list[Appended]:
    appended = log.append([prepare_entry(bundle(i)) for i in indices])
    log.sync()
    for index, place in zip(indices, appended, strict=True):
        acknowledge(Promise(index, place))
    return appended


def forget(log: WalWriter, promise: Promise, acknowledge: Acknowledge) -> None:
    """Move the cursor; from the call on, what it passes may be gone."""
    acknowledge(Promise(promise.index, promise.appended, forgotten=True))
    log.advance_cursor(promise.appended.end_position)


def life_of_a_log(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    log = WalWriter.open(disk, WAL, CONFIG)
    append(log, [0], acknowledge)
    append(log, [1, 2], acknowledge)  # fills the first file
    third = append(log, [3], acknowledge)[0]  # rotates
    forget(log, Promise(3, third), acknowledge)  # deletes the first file
    append(log, [4], acknowledge)
    log.append([prepare_entry(bundle(5))])  # never synced, never promised


def open_twice(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    life_of_a_log(disk, acknowledge)
    log = WalWriter.open(disk, WAL, CONFIG)
    append(log, [6], acknowledge)


def check(disk: Disk, promises: Sequence[Promise]) -> None:
    found: list[ReplayedEntry] = []
    log = WalWriter.open(disk, WAL, CONFIG, on_entry=found.append)
    replayed = values(found)
    assert replayed == sorted(set(replayed)), "entries came twice or out of order"
    forgotten = max((p.appended.end_position for p in promises if p.forgotten), default=0)
    for promise in promises:
        if promise.appended.position >= forgotten:
            assert promise.index in replayed, f"entry {promise.index} is lost"
        assert promise.appended.sequence < log.next_sequence, "a number comes twice"
        assert promise.appended.end_position <= log.end_position, "a position comes twice"
    again = log.append([prepare_entry(bundle(99))])[0]
    log.sync()
    last: list[ReplayedEntry] = []
    reopened = WalWriter.open(disk, WAL, CONFIG, on_entry=last.append)
    assert values(last) == [*replayed, 99]
    assert (last[-1].entry.sequence, last[-1].position) == again[:2]
    assert reopened.recovery.cut_bytes == 0


@pytest.mark.parametrize("script", [life_of_a_log, open_twice])
def test_power_cut_at_every_call(script: Callable[..., None]) -> None:
    report = explore(script, check, limit_per_point=1000, seed=SEED)
    assert report.points > 20
    assert report.states > 200
    assert report.violations == [], str(report)


def test_power_cut_during_recovery() -> None:
    """From a sample of disks that need mending, cut the power at every call of the recovery."""
    disk = SimulatedDisk()
    promises: list[Promise] = []
    life_of_a_log(disk, promises.append)
    states = 0
    for broken in disk.crash_states(limit=25, seed=SEED):
        choice = broken.choice
        assert choice is not None
        report = explore(
            lambda d, _acknowledge: _recover(d),
            lambda d, _promises: check(d, promises),
            limit_per_point=10,
            seed=SEED,
            new_disk=lambda choice=choice: disk.crash_state(choice),  # type: ignore[misc]
        )
        assert report.violations == [], str(report)
        states += report.states
    assert states > 200


def _recover(disk: SimulatedDisk) -> None:
    WalWriter.open(disk, WAL, CONFIG).close()


def test_every_call_fails_in_turn() -> None:
    report = error_loop(open_twice, check, seed=SEED)
    assert report.points > 50
    assert report.violations == [], str(report)


def _any_sum(_data: object) -> Believed:
    return Believed()


def _acknowledge_before_sync(log: WalWriter) -> int:
    return log.end_position


@pytest.mark.parametrize(
    ("module", "name", "bug"),
    [
        (writer, "retire_file", rotate_without_directory_sync),
        (writer, "start_file", start_without_sync),
        (writer.WalWriter, "sync", _acknowledge_before_sync),
        (recovery, "_last_sequence", lambda _disk, _files: -1),
        (scan, "crc32", _any_sum),
    ],
    ids=["rename not synced", "name not synced", "ack before sync", "number again", "no sums"],
)
def test_planted_bugs_are_caught(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, bug: Callable[..., object]
) -> None:
    """The exploration can fail: each of these makes it."""
    monkeypatch.setattr(module, name, bug)
    report = explore(life_of_a_log, check, limit_per_point=100, seed=SEED)
    assert report.violations, str(report)
