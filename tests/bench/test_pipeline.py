"""The benchmark of the pipeline, on very little data: what it reports, what it leaves behind."""

from __future__ import annotations

import pytest

from quiver.bench import BENCHMARKS, pipeline
from quiver.bench.measure import Plan, Results
from quiver.disk import RealDisk

TINY = Plan(rounds=1, megabytes=1)


@pytest.fixture(scope="module")
def ticks() -> list[str]:
    return []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ticks: list[str]) -> Results:
    directory = tmp_path_factory.mktemp("bench")
    found = pipeline.run(RealDisk(), directory, TINY, ticks.append)
    assert list(directory.iterdir()) == []
    return found


def test_both_protocols_are_measured_with_and_without_a_store(results: Results) -> None:
    by_protocol = results.figures["results"]
    assert set(by_protocol) == {"http", "grpc"}
    for by_spans in by_protocol.values():
        assert set(by_spans) == {"10", "500"}
        for rows in by_spans.values():
            assert set(rows) == {"plain", "durable"}
            for row in rows.values():
                assert all(value > 0 for value in row.values())
                assert row["p50_ms"] <= row["p99_ms"]


def test_the_ratio_is_that_of_durable_to_plain(results: Results) -> None:
    rows = results.figures["results"]["http"]["500"]
    ratio = rows["durable"]["requests_s"] / rows["plain"]["requests_s"]
    assert results.figures["ratio"]["http"]["500"] == pytest.approx(ratio, abs=0.001)


def test_it_ticks_as_often_as_it_says(results: Results, ticks: list[str]) -> None:
    assert results.table.rows
    assert len(ticks) == BENCHMARKS["pipeline"].count_ticks(TINY)


def test_the_circumstances_are_told(results: Results) -> None:
    assert set(BENCHMARKS["pipeline"].facts) <= set(results.figures)
    assert results.figures["outage_bytes"] > 0
