"""``format("quiver")``: the stores below a directory, as rows in Spark.

::

    spark.read.format("quiver").option("path", root).option("signal", "traces").load()
    spark.readStream.format("quiver").option("path", root).option("signal", "logs").load()

A batch query sees what the stores held when it was planned: finalised segments and, unless
``tail`` is false, what is still in the log. A streaming query gets finalised segments only, each of
them once; its offset is the next segment of each store. All options: ``source_options``.

Nothing here acknowledges anything. A store deletes a segment when all its subscribers are done with
it, and does not know of this reader: whoever must not miss any registers a subscriber and writes
its progress, as the lake does.

Spark does not ask a Python source for fewer columns. Name them with the option ``columns`` or with
``.schema(...)``: fewer columns cost far less. Rows are left out before they reach Spark by the
options ``since``, ``until`` and ``service``; event times also skip segments whose statistics rule
them out (spans and data points in Arrow form; requests as they came in have no statistics).

Spark 4.3 plans a Python source once for each DataFrame: a DataFrame shows what was there when it
was first used. Load it again to see more.

On a cluster, the executors need this package, and the directory. A streaming query needs the
package installed where the driver runs, too: its offsets are planned by a process there that does
not see what ``--py-files`` or ``addPyFile`` ship.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quiver.disk import Disk, RealDisk
from quiver.errors import FormatError, InvalidConfig, StoreError
from quiver.lake.batches import Scan, new_scan, read_pieces, read_tail
from quiver.lake.scanning import (
    SEGMENTS,
    Offset,
    Piece,
    StoreDirectory,
    Tail,
    between,
    capped_offset,
    check_root,
    describe_gaps,
    find_stores,
    latest_offset,
    limited_offset,
    list_segments,
    may_hold,
    pack,
    read_offset,
)
from quiver.lake.source_options import COMMON, Given, read_wanted
from quiver.segment.layout import segment_file_name
from quiver.segment.reader import SegmentReader
from quiver.store.reader import StoreReader

FORMAT: Final = "quiver"
_OPTIONS: Final = (*COMMON, "path", "tail", "maxSegmentsPerTrigger")


class Pieces(InputPartition):
    """Segments for one task."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(None)
        self.pieces = pieces


class LogTail(InputPartition):
    """The log of a store for one task."""

    def __init__(self, tail: Tail) -> None:
        super().__init__(None)
        self.tail = tail


