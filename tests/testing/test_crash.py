"""The explorer finds the mistakes that were made on purpose, and no others."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from quiver.errors import WalPoisoned
from quiver.testing import SimulatedDisk, error_loop, explore, replay

LOG = Path("/log")
RECORD = 600  # bytes: more than a sector, so that a record can tear
SEED = 20261115

Acknowledge = Callable[[int], None]
Script = Callable[[SimulatedDisk, Acknowledge], None]


def record(number: int) -> bytes:
    return bytes([number]) * RECORD


def check_log(disk: SimulatedDisk, acknowledged: Sequence[int]) -> None:
    """All acknowledged records are there, in order, from the start."""
    content = disk.read(LOG).to_pybytes() if disk.exists(LOG) else b""
    expected = b"".join(record(number) for number in acknowledged)
    assert content.startswith(expected), f"record lost, {len(acknowledged)} acknowledged"


def careful(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    file = disk.create(LOG)
    disk.sync_dir(LOG.parent)
    for number in range(1, 5):
        file.append([record(number)])
        file.sync()
        acknowledge(number)


def acknowledges_before_the_sync(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    file = disk.create(LOG)
    disk.sync_dir(LOG.parent)
    for number in range(1, 5):
        file.append([record(number)])
        acknowledge(number)
        file.sync()


def acknowledges_last_and_never_syncs(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    file = disk.create(LOG)
    disk.sync_dir(LOG.parent)
    file.append([record(1)])
    acknowledge(1)


def forgets_the_directory(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    file = disk.create(LOG)
    for number in range(1, 5):
        file.append([record(number)])
        file.sync()
        acknowledge(number)


def cuts_what_was_promised(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
    careful(disk, acknowledge)
    disk.open_append(LOG).truncate(2 * RECORD + 1)


# --- explore ----------------------------------------------------------------------------------


def test_a_careful_script_passes() -> None:
    report = explore(careful, check_log, seed=SEED)
    assert not report.violations, report
    assert report.points == 1 + 2 + 4 * 3  # the start; two calls; two calls and a promise each
    assert report.states > report.points
    assert report.seed == SEED
    assert str(report) == (
        f"{report.states} crash states at 15 points, 0 violations (seed 20261115)"
    )


@pytest.mark.parametrize(
    "script",
    [
        acknowledges_before_the_sync,
        acknowledges_last_and_never_syncs,
        forgets_the_directory,
        cuts_what_was_promised,
    ],
)
def test_a_careless_script_is_found_and_found_again(script: Script) -> None:
    report = explore(script, check_log, seed=SEED)
    assert report.violations
    assert len(str(report).splitlines()) == 1
    assert str(report.violations[0]) in str(report)
    assert [str(v) for v in explore(script, check_log, seed=SEED).violations] == [
        str(v) for v in report.violations
    ]
    for violation in report.violations:
        with pytest.raises(AssertionError, match="record lost"):
            replay(script, check_log, violation)


def test_a_violation_says_where_it_was() -> None:
    first = explore(acknowledges_before_the_sync, check_log, seed=SEED).violations[0]
    assert first.point == 4  # create, sync_dir, append, and then the promise
    assert first.choice == (0,)
    assert first.error == "AssertionError: record lost, 1 acknowledged"
    assert [call.kind for call in first.calls] == ["create", "sync_dir", "append"]
    assert (
        repr(first)
        == str(first)
        == (
            "point 4 after append /log 600 bytes, survivors (0x0): "
            "AssertionError: record lost, 1 acknowledged"
        )
    )


def test_a_violation_of_a_long_write_can_be_printed() -> None:
    def script(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        disk.create(LOG).append([bytes(20_000 * 512)])
        acknowledge(1)

    report = explore(script, check_log, limit_per_point=4, seed=SEED)
    assert "0xfff" in repr(report.violations[-1]) + repr(report.violations)


def test_any_exception_of_a_check_is_a_violation() -> None:
    def check(disk: SimulatedDisk, acknowledged: Sequence[int]) -> None:
        disk.read(LOG)

    report = explore(careful, check, seed=SEED)
    assert {violation.error for violation in report.violations} == {
        "FileNotFoundError: [Errno 2] No such file or directory: '/log'"
    }


def test_the_states_before_and_after_a_promise_are_both_checked() -> None:
    seen: set[tuple[int, int]] = set()

    def check(disk: SimulatedDisk, acknowledged: Sequence[int]) -> None:
        seen.add((disk.size(LOG) // RECORD if disk.exists(LOG) else 0, len(acknowledged)))

    explore(careful, check, seed=SEED)
    assert {(1, 0), (1, 1), (4, 3), (4, 4)} <= seen


def test_an_error_of_the_script_is_not_a_finding() -> None:
    def script(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        disk.unlink(LOG)

    for run in (explore, error_loop):
        with pytest.raises(FileNotFoundError):
            run(script, check_log, seed=SEED)


def test_a_check_may_recover_on_its_disk_and_the_script_does_not_notice() -> None:
    def recover(disk: SimulatedDisk, acknowledged: Sequence[int]) -> None:
        check_log(disk, acknowledged)
        if disk.exists(LOG):
            disk.unlink(LOG)
            disk.sync_dir(LOG.parent)

    assert not explore(careful, recover, seed=SEED).violations


def test_the_power_can_go_again_during_a_recovery() -> None:
    """Which cuts the torn record, and promises again what it found."""

    def recover(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        content = disk.read(LOG).to_pybytes()
        whole = list(
            itertools.takewhile(
                lambda n: content[(n - 1) * RECORD : n * RECORD] == record(n), itertools.count(1)
            )
        )
        file = disk.open_append(LOG)
        file.truncate(len(whole) * RECORD)
        file.sync()
        for number in whole:
            acknowledge(number)

    crashed = SimulatedDisk()
    careful(crashed, lambda _: None)
    crashed.open_append(LOG).append([record(5)])
    for state in crashed.crash_states(seed=SEED):
        report = explore(recover, check_log, seed=SEED, new_disk=partial(state.crash_state, ()))
        assert not report.violations, report


# --- error_loop -------------------------------------------------------------------------------


def test_every_call_fails_in_its_turn() -> None:
    failed: list[str] = []

    def script(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        try:
            careful(disk, acknowledge)
        except OSError as error:
            failed.append(f"{disk.calls[-1].kind} {errno.errorcode[error.errno or 0]}")
            raise

    report = error_loop(script, check_log, partials=(None,), seed=SEED)
    assert not report.violations, report
    calls = ["create", "sync_dir", *["append", "sync"] * 4]
    assert failed == [f"{call} {error}" for error in ("EIO", "ENOSPC") for call in calls]
    assert report.points == len(failed)


def test_a_sync_that_is_tried_again_and_believed_is_found() -> None:
    def stubborn(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        file = disk.create(LOG)
        disk.sync_dir(LOG.parent)
        for number in range(1, 5):
            file.append([record(number)])
            try:
                file.sync()
            except OSError:
                file.sync()
            acknowledge(number)

    assert not explore(stubborn, check_log, seed=SEED).violations
    report = error_loop(stubborn, check_log, seed=SEED)
    found = {violation.injected for violation in report.violations}
    assert {injected.call for injected in found if injected} == {4, 6, 8, 10}
    assert "call 4 failed with EIO after" in str(report)
    for violation in report.violations:
        with pytest.raises(AssertionError, match="record lost"):
            replay(stubborn, check_log, violation)


def test_a_torn_append_that_is_appended_to_is_found() -> None:
    def tries_again(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        file = disk.create(LOG)
        disk.sync_dir(LOG.parent)
        try:
            file.append([record(1)])
        except OSError:
            file.append([record(1)])  # behind the part that the first attempt left
        file.sync()
        acknowledge(1)
        file.append([record(2)])
        file.sync()
        acknowledge(2)

    assert not error_loop(tries_again, check_log, partials=(None,), seed=SEED).violations
    assert error_loop(tries_again, check_log, partials=(1,), seed=SEED).violations


def test_damage_done_while_handling_an_error_is_found() -> None:
    def script(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
        careful(disk, acknowledge)
        file = disk.open_append(LOG)
        try:
            file.append([record(5)])
        except OSError:
            file.truncate(0)  # too much, and nothing is acknowledged afterwards

    assert not explore(script, check_log, seed=SEED).violations
    assert error_loop(script, check_log, seed=SEED).violations


def test_errors_of_quiver_are_expected_and_others_are_not() -> None:
    def failing_with(exception: Exception) -> Script:
        def script(disk: SimulatedDisk, acknowledge: Acknowledge) -> None:
            try:
                disk.create(LOG)
            except OSError:
                raise exception from None

        return script

    assert not error_loop(failing_with(WalPoisoned()), check_log, seed=SEED).violations
    script = failing_with(KeyError("slot"))
    report = error_loop(script, check_log, seed=SEED)
    assert [violation.error for violation in report.violations] == ["KeyError: 'slot'"] * 4
    assert report.violations[0].choice is None
    with pytest.raises(KeyError, match="slot"):
        replay(script, check_log, report.violations[0])
