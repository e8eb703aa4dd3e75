"""The ledger: its bytes, and what a store does without a readable one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bundles import plain_bundle
from hypothesis import given
from hypothesis import strategies as st

from quiver import FormatError, Start, StoreConfig
from quiver.store.core import Clock, StoreCore
from quiver.store.ledger import (
    FILE_NAME,
    Ledger,
    StartPoint,
    decode_ledger,
    encode_ledger,
    load_ledger,
)
from quiver.testing import SimulatedDisk

ROOT = Path("/store")
CLOCK = Clock(lambda: 0.0, lambda: 0)


def opened(disk: SimulatedDisk) -> StoreCore:
    return StoreCore(disk, ROOT, StoreConfig(), CLOCK)


def take(core: StoreCore, index: int) -> int:
    return core.commit([core.prepare(plain_bundle(index))])[0].sequence


@given(
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.dictionaries(st.text(max_size=9), st.integers(1, 99)),
    st.dictionaries(
        st.text(max_size=9),
        st.builds(StartPoint, st.sampled_from(["sequence", "time"]), st.integers(0, 2**63)),
    ),
)
def test_round_trip(
    segment: int, sequence: int, losses: dict[str, int], starts: dict[str, StartPoint]
) -> None:
    ledger = Ledger(
        next_segment=segment, next_sequence=sequence, losses=Counter(losses), starts=starts
    )
    back = decode_ledger(encode_ledger(ledger), source="f")
    assert (back.store_id, back.next_segment) == (ledger.store_id, segment)
    assert (back.next_sequence, back.losses, back.starts) == (sequence, losses, starts)
    assert not back.dirty


@given(st.data())
def test_any_changed_bit_is_noticed_in_a_ledger(data: st.DataObject) -> None:
    encoded = bytearray(encode_ledger(Ledger(losses=Counter(a=1))))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 9))  # the last byte is a line end
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_ledger(encoded, source="f")


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b"[]\n00000000\n", b"\xff" * 50])
def test_bytes_that_are_no_ledger(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_ledger(data, source="f")


def test_a_damaged_ledger_is_set_aside_and_no_number_comes_again() -> None:
    disk = SimulatedDisk()
    core = opened(disk)
    core.register("x", Start.earliest())
    assert take(core, 0) == 0
    core.close()
    file = disk.create(ROOT / FILE_NAME)
    file.append([b"nonsense"])
    file.close()
    core = opened(disk)
    assert any(f"{FILE_NAME}.corrupt" in problem for problem in core.problems)
    assert disk.exists(ROOT / f"{FILE_NAME}.corrupt")
    assert take(core, 1) == 1
    assert core.finalise_due(at_once=True) == 1
    assert core.segments.numbers == [0, 1]
    core.close()


def test_the_ledger_remembers_what_every_other_file_has_forgotten() -> None:
    disk = SimulatedDisk()
    core = opened(disk)
    core.register("x", Start.earliest())
    take(core, 0)
    core.finalise_due(at_once=True)
    core.registry.activate("x")
    with core.registry.active("x") as state:
        claim = state.claim_next(0.0)
        assert claim is not None
        state.resolve(claim)
    core.maintain()
    assert core.segments.numbers == []
    core.unregister("x")
    core.close()
    for name in disk.list_directory(ROOT / "wal"):
        disk.unlink(ROOT / "wal" / name)
    core = opened(disk)
    assert take(core, 1) == 1
    core.finalise_due(at_once=True)
    assert core.segments.numbers == [1]
    ledger = load_ledger(disk, ROOT)
    assert ledger is not None
    assert ledger.store_id == core.ledger.store_id


def test_a_start_between_bundles_survives_a_power_cut() -> None:
    disk = SimulatedDisk()
    core = opened(disk)
    for index in range(4):
        take(core, index)
    core.register("reader", Start.at_sequence(2))
    for rebooted in disk.crash_states(limit=64):
        again = opened(rebooted)
        assert not again.register("reader", Start.earliest())
        again.finalise_due(at_once=True)
        assert [info.pending for info in again.registry.infos()] == [2]