class QuiverSource(DataSource):
    """The format, with its options checked."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(cast("Any", options))
        given = Given(options, _OPTIONS)
        self._root = check_root(given.text("path"))
        self._with_tail = given.flag("tail", default=True)
        self._wanted = read_wanted(given, "maxSegmentsPerTrigger")

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return from_arrow_schema(self._wanted.schema)

    def reader(self, schema: StructType) -> StoreBatchReader:
        scan = new_scan(self._wanted, schema, fail_on_loss=True)
        kind = FilteringStoreReader if self._wanted.pushdown else StoreBatchReader
        return kind(self._root, scan, with_tail=self._with_tail)

    def streamReader(self, schema: StructType) -> StoreStreamReader:  # noqa: N802 - Spark's name
        return StoreStreamReader(self._root, new_scan(self._wanted, schema, fail_on_loss=False))


class StoreBatchReader(DataSourceReader):
    """One look at the stores."""

    def __init__(self, root: Path, scan: Scan, *, with_tail: bool) -> None:
        self._root = root
        self._with_tail = with_tail
        self._scan = scan

    def partitions(self) -> list[InputPartition]:
        disk = RealDisk()
        stores = find_stores(disk, self._root)
        if not stores:
            raise InvalidConfig(f"{self._root} is no store, and has no core_* directory with one")
        pieces: list[Piece] = []
        planned: list[InputPartition] = []
        for store in stores:
            own, tail = self._plan(disk, store)
            pieces += own
            if tail is not None:
                planned.append(LogTail(tail))
        target = self._scan.wanted.partition_bytes
        planned += [Pieces(group) for group in pack(pieces, target, lambda piece: piece.size)]
        return planned or [Pieces([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, LogTail):
            return self._scan.bundles(read_tail(self._scan, partition.tail))
        return self._scan.bundles(read_pieces(self._scan, cast("Pieces", partition).pieces))

    def _plan(self, disk: Disk, store: StoreDirectory) -> tuple[list[Piece], Tail | None]:
        tail = None
        if self._with_tail:
            snapshot = StoreReader(store.path, disk).snapshot()
            if snapshot.problems:
                self._scan.refuse(str(store.path), StoreError("; ".join(snapshot.problems)))
            readers = snapshot.segments
            if snapshot.tail:
                numbers = [entry.sequence for entry in snapshot.tail]
                tail = Tail(
                    store.store_id,
                    str(store.path),
                    max(readers, default=-1),
                    min(numbers),
                    max(numbers),
                    len(numbers),
                )
        else:
            readers = self._open(disk, store)
        directory = store.path / SEGMENTS
        named = {piece.segment: piece for piece in list_segments(disk, store)}
        pieces = [
            named.get(number)
            or Piece(
                store.store_id, number, str(directory / segment_file_name(number)), reader.size
            )
            for number, reader in readers.items()
            if may_hold(reader.streams, self._scan.wanted.signal, self._scan.times)
        ]
        return pieces, tail

    def _open(self, disk: Disk, store: StoreDirectory) -> dict[int, SegmentReader]:
        readers = {}
        for piece in list_segments(disk, store):
            try:
                readers[piece.segment] = SegmentReader.open(disk, Path(piece.path))
            except FileNotFoundError:
                continue  # every subscriber was done with it
            except FormatError as error:
                self._scan.refuse(piece.path, error)
        return readers


class FilteringStoreReader(StoreBatchReader):
    """The same, with the filters of the query that is planned first."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        self._scan, left = self._scan.push(filters)
        return left


class StoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Finalised segments, one after the other."""

    def __init__(self, root: Path, scan: Scan) -> None:
        self._root = root
        self._scan = scan
        self._target: dict[str, int] | None = None
        self._safe: dict[str, int] = {}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return dict(self._scan.wanted.starting or {})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        wanted = self._scan.wanted
        if wanted.max_bytes is not None:
            return ReadMaxBytes(wanted.max_bytes)
        if wanted.max_pieces is not None:
            return ReadMaxFiles(wanted.max_pieces)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = latest_offset(self._segments(), {})

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802 - Spark's name
        return latest_offset(self._segments(), {})

    def latestOffset(self, start: Offset, limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        start = read_offset(start, "the checkpoint")
        pieces = self._segments()
        end = latest_offset(pieces, start)
        if self._target is not None:
            end = capped_offset(end, start, self._target)
        return limited_offset(
            pieces,
            start,
            end,
            max_bytes=limit.max_bytes if isinstance(limit, ReadMaxBytes) else None,
            max_segments=limit.max_files if isinstance(limit, ReadMaxFiles) else None,
        )

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        first = read_offset(start, "the checkpoint")
        last = read_offset(end, "the checkpoint")
        found, gaps = between(self._segments(), first, last)
        if gaps:
            self._scan.lost(f"{self._root}: {describe_gaps(gaps)}")
        target = self._scan.wanted.partition_bytes
        return [Pieces(group) for group in pack(found, target, lambda piece: piece.size)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._scan.bundles(read_pieces(self._scan, cast("Pieces", partition).pieces))

    def _segments(self) -> list[Piece]:
        """All finalised segments, and none that a power cut can take back.

        A segment whose name is not safe yet could come again with other bundles in it.
        """
        disk = RealDisk()
        pieces: list[Piece] = []
        for store in find_stores(disk, self._root):
            own = list_segments(disk, store)
            name = str(store.path)
            if own and own[-1].segment > self._safe.get(name, -1):
                disk.sync_dir(store.path / SEGMENTS)
                self._safe[name] = own[-1].segment
            pieces += own
        return pieces
