"""The benchmark of OTLP, on very little data: what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.bench import BENCHMARKS, otlp
from quiver.bench.measure import Plan, Results
from quiver.bundle import Signal
from quiver.disk import RealDisk

TINY = Plan(rounds=1, megabytes=1)
TASKS = ("decode", "to_otap", "encode")


@pytest.fixture(scope="module")
def ticks() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ticks: list[str]) -> Results:
    directory: Path = tmp_path_factory.mktemp("bench")
    found = otlp.run(RealDisk(), directory, TINY, ticks.append)
    assert list(directory.iterdir()) == []
    return found


def test_every_signal_and_group_has_its_figures(results: Results) -> None:
    by_signal = results.figures["results"]
    assert set(by_signal) == set(Signal)
    for by_group in by_signal.values():
        assert set(by_group) == {f"{requests}x{items}" for requests, items in otlp.GROUPS}
        for row in by_group.values():
            for task in TASKS:
                assert row[task] > 0
                assert row[f"{task}_ratio"] > 0
            assert row["bytes_per_item"] > 0


def test_it_ticks_as_often_as_it_says(results: Results, ticks: list[str]) -> None:
    assert results.table.rows
    assert len(ticks) == BENCHMARKS["otlp"].count_ticks(TINY)


def test_the_circumstances_are_told(results: Results) -> None:
    assert set(BENCHMARKS["otlp"].facts) <= set(results.figures)
