"""The benchmark of the store, on very little data: what it reports, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiver.bench import BENCHMARKS, rig, store
from quiver.bench.load import check_count
from quiver.bench.measure import Plan, Results
from quiver.bench.rig import Background, FlatDisk, Memory
from quiver.cli.main import app
from quiver.disk import RealDisk

ROWS = {"100", "1000", "8192"}
PRODUCERS = {"1", "64"}
TINY = Plan(rounds=1, megabytes=1)
SPEEDS = {"bundles_s", "mb_s", "raw_mb_s", "raw_ratio", "group_bundles"}
TIMES = {"p50_ms", "p99_ms", "max_ms"}


@pytest.fixture(scope="module")
def ticks() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ticks: list[str]) -> Results:
    directory = tmp_path_factory.mktemp("bench")
    found = store.run(RealDisk(), directory, TINY, ticks.append)
    assert list(directory.iterdir()) == []
    return found


def test_ingest_is_given_by_rows_and_producers(results: Results) -> None:
    by_rows = results.figures["results"]
    assert set(by_rows) == ROWS
    for by_producers in by_rows.values():
        assert set(by_producers) == PRODUCERS
        for row in by_producers.values():
            assert set(row) == SPEEDS | TIMES | {"refused"}
            assert all(is_positive(row[name]) for name in SPEEDS | TIMES)
            assert isinstance(row["refused"], int)
            assert row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]


def test_one_producer_is_alone_in_its_group(results: Results) -> None:
    for by_producers in results.figures["results"].values():
        assert by_producers["1"]["group_bundles"] == 1.0


@pytest.mark.parametrize("name", ["fdatasync_p50_ms", "latency_ratio"])
def test_latency_is_given_for_each_size(results: Results, name: str) -> None:
    assert set(results.figures[name]) == ROWS
    assert all(is_positive(value) for value in results.figures[name].values())


@pytest.mark.parametrize(
    "name",
    [
        "finalise_max_ratio",
        "finalise_alone_ratio",
        "segment_only_ratio",
        "segment_only_readable",
        "replay_mb_s",
    ],
)
def test_other_figures_are_single_numbers(results: Results, name: str) -> None:
    assert is_positive(results.figures[name])


def test_finalising_says_what_was_compared(results: Results) -> None:
    finalise = results.figures["finalise"]
    assert set(finalise) == {"max_ms", "max_ms_without", "segments"}
    assert is_positive(finalise["max_ms"])
    assert is_positive(finalise["max_ms_without"])
    assert finalise["segments"] >= 1


def test_the_backlog_is_as_large_as_asked_for(results: Results) -> None:
    assert 14_000_000 < results.figures["backlog_bytes"] <= 20_000_000
    for name in ("backlog_rss_mb", "backlog_private_mb", "backlog_growth_mb"):
        value = results.figures[name]
        assert value is None or (isinstance(value, float) and value >= 0)


def test_the_circumstances_are_told(results: Results) -> None:
    figures = results.figures
    assert all(isinstance(figures[name], str) for name in ("python", "pyarrow", "isal"))
    assert figures["cpu_count"] >= 1
    assert figures["file_system"] is None or isinstance(figures["file_system"], str)
    assert figures["page_cache"] == "warm"
    assert figures["rounds"] == 1
    assert figures["bytes"] > 100_000
    assert set(BENCHMARKS["store"].facts) <= set(figures)


def test_figures_survive_json(results: Results) -> None:
    assert json.loads(json.dumps(results.figures)) == results.figures


def test_the_table_is_complete(results: Results) -> None:
    assert len(results.table.rows) == 6
    assert {len(row) for row in results.table.rows} == {len(results.table.columns)} == {8}


def test_every_round_is_announced(results: Results, ticks: list[str]) -> None:
    assert len(ticks) == store.count_ticks(TINY)


def test_rounds_are_a_third_of_those_asked_for() -> None:
    assert store.count_ticks(Plan(rounds=9)) - 1 == 3 * (store.count_ticks(Plan(rounds=3)) - 1)


def test_the_last_line_is_json(tmp_path: Path) -> None:
    directory = tmp_path / "there"
    options = ["--rounds", "1", "--megabytes", "1", "--directory", str(directory)]
    result = CliRunner().invoke(app, ["bench", "store", "--json", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["benchmark"] == "store"
    assert list(directory.iterdir()) == []


def test_work_that_was_not_done_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 bundles came back, 2 were written"):
        check_count(1, 2)


def test_files_of_subdirectories_lie_in_one(tmp_path: Path) -> None:
    disk = FlatDisk(RealDisk(), tmp_path)
    inner = tmp_path / "store" / "wal"
    disk.make_directory(inner)
    disk.create(inner / "log").close()
    disk.create(tmp_path / "store" / "ledger").close()
    assert disk.list_directory(inner) == ["log"]
    assert disk.list_directory(tmp_path / "store") == ["ledger"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["store~ledger", "store~wal~log"]
    disk.remove_all()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_thread_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        Background(fail).finish()


def test_memory_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "_resident_bytes", lambda: None)
    memory = Memory()
    with memory.watched():
        pass
    assert memory.resident_mb is None
    assert memory.private_mb is None


def is_positive(value: object) -> bool:
    return isinstance(value, float) and value > 0
