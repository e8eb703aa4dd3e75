"""Bundles for tests: a plain one, and strategies for every kind of batch that Arrow can make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from quiver.bundle import RecordBundle

START_NS = 1_700_000_000_000_000_000


def numbers(*values: int) -> pa.RecordBatch:
    """One int64 column."""
    return pa.record_batch({"value": pa.array(values, pa.int64())})


def plain_bundle(index: int, rows: int = 3) -> RecordBundle:
    """A bundle with one slot, told from others by its index."""
    return RecordBundle.from_batches(
        {30: numbers(*range(index, index + rows))},
        ingestion_time_ns=START_NS + index,
        item_count=rows,
    )


def dictionary(
    values: list[Any], key_type: pa.DataType | None = None, *, ordered: bool = False
) -> pa.DictionaryArray[Any, Any]:
    """An array that uses each value of its dictionary once."""
    keys: Any = pa.array(range(len(values)), key_type or pa.uint8())
    return pa.DictionaryArray.from_arrays(keys, pa.array(values), ordered=ordered)


def map_array(offsets: list[int], keys: pa.Array[Any], items: pa.Array[Any]) -> pa.Array[Any]:
    """A map array; the stubs know only its rarer forms."""
    make: Any = pa.MapArray.from_arrays
    made: pa.Array[Any] = make(pa.array(offsets, pa.int32()), keys, items)
    return made


def same_values(left: pa.RecordBatch, right: pa.RecordBatch) -> bool:
    """Equal schema and equal values, whatever the dictionaries behind them look like."""
    return left.schema.equals(right.schema, check_metadata=True) and repr(left.to_pylist()) == repr(
        right.to_pylist()
    )


_TEXT = st.text(max_size=8)
_LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint8(), st.integers(0, 255)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), _TEXT),
    (pa.large_string(), _TEXT),
    (pa.string_view(), _TEXT),
    (pa.binary(), st.binary(max_size=8)),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
    (pa.timestamp("ns", "UTC"), st.integers(0, 2**62)),
    (pa.null(), st.none()),
]
_DICTIONARY_VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), _TEXT),
    (pa.binary(), st.binary(max_size=8)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
]
_KEY_TYPES = [pa.uint8(), pa.int8(), pa.uint16(), pa.int32()]

ArrayMaker = Callable[[st.DrawFn, int], "pa.Array[Any]"]


def _leaf_array(data_type: pa.DataType, values: st.SearchStrategy[Any]) -> ArrayMaker:
    def make(draw: st.DrawFn, size: int) -> pa.Array[Any]:
        items = draw(st.lists(st.none() | values, min_size=size, max_size=size))
        return pa.array(items, data_type)

    return make


def _dictionary_array(
    key_type: pa.DataType, value_type: pa.DataType, values: st.SearchStrategy[Any]
) -> ArrayMaker:
    def make(draw: st.DrawFn, size: int) -> pa.Array[Any]:
        items = draw(st.lists(values, min_size=1, max_size=6, unique=True))
        places = st.none() | st.integers(0, len(items) - 1)
        indices: Any = pa.array(draw(st.lists(places, min_size=size, max_size=size)), key_type)
        return pa.DictionaryArray.from_arrays(indices, pa.array(items, value_type))

    return make


def _offsets(draw: st.DrawFn, size: int) -> list[int]:
    steps = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    offsets = [0]
    for step in steps:
        offsets.append(offsets[-1] + step)
    return offsets


def _struct_array(children: list[ArrayMaker]) -> ArrayMaker:
    def make(draw: st.DrawFn, size: int) -> pa.Array[Any]:
        arrays = [child(draw, size) for child in children]
        return pa.StructArray.from_arrays(arrays, [f"f{i}" for i in range(len(arrays))])

    return make


def _list_array(child: ArrayMaker) -> ArrayMaker:
    def make(draw: st.DrawFn, size: int) -> pa.Array[Any]:
        offsets = _offsets(draw, size)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child(draw, offsets[-1]))

    return make


def _map_array(child: ArrayMaker) -> ArrayMaker:
    def make(draw: st.DrawFn, size: int) -> pa.Array[Any]:
        offsets = _offsets(draw, size)
        keys = pa.array([f"k{i}" for i in range(offsets[-1])], pa.string())
        return map_array(offsets, keys, child(draw, offsets[-1]))

    return make


def _array_makers() -> st.SearchStrategy[ArrayMaker]:
    leaves = st.sampled_from(_LEAVES).map(lambda leaf: _leaf_array(*leaf))
    dictionaries = st.tuples(st.sampled_from(_KEY_TYPES), st.sampled_from(_DICTIONARY_VALUES)).map(
        lambda drawn: _dictionary_array(drawn[0], *drawn[1])
    )
    return st.recursive(
        leaves | dictionaries,
        lambda children: (
            st.lists(children, min_size=1, max_size=2).map(_struct_array)
            | children.map(_list_array)
            | children.map(_map_array)
        ),
        max_leaves=3,
    )


@st.composite
def batches_of_one_schema(
    draw: st.DrawFn, *, min_size: int = 1, max_size: int = 4
) -> list[pa.RecordBatch]:
    """Batches that agree in schema and have data and dictionaries of their own."""
    makers = draw(st.lists(_array_makers(), min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(0, 5), min_size=min_size, max_size=max_size))
    names = [f"c{i}" for i in range(len(makers))]
    made: list[pa.RecordBatch] = []
    for size in sizes:
        arrays = [maker(draw, size) for maker in makers]
        made.append(pa.RecordBatch.from_arrays(arrays, names=names))
    return made


@st.composite
def bundles(draw: st.DrawFn, *, max_size: int = 4) -> list[RecordBundle]:
    """Bundles that share schemas per slot, each with some of the slots, in any order."""
    slots = draw(st.lists(st.integers(0, 63), min_size=1, max_size=3, unique=True))
    count = draw(st.integers(1, max_size))
    columns = {slot: draw(batches_of_one_schema(min_size=count, max_size=count)) for slot in slots}
    made = []
    for index in range(count):
        chosen = draw(st.lists(st.sampled_from(slots), unique=True))
        made.append(
            RecordBundle.from_batches(
                {slot: columns[slot][index] for slot in chosen},
                ingestion_time_ns=draw(st.integers(0, 2**63 - 1)),
                item_count=draw(st.none() | st.integers(0, 2**64 - 1)),
            )
        )
    return made
