"""``quiver subscribers``: who reads a store, how far behind, and forgetting one that is gone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from typer.testing import CliRunner, Result

from quiver import RecordBundle, RetentionConfig, SegmentConfig, Start, Store, StoreConfig
from quiver.cli.main import reporting
from quiver.cli.subscribers import subscribers

app = typer.Typer()
app.command()(reporting(subscribers))

CONFIG = StoreConfig(
    segment=SegmentConfig(max_bundles=2), retention=RetentionConfig(min_free_space=0)
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, list(map(str, arguments)), env={"COLUMNS": "250", "NO_COLOR": "1"}
    )


def listed(path: Path) -> list[dict[str, Any]]:
    result = run(path, "-o", "json")
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["subscribers"])


def fill(store: Store, ages: list[float]) -> None:
    """Bundles that were ingested so many seconds ago."""
    for age in ages:
        batch = pa.record_batch({"value": pa.array([1], pa.int64())})
        at = time.time_ns() - int(age * 1e9)
        store.ingest(RecordBundle.from_batches({30: batch}, ingestion_time_ns=at))
    store.flush()


def read(store: Store, name: str, count: int) -> None:
    for _ in range(count):
        handle = store.poll_next_bundle(name)
        assert handle is not None
        handle.ack()


def make(root: Path) -> None:
    """``fast`` has read all, ``slow`` three of five, ``gone`` nothing."""
    with Store.open(root, CONFIG) as store:
        for name in ("fast", "slow", "gone"):
            store.subscribe(name, Start.earliest())
        fill(store, [500, 400, 300, 200, 100])
        read(store, "fast", 5)
        read(store, "slow", 3)


def test_how_far_each_is(tmp_path: Path) -> None:
    make(tmp_path / "core_0")
    found = {entry["id"]: entry for entry in listed(tmp_path)}
    assert [found[name]["pending"] for name in ("fast", "slow", "gone")] == [0, 2, 5]
    assert found["fast"]["lag_seconds"] == 0
    assert 200 <= found["slow"]["lag_seconds"] < 290
    assert 500 <= found["gone"]["lag_seconds"] < 590
    assert found["slow"]["store"] == str(tmp_path / "core_0")
    assert {entry["id"] for entry in listed(tmp_path / "core_0")} == set(found)
    table = run(tmp_path).stdout
    for text in ("core_0", "slow", "20", "3 subscribers, 7 bundles pending"):
        assert text in table


def test_a_store_can_be_looked_at_while_it_is_open(tmp_path: Path) -> None:
    with Store.open(tmp_path, CONFIG) as store:
        store.subscribe("out", Start.earliest())
        fill(store, [10])
        (entry,) = listed(tmp_path)
        assert (entry["id"], entry["pending"]) == ("out", 1)
        result = run(tmp_path, "--drop", "out")
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert listed(tmp_path) != []


def test_one_that_is_gone_is_forgotten_in_all_stores(tmp_path: Path) -> None:
    for core in (0, 1):
        make(tmp_path / f"core_{core}")
    result = run(tmp_path, "--drop", "gone")
    assert (result.exit_code, result.stdout) == (
        0,
        "gone is forgotten; it had not read 10 bundles.\n",
    )
    assert sorted(entry["id"] for entry in listed(tmp_path)) == ["fast", "fast", "slow", "slow"]
    with Store.open(tmp_path / "core_0", CONFIG) as store:
        store.subscribe("slow")
        read(store, "slow", 2)
        assert store.poll_next_bundle("slow") is None


def test_none_is_forgotten_when_one_store_is_open(tmp_path: Path) -> None:
    for core in (0, 1):
        make(tmp_path / f"core_{core}")
    with Store.open(tmp_path / "core_1", CONFIG):
        result = run(tmp_path, "--drop", "gone")
    assert result.exit_code == 2
    assert "core_1" in result.stderr
    assert [entry["id"] for entry in listed(tmp_path)].count("gone") == 2


@pytest.mark.parametrize("arguments", [("--drop", "nobody"), ()])
def test_mistakes_are_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make(tmp_path / "core_0")
    where = tmp_path if arguments else tmp_path / "nowhere"
    result = run(where, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
