"""Rows for the lake, and writers that work on one table from several processes.

Run as a script it is one of those writers: ``lake_tables.py ROOT KIND NAME ROUNDS [OPTIONS]``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from quiver.bundle import Signal
from quiver.config import OtlpConfig, PromotedAttribute
from quiver.errors import LakeConflict
from quiver.lake.decoding import StoredRequest, decode_rows
from quiver.lake.files import NewFile, write_files
from quiver.lake.layout import store_app
from quiver.lake.table import Committed, LakeTable
from quiver.otlp import Source
from quiver.testing import Shape, Telemetry

START = 1_760_000_000_000_000_000  # when the generated telemetry begins: 2025-10-09
INGESTED = START + 60_000_000_000


def requests_for(
    signal: Signal,
    *,
    store: str = "store",
    segment: int = 0,
    requests: int = 3,
    items: int = 20,
    seed: int = 5,
    start: int = START,
) -> list[StoredRequest]:
    shape = Shape(items_per_request=items, start_time_unix_nano=start)
    return [
        StoredRequest(data, Source(store, segment, bundle, 0), INGESTED + bundle * 1_000_000)
        for bundle, data in enumerate(Telemetry(seed, shape).take(signal, requests))
    ]


def rows_for(
    signal: Signal,
    promoted: Sequence[PromotedAttribute] = (),
    *,
    store: str = "store",
    segment: int = 0,
    requests: int = 3,
    items: int = 20,
    seed: int = 5,
    start: int = START,
) -> pa.Table:
    stored = requests_for(
        signal,
        store=store,
        segment=segment,
        requests=requests,
        items=items,
        seed=seed,
        start=start,
    )
    config = OtlpConfig(promoted=tuple(promoted))
    return pa.concat_tables(rows.table for rows in decode_rows(signal, stored, config))


def land(
    table: LakeTable, store: str, segment: int, *, requests: int = 1, items: int = 10
) -> list[NewFile]:
    """Files of one segment, not committed yet."""
    rows = rows_for(
        table.signal, store=store, segment=segment, requests=requests, items=items, seed=segment
    )
    return write_files(table.place, table.signal, rows, name=f"{store}-{segment}")


def contents(table: LakeTable, columns: Sequence[str]) -> list[tuple[object, ...]]:
    """Some columns of all rows that the table lists."""
    found: list[tuple[object, ...]] = []
    for file in table.files():
        read = pq.read_table(pa.BufferReader(table.place.read(file.path)), columns=list(columns))
        assert read.num_rows == file.rows
        found += zip(*(read.column(name).to_pylist() for name in columns), strict=True)
    return found


# --- A writer of its own ------------------------------------------------------------------------


def append_forever(table: LakeTable, store: str, rounds: int) -> dict[str, int]:
    """Land segments 0 to ``rounds``, also while others try to land the same ones."""
    app = store_app(store)
    made = there = 0
    table.refresh()
    while (position := table.position(app) or 0) < rounds:
        files = land(table, store, position)
        try:
            answer = table.append(files, {app: position + 1})
        except LakeConflict:
            there += 1
            table.refresh()
            continue
        made += isinstance(answer, Committed)
        there += not isinstance(answer, Committed)
    return {"made": made, "there": there}


def replace_forever(table: LakeTable, name: str, rounds: int) -> dict[str, int]:
    """Rewrite the smallest files into one, again and again."""
    made = lost = 0
    while made < rounds:
        table.refresh()
        old = sorted(table.files(), key=lambda file: file.size)[:4]
        if not old:
            continue
        read = [pq.read_table(pa.BufferReader(table.place.read(file.path))) for file in old]
        new = write_files(table.place, table.signal, pa.concat_tables(read), name=f"{name}-{made}")
        try:
            table.replace(old, new, data_change=False)
            made += 1
        except LakeConflict:
            lost += 1
    return {"made": made, "lost": lost}


def main(root: str, kind: str, name: str, rounds: str, options: str = "{}") -> None:
    table = LakeTable.open(root, Signal.TRACES, storage_options=json.loads(options))
    work = append_forever if kind == "append" else replace_forever
    print(json.dumps(work(table, name, int(rounds))))  # noqa: T201 - for the one who started it


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(*sys.argv[1:])
