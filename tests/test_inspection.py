"""Looking into files: what they are, what they hold, what is damaged, and nothing is touched."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bundles import START_NS, plain_bundle
from looking import (
    G2,
    GOLDEN,
    SEGMENT,
    change,
    flip,
    look,
    look_at_segment,
    look_at_wal,
    make_store,
    seal,
    seal_entry,
)

from quiver.bundle import RecordBundle, Slot
from quiver.disk import RealDisk
from quiver.errors import FormatError
from quiver.inspection import ProgressDescription, StoreDescription, inspect_path, records
from quiver.segment.layout import segment_file_name
from quiver.segment.writer import OpenSegment, write_segment
from quiver.subscriber.progress import Progress, SegmentProgress, progress_path, store_progress
from quiver.testing import SimulatedDisk
from quiver.wal.entry import prepare_entry
from quiver.wal.writer import WalWriter

INDEX: dict[str, dict[str, Any]] = json.loads((GOLDEN / "INDEX.json").read_text())


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden files that a test may damage."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


# --- Nothing is touched -------------------------------------------------------------------------


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Names, modes, times of change and bytes of everything below."""
    seen = {}
    for path in [root, *sorted(root.rglob("*"))]:
        facts = path.stat()
        data = path.read_bytes() if path.is_file() else b""
        seen[str(path)] = (facts.st_mode, facts.st_mtime_ns, data)
    return seen


def test_inspecting_changes_no_name_byte_time_or_mode(golden: Path) -> None:
    make_store(golden / "own" / "core_0")
    flip(golden / G2 / "wal" / "quiver.wal", 100)
    (golden / "g3_rotation" / "wal" / "quiver.wal.9.tmp").write_bytes(b"cut")
    before = tree(golden)
    assert len(before) > 30
    for path in [golden, *golden.rglob("*")]:
        try:
            look(path)
        except FormatError:
            continue
    assert tree(golden) == before


def test_a_disk_without_modes_can_be_inspected() -> None:
    disk = SimulatedDisk()
    writer = WalWriter.open(disk, Path("/store/wal"))
    writer.append([prepare_entry(plain_bundle(0))])
    description = inspect_path(disk, Path("/store"), mode_of=lambda _: None)
    assert isinstance(description, StoreDescription)
    assert description.wal_entries == description.entries_past_cursor == 1
    assert description.mode is None


# --- What is it? --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEX)
def test_the_name_of_a_file_does_not_matter(name: str, tmp_path: Path) -> None:
    expected = look(GOLDEN / name)
    misnamed = tmp_path / "quiver.wal.cursor.bak"
    shutil.copyfile(GOLDEN / name, misnamed)
    assert look(misnamed).kind == expected.kind
    assert look(misnamed).healthy


def test_an_unknown_file_is_told_which_magics_were_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "quiver.wal"
    path.write_bytes(b"something else entirely, and long enough")
    with pytest.raises(FormatError) as caught:
        look(path)
    for magic in (b"QUIVER\0WAL", b"QUIVER\0T", b"QUIVSUB\0", b"QUIVER\0S"):
        assert repr(magic) in caught.value.reason
    assert "its name is that of a WAL file" in caught.value.reason


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("data.parquet", b"PAR1 and so on PAR1", "a Parquet file"),
        ("0.arrow", b"ARROW1\0\0 and so on", "an Arrow IPC file"),
        ("0.qseg.gz", b"\x1f\x8b\x08 and so on", "unpack it first"),
        ("empty", b"", "it is empty"),
        ("x", b"Q", "starts with b'Q'"),
        ("quarantine/00000000000000000038.bin", b"\x4b\x02\0\0\0 damaged", "recovery cut out"),
    ],
)
def test_an_unknown_file_gets_a_hint(name: str, content: bytes, hint: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="not a Quiver file") as caught:
        look(path)
    assert hint in caught.value.reason


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "quiver.wal")
    with pytest.raises(FormatError, match="a pipe, a socket or a device"):
        look(tmp_path / "quiver.wal")


@pytest.mark.parametrize("name", INDEX)
def test_a_flipped_bit_in_the_magic_is_damage_not_a_riddle(name: str, golden: Path) -> None:
    path = golden / name
    flip(path, -12 % path.stat().st_size if name.endswith(".qseg") else 3)
    description = look(path)
    assert description.kind == look(GOLDEN / name).kind
    assert not description.healthy


# --- WAL files ----------------------------------------------------------------------------------


