"""Figures as OpenMetrics: what a reader of the format gets out of it is what was counted."""

from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.metrics import Metrics
from quiver.openmetrics import Figures, merged, render, split

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|\})')
SUFFIXES = {
    "counter": {"_total"},
    "gauge": {""},
    "histogram": {"_bucket", "_count", "_sum"},
}


def read(text: str) -> dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]]:
    """A reader that is as strict as the specification: samples by family."""
    assert text.endswith("# EOF\n")
    families: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    kind = ""
    family = ""
    for line in text.split("\n")[:-2]:
        if line.startswith("#"):
            _, word, family, kind = line.split(" ")
            assert word == "TYPE"
            assert family not in families, "a family stands in one place"
            families[family] = {}
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        assert name.removeprefix(family) in SUFFIXES[kind], (family, kind, name)
        key = (name, tuple(read_labels(labels or "")))
        assert key not in families[family], "a sample stands there once"
        families[family][key] = float(value)
    return families


def read_labels(text: str) -> list[tuple[str, str]]:
    found = []
    rest = text.removeprefix("{")
    while rest:
        match = LABEL.match(rest)
        assert match, text
        value = re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[2])
        found.append((match[1], value))
        rest = rest[match.end() :]
    return found


def test_counters_gauges_and_histograms() -> None:
    metrics = Metrics()
    metrics.count("quiver.gc.evictions_total", 3, reason="size")
    metrics.set("quiver.wal.bytes", 4096)
    for value in (0.5, 1.0, 1.5, 99.0):
        metrics.observe("quiver.commit.seconds", value, (1.0, 2.0))
    text = render(Figures.of(metrics))
    assert text == (
        "# TYPE quiver_commit_seconds histogram\n"
        'quiver_commit_seconds_bucket{le="1.0"} 2\n'
        'quiver_commit_seconds_bucket{le="2.0"} 3\n'
        'quiver_commit_seconds_bucket{le="+Inf"} 4\n'
        "quiver_commit_seconds_count 4\n"
        "quiver_commit_seconds_sum 102.0\n"
        "# TYPE quiver_gc_evictions counter\n"
        'quiver_gc_evictions_total{reason="size"} 3.0\n'
        "# TYPE quiver_wal_bytes gauge\n"
        "quiver_wal_bytes 4096.0\n"
        "# EOF\n"
    )


def test_nothing_is_a_text_as_well() -> None:
    assert render(Figures()) == "# EOF\n"


def test_processes_are_told_apart_by_their_labels() -> None:
    parts = []
    for core in (0, 1):
        metrics = Metrics()
        metrics.count("a.b_total", core + 1, node="x")
        metrics.observe("c.seconds", core, (0.5,))
        parts.append(Figures.of(metrics).labelled(core=core))
    families = read(render(merged(parts)))
    assert families["a_b"] == {
        ("a_b_total", (("core", "0"), ("node", "x"))): 1,
        ("a_b_total", (("core", "1"), ("node", "x"))): 2,
    }
    assert families["c_seconds"][("c_seconds_bucket", (("core", "1"), ("le", "0.5")))] == 0
    assert families["c_seconds"][("c_seconds_count", (("core", "1"),))] == 1


def test_the_same_name_and_labels_are_added() -> None:
    metrics = Metrics()
    metrics.count("a_total", 2)
    metrics.observe("b", 1.0, (2.0,))
    families = read(render(merged([Figures.of(metrics), Figures.of(metrics)])))
    assert families["a"][("a_total", ())] == 4
    assert families["b"][("b_count", ())] == 2
    assert families["b"][("b_sum", ())] == 2


def test_merging_leaves_the_parts_alone() -> None:
    metrics = Metrics()
    metrics.observe("b", 1.0, (2.0,))
    part = Figures.of(metrics)
    merged([part, part])
    assert part.histograms["b"].count == 1


def test_one_name_is_of_one_type() -> None:
    figures = Figures({"a_total": 1.0, "a": 2.0, 'a{x="y"}': 3.0})
    families = read(render(figures))
    assert families["a"] == {("a_total", ()): 1}
    assert families["a_now"] == {("a_now", ()): 2, ("a_now", (("x", "y"),)): 3}


def test_numbers_that_are_none() -> None:
    text = render(Figures({"a": math.nan, "b": math.inf, "c": -math.inf, "d": True}))
    assert "a NaN\n" in text
    assert "b +Inf\n" in text
    assert "c -Inf\n" in text
    assert "d 1.0\n" in text


LABEL_VALUES = st.text(max_size=12).filter(lambda text: '="' not in text and "\r" not in text)


@given(
    values=st.dictionaries(st.text("ab.", min_size=1, max_size=6), st.floats(), max_size=5),
    label=LABEL_VALUES,
)
def test_any_name_and_label_can_be_read(values: dict[str, float], label: str) -> None:
    metrics = Metrics()
    for name, value in values.items():
        metrics.set(name, value, node=label)
    families = read(render(Figures.of(metrics)))
    labels = {dict(found)["node"] for family in families.values() for _, found in family}
    assert labels == ({label} if values else set())
    assert sum(map(len, families.values())) == len(values)


@given(st.text(max_size=20))
def test_labels_can_be_taken_from_a_name(value: str) -> None:
    metrics = Metrics()
    metrics.count("a_total", node="n", peer="x,y")
    (name,) = metrics.values()
    assert split(name) == ("a_total", {"node": "n", "peer": "x,y"})
    assert split(value)[0] is not None


def test_figures_travel_as_json() -> None:
    metrics = Metrics()
    metrics.count("a_total", 2, node="x")
    metrics.observe("b.seconds", 0.3)
    sent = Figures.of(metrics)
    got = Figures.from_json(json.loads(json.dumps(sent.to_json())))
    assert render(got) == render(sent)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"values": {}},
        {"values": {"a": "x"}, "histograms": {}},
        {"values": {}, "histograms": {"a": [[1.0], [1], 0.0]}},
        {"values": {}, "histograms": {"a": 3}},
    ],
)
def test_what_is_no_figures_is_refused(document: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Figures.from_json(document)


def test_a_copy_of_a_histogram_stays_as_it_was() -> None:
    metrics = Metrics()
    metrics.observe("a", 1.0, (2.0,))
    before = metrics.histograms()["a"]
    metrics.observe("a", 1.0, (2.0,))
    assert (before.count, before.counts) == (1, [1, 0])
    assert metrics.histograms()["a"].count == 2
