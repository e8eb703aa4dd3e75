"""Looking into store directories: what adds up, what is damaged, what does not belong there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from looking import (
    ENTRY_SIZE,
    G2,
    GOLDEN,
    ReadOnlyDisk,
    flip,
    look,
    look_at_store,
    make_store,
    reasons,
)

from quiver.disk import RealDisk
from quiver.errors import FormatError
from quiver.inspection import RootDescription, StoreDescription, inspect_path
from quiver.segment.layout import segment_file_name
from quiver.subscriber.progress import Progress, SegmentProgress, progress_path, store_progress
from quiver.wal.cursor import encode_cursor
from quiver.wal.writer import WalWriter


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy of the golden files that a test may damage."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def test_a_store_adds_up(tmp_path: Path) -> None:
    store = look_at_store(make_store(tmp_path / "store"))
    assert reasons(store) == []
    assert store.cursor == 4 * ENTRY_SIZE
    assert store.entries_past_cursor == 2
    assert store.wal[-1].name == "quiver.wal"
    assert [(s.sequence, s.bundles, s.rows, s.items) for s in store.segments] == [(0, 4, 12, 12)]
    assert [(s.id, s.resolved, s.pending) for s in store.subscribers] == [("lake", 2, 2)]


def test_a_store_that_was_never_written_to_is_empty(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    (tmp_path / "segments").mkdir()
    store = look_at_store(tmp_path)
    assert store.healthy
    assert (store.wal_count, store.segment_count, store.subscriber_count) == (0, 0, 0)
    WalWriter.open(RealDisk(), tmp_path / "wal").close()
    store = look_at_store(tmp_path)
    assert store.healthy
    assert (store.wal_count, store.wal_entries) == (1, 0)


def test_every_damaged_part_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store", bundles=9)
    wal = sorted((root / "wal").glob("quiver.wal.[0-9]*"))
    shutil.copyfile(root / "quiver.sub.lake", root / "quiver.sub.other")
    whole = (root / "segments" / segment_file_name(0)).read_bytes()
    (root / "segments" / segment_file_name(5)).write_bytes(whole[:900])
    flip(wal[0], 38 + 100)
    flip(root / "quiver.sub.other", 20)
    flip(root / "wal" / "quiver.wal.cursor", 14)
    store = look_at_store(root)
    assert {problem.where for problem in store.problems} == {
        f"wal/{wal[0].name}",
        "wal/quiver.wal.cursor",
        "segments/0000000000000005.qseg",
        "quiver.sub.other",
    }
    assert store.cursor is None
    assert store.entries_past_cursor == store.wal_entries > 0
    assert [subscriber.id for subscriber in store.subscribers] == ["lake"]
    assert [segment.bundles for segment in store.segments] == [4, None]


def test_files_that_the_store_did_not_make_are_listed(tmp_path: Path) -> None:
    root = make_store(tmp_path / "store")
    (root / "wal" / "quiver.wal.cursor.tmp").write_bytes(b"")
    (root / "segments" / "notes.txt").write_text("hello")
    (root / "quiver.sub.not an id").write_bytes(b"")
    (root / "lost+found").mkdir()
    shutil.copyfile(root / "wal" / "quiver.wal", root / "wal" / "quiver.wal.bak")
    (root / "wal" / "quarantine").mkdir()
    (root / "wal" / "quarantine" / "00000000000000000038.bin").write_bytes(b"12345")
    store = look_at_store(root)
    assert store.healthy
    assert store.leftovers == ("wal/quiver.wal.cursor.tmp",)
    assert {file.name: file.looks_like for file in store.unknown} == {
        "wal/quiver.wal.bak": "WAL file",
        "segments/notes.txt": None,
        "quiver.sub.not an id": None,
        "lost+found/": None,
    }
    assert (store.quarantined_files, store.quarantined_bytes) == (1, 5)
    assert look_at_store(root, limit=1).unknown_count == 4
    assert len(look_at_store(root, limit=1).unknown) == 1


def test_a_log_file_that_is_missing_is_noticed(golden: Path) -> None:
    wal = golden / "g3_rotation" / "wal"
    (wal / "quiver.wal.2").unlink()
    store = look_at_store(golden / "g3_rotation")
    assert reasons(store) == ["wal: log positions 1958 to 3916 are in no file"]
    (wal / "quiver.wal.3").unlink()
    (wal / "quiver.wal").unlink()
    (wal / "quiver.wal.cursor").unlink()
    shutil.copyfile(GOLDEN / G2 / "wal" / "quiver.wal.cursor", wal / "quiver.wal.cursor")
    store = look_at_store(golden / "g3_rotation")
    assert reasons(store) == ["wal: the cursor is at 4834, but the log ends at 1958"]


def test_a_subscriber_that_counts_otherwise_is_noticed(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    entries = (SegmentProgress(0, 5), SegmentProgress(1, 3))
    store_progress(RealDisk(), progress_path(root, "lake"), Progress(entries))
    store = look_at_store(root)
    assert reasons(store) == [
        "quiver.sub.lake: it says that segment 0 has 5 bundles, the segment says 4"
    ]
    assert store.subscribers[0].segments_gone == 1


def test_a_segment_that_a_subscriber_does_not_list_is_pending(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    shutil.copyfile(
        root / "segments" / segment_file_name(0), root / "segments" / segment_file_name(1)
    )
    (subscriber,) = look_at_store(root).subscribers
    assert (subscriber.resolved, subscriber.pending) == (2, 2 + 4)


def test_only_the_active_file_can_be_torn(golden: Path) -> None:
    wal = golden / "g3_rotation" / "wal"
    for name in ("quiver.wal.3", "quiver.wal"):
        (wal / name).write_bytes((wal / name).read_bytes()[:-1])
    store = look_at_store(golden / "g3_rotation")
    assert [[d.torn for d in file.damaged] for file in store.wal] == [[], [], [False], [True]]
    assert [reason.endswith("(torn: nothing good follows)") for reason in reasons(store)] == [
        False,
        False,
        True,
    ]


def test_an_old_entry_inside_damage_is_not_taken_for_a_new_one(golden: Path) -> None:
    wal = golden / "g3_rotation" / "wal"
    stale = (wal / "quiver.wal.1").read_bytes()[38:]
    (wal / "quiver.wal.2").write_bytes((wal / "quiver.wal.2").read_bytes()[:38] + b"!" * 9 + stale)
    store = look_at_store(golden / "g3_rotation")
    assert [file.entries for file in store.wal] == [2, 0, 2, 1]


class CuttableDisk(ReadOnlyDisk):
    """A mapping of a file that is then cut kills the process, so the log must not be mapped."""

    def map(self, path: Path) -> pa.Buffer:
        assert path.suffix == ".qseg"
        return super().map(path)


def test_files_that_recovery_may_cut_are_copied(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    assert inspect_path(CuttableDisk(), root).healthy
    for path in [*(root / "wal").iterdir(), root / "quiver.sub.lake"]:
        assert inspect_path(CuttableDisk(), path).healthy


def test_two_files_for_one_segment_are_noticed(tmp_path: Path) -> None:
    segments = make_store(tmp_path) / "segments"
    shutil.copyfile(segments / segment_file_name(0), segments / "0.qseg")
    assert "two files for segment 0" in reasons(look_at_store(tmp_path))[0]


def test_one_store_per_core_is_shown_together(tmp_path: Path) -> None:
    for core in (10, 2):
        make_store(tmp_path / f"core_{core}", bundles=core, in_segment=2)
    (tmp_path / "core_3").mkdir()
    flip(tmp_path / "core_2" / "quiver.sub.lake", 30)
    root = look(tmp_path)
    assert isinstance(root, RootDescription)
    assert [Path(store.path).name for store in root.stores] == ["core_2", "core_10"]
    assert [store.healthy for store in root.stores] == [False, True]
    assert not root.healthy
    assert [store["kind"] for store in root.to_json()["stores"]] == ["store", "store"]


@pytest.mark.parametrize(
    "names",
    [
        ("readme",),
        ("wal/00000001", "chunks_head/000001"),
        ("wal/00000001", "segments/00000001"),
        ("wal/quiver.wal", "segments/0000000000000000.qseg"),
        ("quiver.sub.lake",),
    ],
)
def test_another_directory_is_no_store_whatever_the_names(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"a page of another database")
    with pytest.raises(FormatError, match="not a store") as caught:
        look(tmp_path)
    assert repr(b"QUIVER\0WAL") in caught.value.reason


def test_the_way_to_the_store_is_shown(tmp_path: Path) -> None:
    root = make_store(tmp_path / "data" / "store")
    for part in ("wal", "segments"):
        with pytest.raises(FormatError, match=f"inspect {root} instead"):
            look(root / part)
    with pytest.raises(FormatError, match=f"inspect {root}"):
        look(root.parent)


class BusyDisk(ReadOnlyDisk):
    """Between two looks of the reader, the store moves its cursor and deletes two files."""

    def __init__(self) -> None:
        self.looks = 0

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        data = super().read(path, offset, length)
        if path.name == "quiver.wal.cursor":
            self.looks += 1
            if self.looks == 2:  # the first look was for the state before
                path.write_bytes(encode_cursor(3916))
                (path.parent / "quiver.wal.1").unlink()
                (path.parent / "quiver.wal.2").unlink()
        return data


def test_a_store_that_moves_on_meanwhile_is_not_damaged(golden: Path) -> None:
    store = inspect_path(BusyDisk(), golden / "g3_rotation")
    assert isinstance(store, StoreDescription)
    assert reasons(store) == []
    assert (store.cursor, store.wal_count, store.entries_past_cursor) == (3916, 2, 3)


def test_pipes_in_a_store_are_not_waited_for(tmp_path: Path) -> None:
    make_store(tmp_path)
    os.mkfifo(tmp_path / "wal" / "quiver.wal.99")
    os.mkfifo(tmp_path / "segments" / "1.qseg")
    os.mkfifo(tmp_path / "quiver.sub.pipe")
    os.mkfifo(tmp_path / "other")
    store = look_at_store(tmp_path)
    assert [problem.where for problem in store.problems] == [
        "wal/quiver.wal.99",
        "segments/1.qseg",
        "quiver.sub.pipe",
    ]
    assert [file.name for file in store.unknown] == ["other"]
