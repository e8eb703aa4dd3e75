"""Several processes that append to one table and replace its files, on a disk and on S3."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import lake_tables
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_tables import contents, land

from quiver.bundle import Signal
from quiver.config import PromotedAttribute
from quiver.errors import LakeConflict
from quiver.lake.layout import store_app
from quiver.lake.table import AlreadyThere, Committed, LakeTable

if TYPE_CHECKING:
    from s3 import S3Server  # which pytest imports itself, as a plugin

pytest_plugins = ["s3"]

A, B = store_app("a"), store_app("b")
METHOD = PromotedAttribute(key="http.request.method", column="method")
KEYS = ("source_store", "source_segment", "source_bundle", "source_item", "span_id")


@pytest.fixture
def spans(tmp_path: Path) -> LakeTable:
    return LakeTable.open(tmp_path / "lake", Signal.TRACES)


def segments(table: LakeTable) -> Counter[object]:
    return Counter((store, segment) for store, segment, *_ in contents(table, KEYS))


def run_writers(root: str, options: str, work: list[tuple[str, str, int]]) -> list[dict[str, int]]:
    script = str(Path(lake_tables.__file__))
    with ExitStack() as ending:
        racing = []
        for kind, name, rounds in work:
            command = [sys.executable, script, root, kind, name, str(rounds), options]
            process = ending.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            ending.callback(process.kill)
            racing.append(process)
        answers = []
        for process in racing:  # the appending ones first: the others wait for something to replace
            output, _ = process.communicate(timeout=100)
            assert process.returncode == 0
            answers.append(json.loads(output))
    return answers


def check_every_version(table: LakeTable, oldest: int = 0) -> None:
    """At every version: the segments below each position, all of them, and each row once."""
    kept: dict[str, list[tuple[object, ...]]] = {}
    for version in range(oldest, table.version + 1):
        old = table.at_version(version)
        expected = Counter(
            (app.removeprefix("quiver/store/"), segment)
            for app, position in old.positions().items()
            for segment in range(position)
            for _ in range(10)
        )
        found: list[tuple[object, ...]] = []
        for file in old.files():
            if file.path not in kept:
                read = pq.read_table(pa.BufferReader(old.place.read(file.path)), columns=list(KEYS))
                columns = (read.column(name).to_pylist() for name in KEYS)
                kept[file.path] = list(zip(*columns, strict=True))
            found += kept[file.path]
        assert len(set(found)) == len(found)
        assert Counter(row[:2] for row in found) == expected


@pytest.mark.timeout(180)
def test_many_writers_lose_and_double_nothing(spans: LakeTable, tmp_path: Path) -> None:
    work = [
        *[("append", "a", 8), ("append", "a", 8), ("append", "b", 8)],
        *[("replace", "r", 4), ("replace", "s", 4)],
    ]
    answers = run_writers(str(tmp_path / "lake"), "{}", work)
    spans.refresh()
    assert spans.positions() == {A: 8, B: 8}
    assert answers[0]["made"] + answers[1]["made"] == 8
    assert answers[2]["made"] == 8
    assert answers[3]["made"] + answers[4]["made"] == 8
    assert segments(spans) == {(store, n): 10 for store in "ab" for n in range(8)}
    check_every_version(spans)


def test_the_check_finds_what_it_looks_for(spans: LakeTable) -> None:
    files = land(spans, "a", 0)
    spans.append(files, {A: 1})
    check_every_version(spans)
    spans.append(land(spans, "a", 0), {})  # a doubled segment
    with pytest.raises(AssertionError):
        check_every_version(spans)


# --- On an object store -------------------------------------------------------------------------


@pytest.mark.xdist_group("s3")
@pytest.mark.timeout(180)
def test_a_table_in_an_object_store(s3_server: S3Server) -> None:
    root = s3_server.url("lake-table")
    table = LakeTable.open(root, Signal.TRACES, storage_options=s3_server.keys)
    stale = LakeTable.open(root, Signal.TRACES, storage_options=s3_server.keys)
    assert table.append(land(table, "a", 0), {A: 1}) == Committed(1)
    assert stale.append(land(stale, "a", 0), {A: 1}) == AlreadyThere(1)
    assert stale.append(land(stale, "b", 0), {B: 1}) == Committed(2)
    table.refresh()
    old = table.files()
    new = [*land(table, "a", 0), *land(table, "b", 0)]
    assert table.replace(old, new, data_change=False) == Committed(3)
    with pytest.raises(LakeConflict):
        stale.replace(old, [], data_change=True)
    assert segments(table) == {("a", 0): 10, ("b", 0): 10}
    wider = LakeTable.open(root, Signal.TRACES, promoted=[METHOD], storage_options=s3_server.keys)
    assert wider.schema.names[-1] == "method"
    assert wider.positions() == {A: 1, B: 1}
    assert wider.vacuum(dt.timedelta(hours=1)) == []
    read = wider.delta.to_pyarrow_table(columns=["source_store", "method"])
    assert read.num_rows == 20


@pytest.mark.xdist_group("s3")
@pytest.mark.timeout(180)
def test_many_writers_on_an_object_store(s3_server: S3Server) -> None:
    root = s3_server.url("lake-race")
    table = LakeTable.open(root, Signal.TRACES, storage_options=s3_server.keys)
    work = [("append", "a", 6), ("append", "a", 6), ("append", "b", 6), ("replace", "r", 3)]
    answers = run_writers(root, json.dumps(s3_server.keys), work)
    table.refresh()
    assert answers[0]["made"] + answers[1]["made"] == 6
    assert table.positions() == {A: 6, B: 6}
    check_every_version(table)
