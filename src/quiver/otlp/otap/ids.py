"""The ids of OTAP tables as they travel, and back to plain numbers.

A sender may replace the ids of a column by differences, which compress better:

===========  ==================================================================================
encoding     row i holds
===========  ==================================================================================
plain        the id
delta        the id minus the id of the row before; the first row holds the id
quasi-delta  the same where row i equals the row before in certain columns, else the id
===========  ==================================================================================

Null ids take no part: they stay null, and the difference is to the last id that is not null.
Differences wrap around at the width of the column, so every difference fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from quiver.otlp.otap.schema import Array

Ids: TypeAlias = npt.NDArray[Any]
"""Ids as unsigned numbers of the width of their column."""
Mask: TypeAlias = npt.NDArray[np.bool_]


def from_delta(encoded: Ids) -> Ids:
    """Ids from differences. Without nulls: the caller takes them out first."""
    return np.cumsum(encoded, dtype=encoded.dtype)


def from_quasi_delta(encoded: Ids, like_before: Mask) -> Ids:
    """Ids from differences that start anew in each row that is not like the one before."""
    if len(encoded) == 0:
        return encoded
    sums = np.cumsum(encoded, dtype=encoded.dtype)
    starts = np.where(like_before, 0, np.arange(len(encoded)))
    starts[0] = 0
    np.maximum.accumulate(starts, out=starts)
    return cast("Ids", sums - (sums - encoded)[starts])


def like_before(columns: Sequence[Array], *, nulls_equal: bool) -> Mask:
    """For each row, whether it equals the row before in all columns. The first does not."""
    rows = len(columns[0])
    like = np.ones(rows, dtype=np.bool_)
    like[:1] = False
    if rows > 1:
        for column in columns:
            like[1:] &= _equal(column.slice(1), column.slice(0, rows - 1), nulls_equal=nulls_equal)
    return like


def _equal(left: Array, right: Array, *, nulls_equal: bool) -> Mask:
    equal: Array = pc.equal(left, right)
    if equal.null_count:
        equal = equal.fill_null(False)  # noqa: FBT003 - the value, not a flag
        if nulls_equal:
            equal = pc.or_(equal, pc.and_(pc.is_null(left), pc.is_null(right)))
    return cast("Mask", equal.to_numpy(zero_copy_only=False))
