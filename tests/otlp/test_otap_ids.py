"""Ids as differences, against loops."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otap_foreign import delta, quasi_delta

from quiver.otlp.otap.ids import from_delta, from_quasi_delta, like_before

BITS = pytest.mark.parametrize("bits", [16, 32])
QUICK = settings(max_examples=200, deadline=None)
KEYS = st.one_of(st.none(), st.integers(0, 2))


def ids(bits: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(0, 5), st.integers(0, 2**bits - 1))


@BITS
@QUICK
@given(data=st.data())
def test_differences_become_the_ids_again(bits: int, data: st.DataObject) -> None:
    plain = data.draw(st.lists(ids(bits)))
    encoded = np.array(delta(plain, bits), dtype=f"u{bits // 8}")
    decoded = from_delta(encoded)
    assert decoded.dtype == encoded.dtype
    assert decoded.tolist() == plain


@BITS
@QUICK
@given(data=st.data())
def test_differences_within_runs_become_the_ids_again(bits: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(ids(bits), KEYS)))
    plain, keys = [row[0] for row in rows], [row[1] for row in rows]
    encoded = np.array(quasi_delta(plain, keys, bits), dtype=f"u{bits // 8}")
    like = like_before([pa.array(keys, type=pa.int8())], nulls_equal=False)
    decoded = from_quasi_delta(encoded, like)
    assert decoded.dtype == encoded.dtype
    assert decoded.tolist() == plain


@QUICK
@given(rows=st.lists(st.tuples(KEYS, st.sampled_from([None, "", "a"]))), nulls_equal=st.booleans())
def test_rows_like_the_one_before(
    rows: list[tuple[int | None, str | None]], nulls_equal: bool
) -> None:
    columns = [
        pa.array([row[0] for row in rows], type=pa.int64()),
        pa.array([row[1] for row in rows], type=pa.string()),
    ]
    expected = [
        place > 0 and row == rows[place - 1] and (nulls_equal or None not in row)
        for place, row in enumerate(rows)
    ]
    assert like_before(columns, nulls_equal=nulls_equal).tolist() == expected


def test_the_example_of_the_specification() -> None:
    encoded = np.array([0, 1, 1, 2, 0, 3], dtype=np.uint16)
    like = like_before([pa.array(["a", "a", "a", "a", "b", "b"])], nulls_equal=True)
    assert from_quasi_delta(encoded, like).tolist() == [0, 1, 2, 4, 0, 3]
