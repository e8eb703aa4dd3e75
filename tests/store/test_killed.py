"""A process that is killed, again and again, loses nothing that it had a receipt for."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from quiver import (
    RecordBundle,
    RetentionConfig,
    SegmentConfig,
    Start,
    Store,
    StoreConfig,
    WalConfig,
)

CONFIG = StoreConfig(
    maintain_interval=0.002,
    wal=WalConfig(rotation_target=4096, max_size=1024 * 1024),
    segment=SegmentConfig(max_open_duration=0.01, max_bundles=16),
    retention=RetentionConfig(min_free_space=0),
)


def be_the_child(root: str, first: str) -> None:
    """Ingest from three threads and print each receipt as soon as there is one, without end."""
    store = Store.open(root, CONFIG)
    store.register("reader", Start.earliest())
    indices = itertools.count(int(first))

    def ingest() -> None:
        for index in indices:
            batch = pa.record_batch({"value": pa.array([index], pa.int64())})
            receipt = store.ingest(RecordBundle.from_batches({30: batch}, ingestion_time_ns=index))
            sys.stdout.write(f"{receipt.sequence} {index}\n")
            sys.stdout.flush()

    threads = [threading.Thread(target=ingest) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Seen(NamedTuple):
    """A receipt that the parent has read."""

    sequence: int
    payload: int


def run_and_kill(root: Path, first: int, receipts: int) -> list[Seen]:
    """Start a process that ingests, and kill it when it has printed that many receipts."""
    command = [sys.executable, __file__, str(root), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(receipts)]
        child.kill()
        lines += child.stdout.readlines()
    assert child.returncode != 0
    whole = [line.split() for line in lines if line.endswith("\n")]
    assert len(whole) >= receipts, "the child ended by itself"
    return [Seen(int(sequence), int(index)) for sequence, index in whole]


def delivered(root: Path) -> dict[int, int]:
    """All that the subscriber is given: how often each bundle came."""
    found: dict[int, int] = {}
    with Store.open(root, CONFIG) as store:
        assert store.problems == []
        store.subscribe("reader", Start.latest())  # it is known, so it goes on where it was
        store.flush()
        while (handle := store.poll_next_bundle("reader")) is not None:
            with handle:
                batch = handle.bundle.batch(30)
                assert batch is not None
                index = int(batch.column(0)[0].as_py())
                found[index] = found.get(index, 0) + 1
        assert store.all_drained()
        assert not store.losses
    return found


def kill_many_times(root: Path, kills: int, seed: int, most: int) -> None:
    generator = random.Random(seed)
    seen: list[Seen] = []
    for run in range(kills):
        seen += run_and_kill(root, 1_000_000 * run, generator.randint(1, most))
    assert len({receipt.sequence for receipt in seen}) == len(seen), "a number was given out twice"
    found = delivered(root)
    assert {receipt.payload for receipt in seen} <= found.keys()
    assert set(found.values()) == {1}, "a kill loses no page cache, so nothing has to come twice"


def test_what_has_a_receipt_outlives_eight_kills(tmp_path: Path) -> None:
    kill_many_times(tmp_path, kills=8, seed=20261115, most=120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_what_has_a_receipt_outlives_many_kills(tmp_path: Path, seed: int) -> None:
    kill_many_times(tmp_path, kills=40, seed=seed, most=2000)


if __name__ == "__main__":
    be_the_child(*sys.argv[1:])
