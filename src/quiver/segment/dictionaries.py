"""Dictionaries inside a stream: equal values are stored once, and key types never change.

An Arrow IPC file has one dictionary per field for all its batches. Batches that arrive with
dictionaries of their own are therefore given a common one: the union of the values, in order of
first appearance, at whatever depth the field lies. Their key type stays what it was; when the union
has more values than the keys can address, the stream ends there and the rest goes to another one
for the same slot and schema. Readers get back the types they wrote, at any cardinality.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from quiver.ipc import can_share_file, has_dictionaries, has_ordered_dictionaries


def split_and_unify(batches: Sequence[pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
    """Batches of one schema, in order, as runs that can each share one set of dictionaries."""
    if len(batches) <= 1 or not has_dictionaries(batches[0].schema):
        return [list(batches)]
    runs = []
    start = 0
    while start < len(batches):
        run = _longest_run(batches[start:])
        runs.append(run)
        start += len(run)
    return runs


def _longest_run(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """As many batches from the start as can share dictionaries: at least one."""
    whole = _unify(batches)
    if whole is not None:
        return whole
    fits = [batches[0]]
    low, high = 1, len(batches)  # a run of `low` batches fits, one of `high` does not
    while high - low > 1:
        # Doubling first: runs are often much shorter than what is left to place.
        middle = min(2 * low, (low + high) // 2)
        run = _unify(batches[:middle])
        if run is None:
            high = middle
        else:
            fits, low = run, middle
    return fits


def _unify(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch] | None:
    """The batches with common dictionaries; None when there can be none.

    Arrow refuses unions that are too large for the keys, and the rare kinds it cannot merge:
    dictionaries with null values or of nested types. An order among values would not survive a
    union, so ordered dictionaries are not merged: they share a stream only when they are equal.
    """
    if len(batches) == 1:
        return list(batches)
    if has_ordered_dictionaries(batches[0].schema):
        return list(batches) if can_share_file(batches) else None
    table = pa.Table.from_batches(batches)
    try:
        unified = table.unify_dictionaries()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    # Table.to_batches would split and merge at will; columns keep the chunks they came with.
    columns = [column.chunks for column in unified.columns]
    return [
        pa.RecordBatch.from_arrays([chunks[i] for chunks in columns], schema=batches[0].schema)
        for i in range(len(batches))
    ]