def test_a_wal_file_is_counted_whole_and_listed_up_to_the_limit() -> None:
    wal = look_at_wal(GOLDEN / G2 / "wal" / "quiver.wal", limit=1)
    assert [entry.seq for entry in wal.entries] == [0]
    assert (wal.entry_count, wal.row_count) == (4, 13)
    assert (wal.first_seq, wal.last_seq) == (0, 3)
    assert (wal.wal_position_start, wal.wal_position_end) == (0, 4834)
    assert [slot.name for slot in wal.entries[0].slots] == ["LOGS", "LOG_ATTRS"]


def test_damage_in_the_middle_leaves_the_entries_behind_it(golden: Path) -> None:
    path = golden / G2 / "wal" / "quiver.wal"
    flip(path, 2000)
    wal = look_at_wal(path)
    assert [entry.seq for entry in wal.entries] == [0, 2, 3]
    (damage,) = wal.damaged
    assert (damage.offset, damage.length, damage.torn) == (1579, 2103, False)
    assert "checksum" in damage.reason
    assert not wal.healthy


def test_a_cut_entry_is_torn(golden: Path) -> None:
    path = golden / "g1_wal_only" / "wal" / "quiver.wal"
    path.write_bytes(path.read_bytes()[:1500])
    wal = look_at_wal(path)
    assert [entry.seq for entry in wal.entries] == [0, 1]
    assert [(d.offset, d.length, d.torn) for d in wal.damaged] == [(1228, 272, True)]


def test_an_entry_of_an_unknown_type_is_skipped_and_no_damage(golden: Path) -> None:
    path = golden / "g1_wal_only" / "wal" / "quiver.wal"
    change(path, 633 + 4, b"\x07")
    seal_entry(path, 633)
    wal = look_at_wal(path)
    assert [(s.offset, s.entry_type, s.length) for s in wal.skipped] == [(633, 7, 595)]
    assert [entry.seq for entry in wal.entries] == [0, 2]
    assert wal.healthy


@pytest.mark.parametrize("data", [b"\0" * 200, b"\xff" * 200, b"\xff\xff\xff\xff\0\0\0\0"])
def test_an_entry_with_a_good_sum_and_no_arrow_inside_is_damaged(data: bytes, golden: Path) -> None:
    path = golden / "g1_wal_only" / "wal" / "quiver.wal"
    payload = 633 + 4 + 25 + 42
    change(path, payload, data)
    seal_entry(path, 633)
    wal = look_at_wal(path)
    assert wal.entry_count == 3
    assert [damage.offset for damage in wal.damaged] == [633]


def test_a_payload_that_ends_before_its_batch_is_damaged(golden: Path) -> None:
    path = golden / "g1_wal_only" / "wal" / "quiver.wal"
    payload = 633 + 4 + 25 + 42
    schema_length = struct.unpack_from("<I", path.read_bytes(), payload + 4)[0]
    change(path, payload + 8 + schema_length, b"\xff\xff\xff\xff\0\0\0\0")
    seal_entry(path, 633)
    assert [damage.offset for damage in look_at_wal(path).damaged] == [633]


def test_batches_are_looked_at_value_by_value(tmp_path: Path) -> None:
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    not_text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    batch = pa.record_batch({"text": not_text})
    bundle = RecordBundle.from_batches({Slot.LOGS: batch}, ingestion_time_ns=START_NS)
    writer = WalWriter.open(RealDisk(), tmp_path / "wal")
    writer.append([prepare_entry(bundle)])
    writer.close()
    segment = OpenSegment()
    segment.append(bundle)
    write_segment(RealDisk(), tmp_path / "0.qseg", segment)
    (damage,) = look_at_wal(tmp_path / "wal" / "quiver.wal").damaged
    assert "UTF8" in damage.reason
    (problem,) = look_at_segment(tmp_path / "0.qseg").problems
    assert (problem.where, "UTF8" in problem.reason) == ("stream 0", True)


def test_a_wal_header_of_another_version_does_not_hide_the_entries(golden: Path) -> None:
    path = golden / "g1_wal_only" / "wal" / "quiver.wal"
    change(path, 10, b"\x02")
    wal = look_at_wal(path)
    assert wal.problem is not None
    assert "version 2" in wal.problem
    assert wal.wal_position_start is None
    assert wal.entry_count == 3


