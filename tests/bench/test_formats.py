"""The benchmark of the formats, on very little data: what it reports, and what it leaves behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.bench import BENCHMARKS, formats, measure
from quiver.bench.measure import Contender, Plan, Results, race, scratch_directory
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig

ROWS = {"100", "1000", "8192"}
TINY = Plan(rounds=2, megabytes=1)


@pytest.fixture(scope="module")
def ticks() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ticks: list[str]) -> Results:
    directory = tmp_path_factory.mktemp("bench")
    found = formats.run(RealDisk(), directory, TINY, ticks.append)
    assert list(directory.iterdir()) == []
    return found


@pytest.mark.parametrize(
    "name", ["wal_encode_us", "wal_append_us", "wal_append_plain_write_us", "wal_append_ratio"]
)
def test_figures_of_the_log_are_given_for_each_size(results: Results, name: str) -> None:
    assert set(results.figures[name]) == ROWS
    assert all(is_positive(value) for value in results.figures[name].values())


@pytest.mark.parametrize("name", ["segment_read", "replay"])
def test_reading_is_given_for_the_mix_and_for_each_size(results: Results, name: str) -> None:
    assert is_positive(results.figures[f"{name}_mb_s"])
    assert is_positive(results.figures[f"{name}_ratio"])
    by_rows = results.figures[f"{name}_by_rows"]
    assert set(by_rows) == ROWS
    for speed in by_rows.values():
        assert set(speed) == {"mb_s", "ratio"}
        assert all(is_positive(value) for value in speed.values())


@pytest.mark.parametrize(
    "name",
    [
        "wal_open_us",
        "crc_gb_s",
        "replay_without_open_mb_s",
        "replay_without_open_ratio",
        "segment_write_mb_s",
        "segment_write_ratio",
    ],
)
def test_other_figures_are_single_numbers(results: Results, name: str) -> None:
    assert is_positive(results.figures[name])


def test_the_circumstances_are_told(results: Results) -> None:
    figures = results.figures
    assert all(isinstance(figures[name], str) for name in ("python", "pyarrow", "isal"))
    assert figures["cpu_count"] >= 1
    assert figures["file_system"] is None or isinstance(figures["file_system"], str)
    assert figures["page_cache"] == "warm"
    assert figures["rounds"] == TINY.rounds
    assert figures["bytes"] > 100_000
    assert set(BENCHMARKS["formats"].facts) <= set(figures)


def test_figures_survive_json(results: Results) -> None:
    assert json.loads(json.dumps(results.figures)) == results.figures


def test_the_table_is_complete(results: Results) -> None:
    assert len(results.table.rows) == 13
    assert {len(row) for row in results.table.rows} == {len(results.table.columns)} == {5}


def test_every_round_is_announced(results: Results, ticks: list[str]) -> None:
    assert len(ticks) == formats.count_ticks(TINY)
    assert {ticks.count(label) for label in ticks} == {TINY.rounds}


@pytest.mark.parametrize("rows", formats.ROW_COUNTS)
def test_bundles_are_as_described(rows: int) -> None:
    bundles = formats.make_bundles(rows)
    batch = bundles[0].payloads[30].batch
    assert [str(data_type) for data_type in batch.schema.types] == ["int64", "int64", "string"]
    assert batch.num_rows == rows
    lengths = [len(str(message)) for message in batch.column("message").to_pylist()]
    assert 35 <= sum(lengths) / rows <= 45
    assert bundles[0] != bundles[1]
    assert bundles == formats.make_bundles(rows)


def test_the_mix_has_as_many_bundles_of_each_size() -> None:
    kinds = [formats.make_bundles(rows)[:2] for rows in formats.ROW_COUNTS]
    mix = formats.make_workload(kinds, 3_000_000)
    counts = [sum(bundle.row_count == rows for bundle in mix) for rows in formats.ROW_COUNTS]
    assert counts == [5, 5, 5]


def test_contenders_take_turns() -> None:
    calls: list[str] = []

    def called(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    best = race(
        {
            "plain": Contender(called("plain")),
            "ours": Contender(called("ours"), called("before"), called("after")),
        },
        2,
        called("tick"),
    )
    assert calls == ["tick", "plain", "before", "ours", "after"] * 2
    assert set(best) == {"plain", "ours"}


def test_a_contender_that_fails_is_cleaned_up_after() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # only this one can come
        race({"ours": Contender(fail, after=lambda: calls.append("after"))}, 3)
    assert calls == ["after"]


def test_a_directory_in_use_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with (
        pytest.raises(InvalidConfig, match=r"not empty.*--directory"),
        scratch_directory(RealDisk(), tmp_path, 0),
    ):
        pass
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_directory_without_space_is_refused(tmp_path: Path) -> None:
    class FullDisk(RealDisk):
        def free_space(self, path: Path) -> int:
            return 5_000_000

    with (
        pytest.raises(InvalidConfig, match="5 MB free and 7 MB are needed"),
        scratch_directory(FullDisk(), tmp_path, 7_000_000),
    ):
        pass


def test_files_are_removed_after_a_failure(tmp_path: Path) -> None:
    directory = tmp_path / "new"

    def interrupted() -> None:
        with scratch_directory(RealDisk(), directory, 0):
            (directory / "made").write_text("here")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(directory.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="mounts are not told here")
def test_the_file_system_of_a_path_is_found() -> None:
    assert measure.file_system_type(Path("/proc/self")) == "proc"
    assert measure.file_system_type(Path()) not in {None, "proc"}


def test_the_file_system_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_file(self: Path, **_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", no_such_file)
    assert measure.file_system_type(Path()) is None


def is_positive(value: object) -> bool:
    return isinstance(value, float) and value > 0
