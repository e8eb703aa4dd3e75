"""A table of the lake: files and positions in one commit, whoever else commits."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lake_tables
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError
from lake_tables import contents, land, rows_for

from quiver.bundle import Signal
from quiver.config import AttributeType, PromotedAttribute
from quiver.errors import InvalidConfig, LakeConflict, LakeError, LakeUnavailable
from quiver.lake.files import write_files
from quiver.lake.layout import Partition, queue_app, store_app, table_schema
from quiver.lake.places import LocalPlace
from quiver.lake.table import AlreadyThere, Committed, LakeTable

A, B, Q = store_app("a"), store_app("b"), queue_app("q")
METHOD = PromotedAttribute(key="http.request.method", column="method")
SIGNALS = list(Signal)
KEYS = ("source_store", "source_segment", "source_bundle", "source_item", "span_id")


@pytest.fixture
def spans(tmp_path: Path) -> LakeTable:
    return LakeTable.open(tmp_path / "lake", Signal.TRACES)


def again(table: LakeTable) -> LakeTable:
    """Another look at the same table, as another process has it."""
    return LakeTable.open(table.place.location.removesuffix("/spans"), table.signal)


def segments(table: LakeTable) -> Counter[object]:
    return Counter((store, segment) for store, segment, *_ in contents(table, KEYS))


# --- Opening ------------------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_new_table_is_empty_and_has_the_columns(signal: Signal, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="there is no table"):
        LakeTable.open(tmp_path, signal, create=False)
    made = LakeTable.open(tmp_path, signal, promoted=[METHOD])
    assert made.version == 0
    table = LakeTable.open(tmp_path, signal, create=False)
    assert table.schema.equals(table_schema(signal, [METHOD]))
    assert table.files() == []
    assert table.positions() == {}
    assert table.position(A) is None
    assert table.delta.metadata().partition_columns == ["year", "month", "day"]


def test_a_table_may_be_made_by_many_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from quiver.lake.table import LakeTable; from quiver.bundle import Signal; "
        "LakeTable.open(sys.argv[1], Signal.LOGS)"
    )
    racing = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lake")]) for _ in range(4)
    ]
    assert [process.wait(60) for process in racing] == [0] * 4
    table = LakeTable.open(tmp_path / "lake", Signal.LOGS, create=False)
    # delta-rs may commit a creation that was overtaken as a version that says the same again.
    assert table.version < len(racing)
    assert table.schema.equals(table_schema(Signal.LOGS))
    assert table.files() == []


# --- Appending ----------------------------------------------------------------------------------


def test_files_and_positions_come_together(spans: LakeTable) -> None:
    files = land(spans, "a", 0, items=30)
    assert spans.append(files, {A: 1, Q: 7}, info={"batch": "b-1"}) == Committed(1)
    for table in (spans, again(spans)):
        assert table.positions() == {A: 1, Q: 7}
        assert table.positions("quiver/queue/") == {Q: 7}
        assert table.paths() == {file.path for file in files}
        assert table.history(1)[0]["quiver.batch"] == "b-1"
        assert segments(table) == {("a", 0): 30}
    assert spans.at_version(0).positions() == {}
    assert spans.at_version(0).files() == []


def test_a_position_may_move_without_files(spans: LakeTable) -> None:
    assert spans.append([], {A: 5}) == Committed(1)
    assert again(spans).positions() == {A: 5}


def test_the_same_work_twice_is_there_once(spans: LakeTable) -> None:
    other = again(spans)
    spans.append(land(spans, "a", 0), {A: 1})
    assert spans.append(land(spans, "a", 0), {A: 1}) == AlreadyThere(1)
    assert other.append(land(other, "a", 0), {A: 1}) == AlreadyThere(1)
    assert again(spans).append(land(spans, "a", 0), {A: 1}, expected={A: None}) == AlreadyThere(1)
    assert segments(spans) == {("a", 0): 10}


def test_work_that_was_planned_from_elsewhere_is_refused(spans: LakeTable) -> None:
    slow = again(spans)
    spans.append(land(spans, "a", 0), {A: 1})
    # Segments 0 to 2, of which another one has landed the first.
    with pytest.raises(LakeConflict, match="stands at 1, and this work was planned from None"):
        slow.append([*land(slow, "a", 0), *land(slow, "a", 1)], {A: 3})
    with pytest.raises(LakeConflict):
        spans.append(land(spans, "a", 5), {A: 6}, expected={A: 5})
    assert segments(again(spans)) == {("a", 0): 10}


def test_sources_of_one_work_must_all_move(spans: LakeTable) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    with pytest.raises(LakeConflict, match="without it"):
        spans.append([*land(spans, "a", 0), *land(spans, "b", 0)], {A: 1, B: 1})
    assert spans.positions() == {A: 1}


def test_other_sources_do_not_disturb(spans: LakeTable) -> None:
    stale = again(spans)
    spans.append(land(spans, "a", 0), {A: 1})
    assert stale.append(land(stale, "b", 0), {B: 1}) == Committed(2)
    assert again(spans).positions() == {A: 1, B: 1}


def test_files_without_a_source_are_told_by_their_paths(spans: LakeTable) -> None:
    files = land(spans, "import", 0)
    assert spans.append(files, {}) == Committed(1)
    assert again(spans).append(files, {}) == AlreadyThere(1)


# --- Errors that leave a doubt ------------------------------------------------------------------


def failing(table: LakeTable, monkeypatch: pytest.MonkeyPatch, *, after: bool, times: int) -> None:
    real: Any = DeltaTable.create_write_transaction
    left = times

    def commit(self: DeltaTable, *args: object, **kwargs: object) -> None:
        nonlocal left
        left -= 1
        if left < 0 or after:
            real(self, *args, **kwargs)
        if left >= 0:
            raise DeltaError("the connection broke")

    table._sleep = lambda _: None
    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)


@pytest.mark.parametrize("after", [False, True])
def test_a_commit_that_failed_is_made_once(
    spans: LakeTable, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    failing(spans, monkeypatch, after=after, times=1 if after else 3)
    assert spans.append(land(spans, "a", 0), {A: 1}) == Committed(1)
    assert segments(spans) == {("a", 0): 10}


def test_a_replacement_that_failed_is_made_once(
    spans: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    failing(spans, monkeypatch, after=True, times=1)
    assert spans.replace(spans.files(), land(spans, "a", 0), data_change=False) == Committed(2)
    assert segments(spans) == {("a", 0): 10}


def test_somebody_gives_up_in_the_end(spans: LakeTable, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(spans, monkeypatch, after=False, times=10**9)
    spans.give_up_after = 0.05
    spans._sleep = time.sleep
    with pytest.raises(LakeUnavailable, match="the connection broke"):
        spans.append(land(spans, "a", 0), {A: 1})


# --- Replacing ----------------------------------------------------------------------------------


def test_a_replacement_takes_the_place_of_files(spans: LakeTable) -> None:
    for segment in range(3):
        spans.append(land(spans, "a", segment), {A: segment + 1})
    rows_before = sorted(map(repr, contents(spans, KEYS)))
    old = spans.files()
    read = [pq.read_table(pa.BufferReader(spans.place.read(file.path))) for file in old]
    new = write_files(spans.place, Signal.TRACES, pa.concat_tables(read), name="compacted")
    assert spans.replace(old, new, data_change=False, info={"job": "compact"}) == Committed(4)
    assert sorted(map(repr, contents(spans, KEYS))) == rows_before
    assert spans.paths() == {file.path for file in new}
    assert spans.positions() == {A: 3}
    entry = Path(spans.place.location, "_delta_log", f"{4:020d}.json").read_text()
    actions = [json.loads(line) for line in entry.splitlines()]
    changes = [a.get("add", a.get("remove")) for a in actions if "add" in a or "remove" in a]
    assert len(changes) == 4
    assert not any(change["dataChange"] for change in changes)


def test_a_replacement_of_files_that_are_gone_changes_nothing(spans: LakeTable) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    stale = again(spans)
    old = spans.files()
    spans.replace(old, [], data_change=True)
    for table in (spans, stale, again(spans)):
        with pytest.raises(LakeConflict, match="1 of 1 files were replaced"):
            table.replace(old, land(table, "a", 0), data_change=False)
    assert again(spans).files() == []


@pytest.mark.parametrize("winner_changes", [False, True])
@pytest.mark.parametrize("loser_changes", [False, True])
def test_of_two_replacements_of_a_file_one_is_made(
    spans: LakeTable, monkeypatch: pytest.MonkeyPatch, winner_changes: bool, loser_changes: bool
) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    faster, old = again(spans), spans.files()
    real = spans.paths

    def overtaken() -> set[str]:
        """The other one commits between the check and the commit."""
        found = real()
        if faster.version == spans.version:
            faster.replace(old, land(faster, "a", 0), data_change=winner_changes)
        return found

    monkeypatch.setattr(spans, "paths", overtaken)
    with pytest.raises(LakeConflict):
        spans.replace(old, land(spans, "a", 0), data_change=loser_changes)
    assert segments(again(spans)) == {("a", 0): 10}


def test_appends_and_replacements_of_stale_handles_both_happen(spans: LakeTable) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    stale = again(spans)
    old = spans.files()
    spans.replace(old, land(spans, "a", 0), data_change=True)
    assert stale.append(land(stale, "a", 1), {A: 2}) == Committed(3)
    assert spans.replace(spans.files(), [], data_change=True) == Committed(4)
    assert segments(again(spans)) == {("a", 1): 10}


# --- Columns ------------------------------------------------------------------------------------


def test_new_columns_come_without_rewriting(tmp_path: Path) -> None:
    table = LakeTable.open(tmp_path, Signal.TRACES)
    (old,) = land(table, "a", 0)
    table.append([old], {A: 1})
    written = Path(table.place.location, old.path).read_bytes()
    stale = LakeTable.open(tmp_path, Signal.TRACES)
    wider = LakeTable.open(tmp_path, Signal.TRACES, promoted=[METHOD])
    assert wider.schema.names == [*table.schema.names, "method"]
    rows = rows_for(Signal.TRACES, [METHOD], store="b")
    wider.append(write_files(wider.place, Signal.TRACES, rows, name="b"), {B: 1})
    # One who does not know of the column goes on, after another look.
    assert isinstance(stale.append(land(stale, "a", 1), {A: 2}), Committed)
    assert Path(table.place.location, old.path).read_bytes() == written
    read = stale.delta.to_pyarrow_table(columns=["source_store", "method"])
    by_store = Counter(zip(*(read.column(n).to_pylist() for n in read.column_names), strict=True))
    assert by_store["a", None] == 20
    assert {method for store, method in by_store if store == "b"} > {None}
    assert LakeTable.open(tmp_path, Signal.TRACES, promoted=[METHOD]).version == stale.version


def test_a_column_keeps_its_type_and_its_spelling(tmp_path: Path) -> None:
    LakeTable.open(tmp_path, Signal.LOGS, promoted=[METHOD])
    other = PromotedAttribute(key="m", column="method", type=AttributeType.INT)
    with pytest.raises(InvalidConfig, match="'method' is string and cannot become int64"):
        LakeTable.open(tmp_path, Signal.LOGS, promoted=[other])
    with pytest.raises(InvalidConfig, match="most engines do not tell from 'METHOD'"):
        LakeTable.open(
            tmp_path, Signal.LOGS, promoted=[PromotedAttribute(key="m", column="METHOD")]
        )


# --- Files and their statistics -------------------------------------------------------------------


def test_files_are_found_by_day_with_statistics_of_promoted_columns(tmp_path: Path) -> None:
    table = LakeTable.open(tmp_path, Signal.TRACES, promoted=[METHOD])
    day = 86_400_000_000_000
    for back in range(3):
        rows = rows_for(Signal.TRACES, [METHOD], segment=back, start=lake_tables.START - back * day)
        files = write_files(table.place, Signal.TRACES, rows, name=f"{back}")
        table.append(files, {A: back + 1})
    assert [file.partition for file in table.files()] == [
        Partition(2025, 10, 7),
        Partition(2025, 10, 8),
        Partition(2025, 10, 9),
    ]
    (file,) = table.files(
        first=dt.date(2025, 10, 8),
        last=dt.date(2025, 10, 8),
        columns=["method", "start_time", "ingested_time", "nothing"],
    )
    assert file.rows == 60
    assert file.stats["method"].smallest < file.stats["method"].largest
    assert file.stats["method"].nulls
    assert file.stats["ingested_time"].nulls == 0  # behind the 32 columns that are the default
    assert file.stats["ingested_time"].largest.date() == dt.date(2025, 10, 9)
    assert file.stats["start_time"].smallest.date() == dt.date(2025, 10, 8)
    assert file.stats["nothing"] == (None, None, None)
    assert len(table.files(first=dt.date(2025, 10, 8))) == 2
    assert len(table.files(last=dt.date(2025, 10, 8))) == 2


def test_positions_survive_checkpoints_and_a_cleaned_log(spans: LakeTable) -> None:
    for position in range(1, 50):
        spans.append([], {store_app(f"s{position // 10}"): position})
    expected = {store_app(f"s{n}"): 10 * n + 9 for n in range(5)}
    assert spans.positions() == expected
    log = Path(spans.place.location, "_delta_log")
    newest = max(int(path.name[:20]) for path in log.glob("*.checkpoint.parquet"))
    assert newest >= 20
    for path in log.glob("*.json"):
        if path.name[:20].isdecimal() and int(path.name[:20]) < newest:
            path.unlink()
    assert again(spans).positions() == expected


def test_vacuum_deletes_what_is_old_and_not_listed(spans: LakeTable) -> None:
    spans.append(land(spans, "a", 0), {A: 1})
    (orphan,), (fresh,) = land(spans, "a", 1), land(spans, "a", 2)
    old = time.time() - 50 * 3600
    root = Path(spans.place.location)
    os.utime(root / orphan.path, (old, old))
    (listed,) = spans.files()
    os.utime(root / listed.path, (old, old))
    assert spans.vacuum(dt.timedelta(hours=24), dry_run=True) == [orphan.path]
    assert (root / orphan.path).exists()
    assert spans.vacuum(dt.timedelta(hours=24)) == [orphan.path]
    assert not (root / orphan.path).exists()
    assert (root / fresh.path).exists()
    assert segments(again(spans)) == {("a", 0): 10}


def test_the_log_is_settled_before_a_commit_is_reported(
    spans: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[str] = []
    real = LocalPlace.settle

    def settle(self: LocalPlace, folder: str, chosen: Callable[[str], bool]) -> None:
        names = [file.path.removeprefix("_delta_log/") for file in self.list(folder)]
        settled.extend(name for name in names if chosen(f"{folder}/{name}"))
        real(self, folder, chosen)

    monkeypatch.setattr(LocalPlace, "settle", settle)
    stale = again(spans)
    spans.append(land(spans, "a", 0), {A: 1})
    assert settled == [f"{version:020d}.json" for version in (0, 1)]
    settled.clear()
    assert stale.append(land(stale, "a", 0), {A: 1}) == AlreadyThere(1)
    assert settled == [f"{version:020d}.json" for version in (0, 1)]
    settled.clear()
    stale.append(land(stale, "b", 0), {B: 1})
    spans.replace(spans.files(), [], data_change=True)
    assert settled == [f"{version:020d}.json" for version in (2, 2, 3)]


def test_delta_still_refuses_what_the_design_counts_on(spans: LakeTable) -> None:
    """A stale handle with the same app id fails: without that, check and commit would race."""
    stale = again(spans)
    spans.append([], {A: 1})
    stale._table.update_incremental = lambda: None  # type: ignore[method-assign]
    stale.give_up_after = 0
    with pytest.raises(LakeUnavailable) as caught:
        stale.append(land(stale, "a", 0), {A: 1})
    assert isinstance(caught.value.__cause__, CommitFailedError)