def test_what_decodes_to_far_too_much_is_not_decoded_to_the_end(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_DECODED_AT_LEAST", 100)
    monkeypatch.setattr(records, "_DECODED_PER_BYTE", 0)
    wal = look_at_wal(golden / G2 / "wal" / "quiver.wal")
    assert wal.entry_count == 4
    assert [damage.offset for damage in wal.damaged] == [38]
    assert "more memory than the file" in wal.damaged[0].reason
    segment = look_at_segment(golden / SEGMENT)
    assert not segment.healthy
    assert segment.manifest_rows == 4


# --- Segments -----------------------------------------------------------------------------------


def test_a_segment_of_ours_tells_more(tmp_path: Path) -> None:
    batch = pa.record_batch({"time_unix_nano": pa.array([5, 9, 7], pa.timestamp("ns"))})
    segment = OpenSegment()
    for index in range(3):
        bundle = RecordBundle.from_batches(
            {Slot.LOGS: batch}, ingestion_time_ns=START_NS + index, item_count=3
        )
        segment.append(bundle, 70 + index)
    path = tmp_path / segment_file_name(8)
    write_segment(RealDisk(), path, segment)
    description = look_at_segment(path, limit=2)
    assert description.healthy
    assert description.checksum_verified
    assert (description.sequence, description.bundles, description.manifest_rows) == (8, 3, 3)
    assert (description.rows, description.items) == (9, 9)
    assert [bundle.sequence for bundle in description.bundle_table] == [70, 71]
    assert description.bundle_table[0].ingestion_time_ns == START_NS
    assert description.bundle_table[0].signal == "logs"
    assert [slot.rows for slot in description.bundle_table[0].slots] == [3]
    (stream,) = description.stream_table
    assert stream.schema == "time_unix_nano: timestamp[ns]"
    assert (stream.min_event_time_ns, stream.max_event_time_ns) == (5, 9)


def test_a_damaged_stream_does_not_hide_the_others(golden: Path) -> None:
    flip(golden / SEGMENT, 700)
    segment = look_at_segment(golden / SEGMENT)
    assert not segment.checksum_verified
    assert [problem.where for problem in segment.problems] == ["file"]
    assert len(segment.stream_table) == 5
    assert len(segment.bundle_table) == 4


def test_a_stream_with_its_own_sum_is_named(tmp_path: Path) -> None:
    path = make_store(tmp_path) / "segments" / segment_file_name(0)
    flip(path, 200)
    segment = look_at_segment(path)
    assert {problem.where for problem in segment.problems} == {"file", "stream 0"}
    assert segment.bundles == 4


@pytest.mark.parametrize("size", [10, 1000, 5100, 10040])
def test_a_cut_segment_is_a_damaged_segment(size: int, golden: Path) -> None:
    path = golden / SEGMENT
    path.write_bytes(path.read_bytes()[:size])
    segment = look_at_segment(path)
    assert [problem.where for problem in segment.problems] == ["footer"]
    assert segment.bundles is None


@pytest.mark.parametrize(
    ("where", "offset"), [("directory", 5050), ("manifest", 7620), ("stream 1", 1152)]
)
def test_a_part_that_is_no_arrow_is_named_even_if_the_sum_fits(
    where: str, offset: int, golden: Path
) -> None:
    path = golden / SEGMENT
    ends = {"directory": 7620, "manifest": 9998, "stream 1": 2752}
    change(path, ends[where] - 200, bytes(200))
    seal(path)
    segment = look_at_segment(path)
    assert segment.checksum_verified
    assert [problem.where for problem in segment.problems] == [where]
    assert segment.bundles == 4
    assert offset < ends[where]


# --- Progress -----------------------------------------------------------------------------------


def test_a_progress_file_shows_flags_and_words(tmp_path: Path) -> None:
    entries = (SegmentProgress(3, 70, 1 << 69 | 1), SegmentProgress(4, 2))
    path = progress_path(tmp_path, "lake")
    store_progress(RealDisk(), path, Progress(entries, 3, flags=0b101))
    progress = look(path, limit=1)
    assert isinstance(progress, ProgressDescription)
    assert [entry.words for entry in progress.entries] == [(1, 1 << 5)]
    assert (progress.subscriber, progress.segment_count) == ("lake", 2)
    assert (progress.resolved, progress.pending) == (2, 70)
    assert (progress.flags, progress.flag_names) == (5, ("bit 0", "bit 2"))
    assert progress.oldest_incomplete_segment == 3


def test_a_large_progress_file_is_not_shown_byte_for_byte(tmp_path: Path) -> None:
    entries = tuple(SegmentProgress(number, 640) for number in range(20))
    path = progress_path(tmp_path, "lake")
    store_progress(RealDisk(), path, Progress(entries))
    assert look(path).to_json()["hex"] is None


def test_modes_are_those_of_the_files(golden: Path) -> None:
    path = golden / SEGMENT
    path.chmod(0o440)
    assert look(path).mode == "0o440"
    assert stat.S_IMODE(path.stat().st_mode) == 0o440
