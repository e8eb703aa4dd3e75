"""What the checks find, and where: from a row deep inside a batch back to its request.

The checks look at flattened columns: all spans of all requests in one array. A ``Place`` says whose
a row is. Nothing is computed before somebody asks, and nobody asks unless a check fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quiver.errors import InvalidRequest

Array: TypeAlias = "pa.Array[Any]"
Indexes: TypeAlias = npt.NDArray[np.int64]


class Place(Protocol):
    """Rows of one flattened column."""

    def requests(self, rows: Indexes) -> Indexes:
        """The request of each row."""

    def path(self, row: int) -> str:
        """How to get to the row from its request."""


class Requests:
    """The rows are the requests themselves."""

    def requests(self, rows: Indexes) -> Indexes:
        return rows

    def path(self, row: int) -> str:  # noqa: ARG002 - every request is its own root
        return ""


@dataclass(slots=True)  # not frozen: that makes it four times as slow to make
class Items:
    """The rows are the items of lists: one list, maybe empty, for each row of ``above``."""

    above: Place
    name: str
    lists: pa.ListArray[Any]

    def _owners(self, rows: Indexes) -> Indexes:
        return np.searchsorted(starts(self.lists), rows, side="right").astype(np.int64) - 1

    def requests(self, rows: Indexes) -> Indexes:
        return self.above.requests(self._owners(rows))

    def path(self, row: int) -> str:
        owner = int(self._owners(np.array([row]))[0])
        index = row - int(starts(self.lists)[owner])
        return f"{joined(self.above.path(owner), self.name)}[{index}]"


@dataclass(slots=True)
class Column:
    """A column of rows, of which only those that are set count."""

    place: Place
    name: str
    values: Array


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows are the values that are set, of several columns one after the other."""

    columns: Sequence[Column]
    dropped: Indexes
    """Of those, the ones that were left out; in ascending order."""

    def _origins(self, rows: Indexes) -> tuple[Indexes, Indexes]:
        """For each row the column and the row there."""
        found = [np.flatnonzero(np.asarray(c.values.is_valid())) for c in self.columns]
        columns = np.repeat(np.arange(len(found)), [len(f) for f in found])
        there = np.concatenate(found).astype(np.int64)
        return (
            np.delete(columns, self.dropped)[rows].astype(np.int64),
            np.delete(there, self.dropped)[rows],
        )

    def requests(self, rows: Indexes) -> Indexes:
        columns, there = self._origins(rows)
        result = np.empty(len(rows), np.int64)
        for index, column in enumerate(self.columns):
            mine = columns == index
            result[mine] = column.place.requests(there[mine])
        return result

    def path(self, row: int) -> str:
        columns, there = self._origins(np.array([row]))
        column = self.columns[int(columns[0])]
        return joined(column.place.path(int(there[0])), column.name)


def joined(path: str, name: str) -> str:
    """A path and what follows."""
    return f"{path}.{name}" if path and name else path or name


def starts(lists: pa.ListArray[Any]) -> npt.NDArray[np.int32]:
    """Where the items of each list begin; and the end of the last."""
    return np.asarray(lists.offsets)


def byte_lengths(values: Array) -> npt.NDArray[np.int32]:
    """How many bytes each value has."""
    buffer = cast("memoryview", values.buffers()[1])
    offsets = np.frombuffer(buffer, np.int32, len(values) + 1, 4 * values.offset)
    return offsets[1:] - offsets[:-1]


@dataclass(frozen=True, slots=True)
class Findings:
    """What the checks found, by the row of the request in the batch."""

    failures: dict[int, InvalidRequest] = field(default_factory=dict)
    """The first for each request."""
    ambiguous: set[int] = field(default_factory=set)
    """Requests in which more than one member of a ``oneof`` is set."""

    def blame(self, place: Place, rows: Indexes, name: str, reason: str) -> None:
        """These rows break a rule: the first of each request is its failure."""
        requests, firsts = np.unique(place.requests(rows), return_index=True)
        for request, first in zip(requests.tolist(), firsts.tolist(), strict=True):
            if request not in self.failures:
                where = joined(place.path(int(rows[first])), name)
                self.failures[request] = InvalidRequest(reason, where=where, request=request)

    def doubt(self, place: Place, rows: Indexes) -> None:
        """In these rows more than one member of a ``oneof`` is set."""
        self.ambiguous.update(place.requests(rows).tolist())
