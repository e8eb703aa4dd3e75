"""A reader beside the writer: everything acknowledged is seen, once, whatever happens meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from bundles import plain_bundle

from quiver import (
    RealDisk,
    SegmentConfig,
    SegmentNotFound,
    Snapshot,
    Start,
    Store,
    StoreConfig,
    StoreReader,
    WalConfig,
)


def values(snapshot: Snapshot) -> list[int]:
    found = []
    for _, bundle in snapshot.bundles():
        batch = bundle.batch(30)
        assert batch is not None
        found.append(batch.column(0)[0].as_py())
    return found


def test_log_and_segments_are_seen_together(tmp_path: Path) -> None:
    with Store.open(tmp_path, StoreConfig(segment=SegmentConfig(max_open_duration=3600))) as store:
        reader = StoreReader(tmp_path)
        assert len(reader.snapshot()) == 0
        for index in range(3):
            store.ingest(plain_bundle(index))
        store.flush()
        for index in range(3, 5):
            store.ingest(plain_bundle(index))
        snapshot = reader.snapshot()
        assert values(snapshot) == [0, 1, 2, 3, 4]
        assert [place.segment for place, _ in snapshot.bundles()] == [0, 0, 0, None, None]
        assert [place.sequence for place, _ in snapshot.bundles()] == [0, 1, 2, 3, 4]
        assert snapshot.store_id == store.store_id
        assert snapshot.problems == []


def test_a_snapshot_outlives_what_the_writer_deletes(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.subscribe("x", Start.earliest())
        store.ingest(plain_bundle(7))
        store.flush()
        snapshot = StoreReader(tmp_path).snapshot()
        handle = store.next_bundle("x")
        assert handle is not None
        handle.ack()
        store.maintain()
        assert len(StoreReader(tmp_path).snapshot()) == 0
        assert values(snapshot) == [7]


def test_nothing_is_missed_or_doubled_while_the_writer_works(tmp_path: Path) -> None:
    config = StoreConfig(
        segment=SegmentConfig(target_size=2000, max_open_duration=0.001),
        wal=WalConfig(rotation_target=1000),
        maintain_interval=0.001,
    )
    acknowledged = 0
    done = threading.Event()

    def write(store: Store) -> None:
        nonlocal acknowledged
        for index in range(300):
            store.ingest(plain_bundle(index))
            acknowledged = index + 1
        done.set()

    with Store.open(tmp_path, config) as store:
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        reader = StoreReader(tmp_path)
        looks = 0
        while not done.is_set():
            known = acknowledged
            seen = values(reader.snapshot())
            assert seen == list(range(len(seen)))
            assert len(seen) >= known
            looks += 1
        writer.join()
        assert looks > 0
        assert values(reader.snapshot()) == list(range(300))


def test_a_file_that_is_renamed_between_two_looks_is_not_missed(tmp_path: Path) -> None:
    config = StoreConfig(
        segment=SegmentConfig(max_open_duration=3600), wal=WalConfig(rotation_target=1)
    )
    with Store.open(tmp_path, config) as store:
        store.ingest(plain_bundle(0))

        class RotatedMeanwhile(RealDisk):
            looks = 0

            def list_directory(self, path: Path) -> list[str]:
                names = super().list_directory(path)
                self.looks += 1
                if self.looks == 1:
                    store.ingest(plain_bundle(1))  # the file with the first one is renamed
                return names

        assert values(StoreReader(tmp_path, RotatedMeanwhile()).snapshot()) == [0, 1]


def test_a_bundle_that_is_in_both_is_counted_once(tmp_path: Path) -> None:
    """As between the writing of a segment and the move of the cursor behind it."""
    with Store.open(tmp_path) as store:
        store.ingest(plain_bundle(7))
    (tmp_path / "wal" / "quiver.wal.cursor").unlink()
    assert values(StoreReader(tmp_path).snapshot()) == [7]


def test_a_directory_without_a_store(tmp_path: Path) -> None:
    with pytest.raises(SegmentNotFound, match="there is no log"):
        StoreReader(tmp_path).snapshot()
