"""One script for each protocol of the store, for power cuts and errors at every call of it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import replace
from typing import Final
from unittest import mock

from stores import CONFIG, Acknowledge, Session, bundle

from quiver.config import RetentionConfig, SizeCapPolicy
from quiver.store.core import Start
from quiver.testing import SimulatedDisk
from quiver.wal.entry import prepare_entry

StoreScript = Callable[[SimulatedDisk, Acknowledge], None]

DROPPING: Final = replace(
    CONFIG,
    retention=RetentionConfig(
        min_free_space=0, size_cap=14_000, size_cap_policy=SizeCapPolicy.DROP_OLDEST
    ),
)
EXPIRING: Final = replace(CONFIG, retention=RetentionConfig(min_free_space=0, max_age=10))


def append(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.take(0)
    session.take(1, 2)
    session.core.intake.wal.append([prepare_entry(bundle(3))])  # never synced, never promised


def rotate(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.take(0, 1, 2)  # fills the first file
    session.take(3)
    session.take(4, 5)
    session.take(6)


def finalise(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.take(0, 1)
    session.finalise()
    session.take(2)
    session.finalise()


def cursor(disk: SimulatedDisk, tell: Acknowledge) -> None:
    """The cursor passes whole files, which are deleted."""
    session = Session(disk, tell)
    session.register("a")
    session.take(0, 1, 2)
    session.take(3, 4, 5)
    session.take(6)
    session.finalise()
    session.take(7)
    session.finalise()


def progress(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.register("b")
    session.take(0, 1, 2)
    session.finalise()
    session.resolve("a", 0, 2)
    session.maintain()
    session.resolve("b", 1)
    session.resolve("a", 1)
    session.maintain()


def reclaim(disk: SimulatedDisk, tell: Acknowledge) -> None:
    """Everything is resolved and deleted; in the end only the ledger knows the numbers."""
    session = Session(disk, tell)
    session.register("a")
    session.register("b")
    session.take(0)
    session.finalise()
    session.take(1)
    session.finalise()
    session.resolve("a", 0, 1)
    session.resolve("b", 1)  # out of order
    session.maintain()
    session.resolve("b", 0)
    session.maintain()
    session.unregister("a")
    session.unregister("b")
    session.reopen()
    session.register("c", without=[0, 1])
    session.take(2)
    session.finalise()


def drop_oldest(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.register("b")
    for index in range(3):
        session.take(index)
        session.finalise()
    session.resolve("b", 0)
    session.maintain()
    session.config = DROPPING
    session.reopen()
    session.maintain(may_drop=[0, 1])
    session.config = CONFIG
    session.reopen()
    session.take(3)
    session.finalise()


def expire(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell, EXPIRING)
    session.register("a")
    session.take(0, 1)
    session.finalise()
    session.hand.seconds += 60
    session.maintain(may_drop=[0, 1])
    session.take(2)


def register(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.take(0)
    session.finalise()
    session.register("a")
    session.take(1)
    session.register("b", Start.earliest())
    session.finalise()
    session.resolve("a", 0, 1)
    session.maintain()


def unregister(disk: SimulatedDisk, tell: Acknowledge) -> None:
    session = Session(disk, tell)
    session.register("a")
    session.register("b")
    session.take(0, 1)
    session.finalise()
    session.resolve("a", 0)
    session.maintain()
    session.unregister("b")
    session.maintain()
    session.take(2)


def recovery(disk: SimulatedDisk, tell: Acknowledge) -> None:
    """Processes end without closing the store, between any two steps of a life."""
    session = Session(disk, tell)
    session.register("a")
    session.take(0, 1, 2)
    session.reopen()
    session.take(3)
    session.finalise()
    session.reopen()
    session.resolve("a", 0)
    session.maintain()
    session.core.intake.wal.append([prepare_entry(bundle(4))])
    session.reopen()
    session.take(5)


def failed_finalise(call: int) -> StoreScript:
    """A call fails while a segment is written and the cursor moves; finalising is tried again."""

    def script(disk: SimulatedDisk, tell: Acknowledge) -> None:
        session = Session(disk, tell)
        session.register("a")
        session.take(0, 1, 2)
        session.take(3)
        disk.fail_call(call, errno.EIO)
        session.finalise()
        session.take(4)
        session.finalise()

    return script


def failed_sync(disk: SimulatedDisk, tell: Acknowledge) -> None:
    """A sync of the log fails: nothing was acknowledged, and the log goes on in a new file."""
    session = Session(disk, tell)
    session.register("a")
    session.take(0)
    disk.fail_call(2, errno.EIO)
    session.take(1)
    session.take(2)
    session.finalise()
    session.take(3)


PROTOCOLS: Final[dict[str, StoreScript]] = {
    "append": append,
    "rotate": rotate,
    "finalise": finalise,
    "cursor": cursor,
    "progress": progress,
    "reclaim": reclaim,
    "drop oldest": drop_oldest,
    "expire": expire,
    "register": register,
    "unregister": unregister,
    "recovery": recovery,
}
"""Also for ``error_loop``: these order no error themselves."""

FAILURES: Final[dict[str, StoreScript]] = {
    "failed sync": failed_sync,
    **{f"failed finalise, call {call}": failed_finalise(call) for call in range(1, 20)},
}


class _Killed(Exception):
    """The process ends here."""


def killed_finalise(disk: SimulatedDisk, tell: Acknowledge) -> None:
    """The process ends when a segment has its name, which is not durable yet; the next goes on."""
    session = Session(disk, tell)
    session.register("a")
    session.take(0, 1)
    with (
        mock.patch.object(disk, "sync_dir", side_effect=_Killed),
        contextlib.suppress(_Killed),
    ):
        session.core.finalise_due(at_once=True)
    session.reopen()
    session.finalise()
