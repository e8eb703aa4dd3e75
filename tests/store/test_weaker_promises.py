"""The two modes that promise less keep what they do promise, and open after any crash."""

from __future__ import annotations

from pathlib import Path

from bundles import plain_bundle

from quiver import Ack, Durability, Start, StoreConfig
from quiver.store.core import Clock, StoreCore
from quiver.testing import SimulatedDisk

ROOT = Path("/store")
CLOCK = Clock(lambda: 0.0, lambda: 0)
WRITTEN = StoreConfig(ack=Ack.WRITTEN)
SEGMENT_ONLY = StoreConfig(durability=Durability.SEGMENT_ONLY)


def taken(disk: SimulatedDisk, config: StoreConfig) -> StoreCore:
    """A store with three bundles that have receipts."""
    core = StoreCore(disk, ROOT, config, CLOCK)
    core.register("x", Start.earliest())
    for index in range(3):
        core.commit([core.prepare(plain_bundle(index))])
    return core


def survivors(state: SimulatedDisk, config: StoreConfig) -> int:
    core = StoreCore(state, ROOT, config, CLOCK)
    core.finalise_due(at_once=True)
    count = core.registry.unresolved_count("x")
    core.close()
    return count


def counts(disk: SimulatedDisk, config: StoreConfig) -> set[int]:
    return {survivors(state, config) for state in disk.crash_states(limit=60, seed=1)}


def test_acknowledged_as_written_may_be_lost_until_the_log_is_synced() -> None:
    disk = SimulatedDisk()
    core = taken(disk, WRITTEN)
    assert {0, 3} <= counts(disk, WRITTEN)
    core.intake.sync()
    assert counts(disk, WRITTEN) == {3}


def test_segment_only_may_lose_what_is_in_memory_and_nothing_that_is_finalised() -> None:
    disk = SimulatedDisk()
    core = taken(disk, SEGMENT_ONLY)
    assert counts(disk, SEGMENT_ONLY) == {0}
    core.finalise_due(at_once=True)
    assert counts(disk, SEGMENT_ONLY) == {3}
