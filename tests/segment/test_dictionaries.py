"""Dictionaries: key types stay, equal values are stored once, overflow opens a new run."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from bundles import batches_of_one_schema, dictionary, map_array, same_values
from hypothesis import given
from hypothesis import strategies as st

from quiver.ipc import can_share_file, encode_file
from quiver.segment.dictionaries import split_and_unify


def one_column(array: pa.Array[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([array], ["k"])


def flattened(runs: list[list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    return [batch for run in runs for batch in run]


def dictionary_of(batch: pa.RecordBatch) -> list[Any]:
    column = batch.column(0)
    assert isinstance(column, pa.DictionaryArray)
    return column.dictionary.to_pylist()


@given(batches_of_one_schema(max_size=6))
def test_order_types_and_values_are_kept(batches: list[pa.RecordBatch]) -> None:
    runs = split_and_unify(batches)
    back = flattened(runs)
    assert len(back) == len(batches)
    for unified, batch in zip(back, batches, strict=True):
        unified.validate(full=True)
        assert same_values(unified, batch)
    for run in runs:
        assert can_share_file(run)
        encode_file(run[0].schema, run)


def test_equal_values_are_stored_once() -> None:
    batches = [one_column(dictionary(["a", "b"])), one_column(dictionary(["b", "c"]))]
    ((first, second),) = split_and_unify(batches)
    assert dictionary_of(first) == dictionary_of(second) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("key_type", "capacity"),
    [(pa.uint8(), 255), (pa.int8(), 127)],
    ids=str,
)
def test_a_full_key_type_ends_the_run_and_stays_as_it_is(
    key_type: pa.DataType, capacity: int
) -> None:
    batches = [one_column(dictionary([f"{i}-{j}" for j in range(50)], key_type)) for i in range(12)]
    runs = split_and_unify(batches)
    assert [len(run) for run in runs] == [capacity // 50] * (12 // (capacity // 50)) + [
        12 % (capacity // 50)
    ] * bool(12 % (capacity // 50))
    for batch in flattened(runs):
        assert batch.schema == batches[0].schema


def test_sixteen_bit_keys_overflow_into_a_second_run() -> None:
    batches = [
        one_column(dictionary([f"{i}-{j}" for j in range(30_000)], pa.uint16())) for i in range(5)
    ]
    assert [len(run) for run in split_and_unify(batches)] == [2, 2, 1]


def test_one_batch_may_use_its_key_type_to_the_last_value() -> None:
    full = one_column(dictionary([str(i) for i in range(256)]))
    runs = split_and_unify([full, one_column(dictionary(["x"])), one_column(dictionary(["y"]))])
    assert [len(run) for run in runs] == [1, 2]


@given(st.lists(st.integers(1, 250), min_size=1, max_size=12))
def test_runs_are_as_long_as_the_keys_allow(sizes: list[int]) -> None:
    batches = [
        one_column(dictionary([f"{i}-{j}" for j in range(size)])) for i, size in enumerate(sizes)
    ]
    expected: list[list[int]] = [[]]
    for size in sizes:
        if expected[-1] and sum(expected[-1]) + size > 255:
            expected.append([])
        expected[-1].append(size)
    assert [len(run) for run in split_and_unify(batches)] == [len(run) for run in expected]


def _nested(values: list[str]) -> dict[str, pa.Array[Any]]:
    words = dictionary(values)
    offsets = pa.array(range(len(values) + 1), pa.int32())
    struct = pa.StructArray.from_arrays([words], ["d"])
    return {
        "struct": struct,
        "struct in struct": pa.StructArray.from_arrays([struct], ["s"]),
        "list": pa.ListArray.from_arrays(offsets, words),
        "list of structs": pa.ListArray.from_arrays(offsets, struct),
        "map": map_array(list(range(len(values) + 1)), pa.array(values), words),
        "fixed list": pa.FixedSizeListArray.from_arrays(words, 1),
        "union": pa.UnionArray.from_sparse(pa.array([0] * len(values), pa.int8()), [words]),
        "run ends": pa.RunEndEncodedArray.from_arrays(
            pa.array(range(1, len(values) + 1), pa.int32()), words
        ),
    }


@pytest.mark.parametrize("kind", list(_nested(["x"])))
def test_dictionaries_at_any_depth_are_unified(kind: str) -> None:
    batches = [one_column(_nested(values)[kind]) for values in (["a", "b"], ["b", "c"], ["d"])]
    (run,) = split_and_unify(batches)
    for unified, batch in zip(run, batches, strict=True):
        assert same_values(unified, batch)
    assert can_share_file(run)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dictionary(["a", None]), dictionary(["b", None])),
        (dictionary([{"x": 1}]), dictionary([{"x": 2}])),
        (dictionary([[1]]), dictionary([[2]])),
    ],
    ids=["null values", "structs", "lists"],
)
def test_what_cannot_be_unified_gets_a_stream_of_its_own(
    first: pa.Array[Any], second: pa.Array[Any]
) -> None:
    batches = [one_column(first), one_column(second)]
    runs = split_and_unify(batches)
    assert [len(run) for run in runs] == [1, 1]
    assert flattened(runs) == batches


def test_ordered_dictionaries_keep_their_order() -> None:
    low_high = one_column(dictionary(["low", "high"], ordered=True))
    high_low = one_column(dictionary(["high", "low"], ordered=True))
    runs = split_and_unify([low_high, low_high, high_low])
    assert [len(run) for run in runs] == [2, 1]
    assert [dictionary_of(batch) for batch in flattened(runs)] == [
        ["low", "high"],
        ["low", "high"],
        ["high", "low"],
    ]


def test_not_a_number_in_a_dictionary() -> None:
    nan = float("nan")
    batches = [one_column(dictionary([1.0, nan])), one_column(dictionary([nan, 2.0]))]
    for unified, batch in zip(flattened(split_and_unify(batches)), batches, strict=True):
        assert same_values(unified, batch)
