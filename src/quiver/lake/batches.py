"""Bundles and requests as the Arrow batches that Spark takes from a source.

Requests are gathered to some megabytes, decoded together, and handed on in batches of at most
16,384 rows. Types are exactly those of the schema that Spark asked for: it compares the first batch
with it. No more than one group is in memory.

What cannot be read stops the task with a message that names it, or is left out with a warning: a
request, a bundle, or the rest of a segment that is damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import Filter
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from quiver.bundle import RecordBundle, Signal, Slot, signal_of
from quiver.config import MIB, OtlpConfig
from quiver.disk import RealDisk
from quiver.errors import (
    FormatError,
    InvalidBundle,
    InvalidConfig,
    InvalidRequest,
    LakeError,
    QuiverError,
    SegmentNotFound,
)
from quiver.ipc import Validation, encode_stream
from quiver.lake.layout import EVENT_TIMES, INGESTED
from quiver.lake.pushdown import Condition, apply, event_times, understand
from quiver.lake.scanning import EventTimes, Piece, Tail, may_hold
from quiver.lake.source_options import BUNDLES, Wanted
from quiver.otlp import Source, decode, from_otap
from quiver.otlp.convert import Decoded
from quiver.otlp.schema import TIME
from quiver.pipeline.item import OTLP_SLOTS, from_bundle
from quiver.segment.reader import SegmentReader
from quiver.store.reader import StoreReader

MAX_ROWS: Final = 16_384
GROUP_BYTES: Final = 4 * MIB
_BYTE_SLOTS: Final = frozenset({*OTLP_SLOTS.values(), Slot.REQUEST_CONTEXT})
_LOG: Final = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a bundle lies; ``segment`` and ``bundle`` are None for one in the log.

    A batch of a queue is the segment of its sequence, with one bundle.
    """

    store: str | None
    segment: int | None
    bundle: int | None
    name: str


class Held(NamedTuple):
    """A bundle with its place."""

    place: Place
    bundle: RecordBundle


class Request(NamedTuple):
    """A request with the place of its bundle, its row there, and when it came."""

    place: Place
    signal: Signal
    row: int
    data: bytes
    ingested_ns: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.place.name}, request {self.row}"


@dataclass(frozen=True, slots=True)
class Scan:
    """What a task makes of what it reads. It travels to the workers: plain data only."""

    wanted: Wanted
    schema: pa.Schema
    fail_on_loss: bool
    pushed: tuple[Condition, ...] = ()

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What a row must meet: those of the options, and those that Spark handed over."""
        return self.wanted.conditions + self.pushed

    @property
    def times(self) -> EventTimes | None:
        """The event times that they leave; None: all."""
        signal = self.wanted.signal
        if signal is None or self.wanted.bundles:
            return None
        return event_times(self.conditions, EVENT_TIMES[signal])

    def bundles(self, held: Iterable[Held]) -> Iterator[pa.RecordBatch]:
        """The batches of some bundles, decoded or as they are."""
        if self.wanted.bundles or self.wanted.signal is None:
            return self._stored(held)
        return self.requests(
            request for one in held for request in self._requests(self.wanted.signal, one)
        )

    def requests(self, requests: Iterable[Request]) -> Iterator[pa.RecordBatch]:
        """The batches of some requests, decoded or as they are."""
        signal = self.wanted.signal
        if self.wanted.bundles or signal is None:
            yield from self._batches(map(_row_of_request, requests))
            return
        config = OtlpConfig(promoted=self.wanted.promoted)
        for group in _groups(requests):
            for rows in self._decoded(signal, group, config):
                yield from self._finished(rows)

    def push(self, filters: Iterable[Filter]) -> tuple[Scan, list[Filter]]:
        """The scan that applies some filters of Spark, and those that are left to Spark."""
        taken, left = [], []
        for asked in filters:
            condition = understand(asked, self.wanted.all_columns)
            if condition is None:
                left.append(asked)
            else:
                taken.append(condition)
        return replace(self, pushed=tuple(taken)), left

    def refuse(self, name: str, error: QuiverError) -> None:
        """Something cannot be read: stop, or say so and go on."""
        if not self.wanted.skip_malformed:
            raise LakeError(
                f"{name} cannot be read: {error}; the option malformed=skip leaves it out"
            ) from error
        _LOG.warning("%s is left out: %s", name, error)

    def lost(self, what: str) -> None:
        """Something was deleted before it was read: stop, or say so and go on."""
        message = (
            f"{what}: deleted before it was read; register a subscriber to keep what is not read"
        )
        if self.fail_on_loss:
            raise SegmentNotFound(
                f"{message}. Load the DataFrame again to see what is there now; "
                "failOnDataLoss=false goes on without it"
            )
        _LOG.warning("%s", message)

    # --- Decoded rows -------------------------------------------------------------------------

    def _requests(self, signal: Signal, held: Held) -> Iterator[Request]:
        place, bundle = held
        try:
            payload = bundle.payloads.get(OTLP_SLOTS[signal])
            if payload is None:
                requests: Sequence[bytes] = [from_otap(signal, from_bundle(bundle).tables)]
            else:
                requests = _values(payload.batch)
        except (InvalidBundle, InvalidRequest) as error:
            self.refuse(place.name, error)
            return
        for row, data in enumerate(requests):
            yield Request(place, signal, row, data, bundle.ingestion_time_ns)

    def _decoded(
        self, signal: Signal, group: Sequence[Request], config: OtlpConfig
    ) -> Iterator[pa.RecordBatch]:
        sources = None
        if group[0].place.segment is not None:
            sources = [
                Source(place.store, place.segment, place.bundle, row)  # type: ignore[arg-type]
                for place, _, row, _, _ in group
            ]
        try:
            decoded = decode(signal, [request.data for request in group], config, sources)
        except InvalidRequest as error:
            if len(group) == 1:
                self.refuse(group[0].name, error)
                return
            # One of them makes the table of all too large: each gets its own.
            for request in group:
                yield from self._decoded(signal, [request], config)
            return
        for failure in decoded.failures:
            self.refuse(group[failure.request].name, failure)
        yield _with_times(decoded, group)

    # --- Bundles as they are ------------------------------------------------------------------

    def _stored(self, held: Iterable[Held]) -> Iterator[pa.RecordBatch]:
        def rows() -> Iterator[dict[str, Any]]:
            for place, bundle in held:
                try:
                    yield from _rows_of_bundle(place, bundle)
                except InvalidBundle as error:
                    self.refuse(place.name, error)

        return self._batches(rows())

    def _batches(self, rows: Iterable[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
        group: list[dict[str, Any]] = []
        size = 0
        for row in rows:
            group.append(row)
            size += len(row["data"])
            if size >= GROUP_BYTES or len(group) >= MAX_ROWS:
                yield from self._finished(pa.RecordBatch.from_pylist(group, BUNDLES))
                group, size = [], 0
        if group:
            yield from self._finished(pa.RecordBatch.from_pylist(group, BUNDLES))

    def _finished(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = conform(apply(rows, self.conditions), self.schema)
        for start in range(0, rows.num_rows, MAX_ROWS):
            yield rows.slice(start, MAX_ROWS)


# --- Reading ------------------------------------------------------------------------------------


def read_pieces(scan: Scan, pieces: Iterable[Piece]) -> Iterator[Held]:
    """The bundles of segments; those of other signals are not touched."""
    for piece in pieces:
        name = f"segment {piece.segment} of store {piece.store_id} ({piece.path})"
        try:
            yield from _read_segment(scan, piece, name)
        except FileNotFoundError as error:
            directory = Path(piece.path).parent
            if not RealDisk().exists(directory):
                raise LakeError(
                    f"{name}: this machine has no {directory}; every executor needs the directory"
                ) from error
            scan.lost(name)
        except FormatError as error:
            scan.refuse(name, error)


def _read_segment(scan: Scan, piece: Piece, name: str) -> Iterator[Held]:
    signal = scan.wanted.signal
    reader = SegmentReader.open(RealDisk(), Path(piece.path))
    if not may_hold(reader.streams, signal, scan.times):
        return
    for index in range(reader.bundle_count):
        slots = [slot for slot, _, _ in reader.manifest.slot_refs(index)]
        if signal is None or signal_of(slots) is signal:
            place = Place(piece.store_id, piece.segment, index, f"{name}, bundle {index}")
            yield Held(place, reader.bundle(index))


def read_tail(scan: Scan, tail: Tail) -> Iterator[Held]:
    """Bundles that were in the log when the scan was planned, wherever they are now."""
    found = 0
    for place, bundle in _bundles_of_tail(tail):
        found += 1
        if scan.wanted.signal is None or signal_of(bundle.payloads) is scan.wanted.signal:
            yield Held(place, bundle)
    if found < tail.bundles:
        scan.lost(
            f"{tail.bundles - found} bundles of the log of store {tail.store_id} ({tail.root})"
        )


def _bundles_of_tail(tail: Tail) -> Iterator[Held]:
    snapshot = StoreReader(tail.root).snapshot()
    store = f"store {tail.store_id} ({tail.root})"
    for number, reader in snapshot.segments.items():
        if number <= tail.after_segment:
            continue
        for entry in reader.manifest:
            if entry.sequence is not None and tail.first <= entry.sequence <= tail.last:
                index = entry.bundle_index
                name = f"segment {number} of {store}, bundle {index}"
                yield Held(Place(tail.store_id, number, index, name), reader.bundle(index))
    for logged in snapshot.tail:
        if tail.first <= logged.sequence <= tail.last:
            name = f"entry {logged.sequence} in the log of {store}"
            yield Held(Place(tail.store_id, None, None, name), logged.bundle(Validation.LAYOUT))


# --- What is asked for ----------------------------------------------------------------------------


def asked_schema(asked: StructType, offered: pa.Schema) -> pa.Schema:
    """What Spark asks for, in Arrow: the columns offered, or those of them that a user named."""
    schema = to_arrow_schema(asked, timezone="UTC")
    for field in schema:
        index = offered.get_field_index(field.name)
        if index < 0:
            raise InvalidConfig(
                f"there is no column {field.name}; there are {', '.join(offered.names)}"
            )
        if not offered.field(index).type.equals(field.type):
            raise InvalidConfig(
                f"column {field.name} is {offered.field(index).type}, not {field.type}"
            )
    return schema


def new_scan(wanted: Wanted, asked: StructType, *, fail_on_loss: bool) -> Scan:
    """The scan for a schema of Spark; ``fail_on_loss`` unless an option says otherwise."""
    given = wanted.fail_on_loss
    schema = asked_schema(asked, wanted.all_columns)
    return Scan(wanted, schema, fail_on_loss if given is None else given)


def conform(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The rows in exactly this schema: its columns, their order, nullability and all."""
    columns = [rows.column(name) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- Rows ---------------------------------------------------------------------------------------


def _groups(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Requests to be decoded together: all in segments, or none."""
    group: list[Request] = []
    size = 0
    for request in requests:
        full = size and size + len(request.data) > GROUP_BYTES
        moved = group and (group[0].place.segment is None) != (request.place.segment is None)
        if full or moved:
            yield group
            group, size = [], 0
        group.append(request)
        size += len(request.data)
    if group:
        yield group


def _with_times(decoded: Decoded, group: Sequence[Request]) -> pa.RecordBatch:
    """The rows with the time when their request came; null when nobody knows it."""
    times = [request.ingested_ns // 1000 or None for request in group]
    column = pa.array(times, pa.int64()).cast(TIME).take(decoded.requests)
    return decoded.table.append_column(pa.field(INGESTED, TIME), column)


def _values(batch: pa.RecordBatch) -> list[bytes]:
    """The values of a slot that holds bytes."""
    column: Any = batch.column(0) if batch.num_columns else None
    if column is None or not (
        pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    ):
        raise InvalidBundle(f"requests are a column of bytes, not {batch.schema.types}")
    return [value or b"" for value in column.to_pylist()]


def _row_of_request(request: Request) -> dict[str, Any]:
    place, signal, row, data, ingested_ns = request
    return {
        "store": place.store,
        "segment": place.segment,
        "bundle": place.bundle,
        "slot": OTLP_SLOTS[signal],
        "row": row,
        "signal": signal.value,
        "ingested_time": ingested_ns // 1000 or None,
        "data": data,
    }


def _rows_of_bundle(place: Place, bundle: RecordBundle) -> Iterator[dict[str, Any]]:
    signal = signal_of(bundle.payloads)
    common = {
        "store": place.store,
        "segment": place.segment,
        "bundle": place.bundle,
        "signal": None if signal is None else signal.value,
        "ingested_time": bundle.ingestion_time_ns // 1000 or None,
    }
    for slot, payload in bundle.payloads.items():
        if slot in _BYTE_SLOTS:
            for row, data in enumerate(_values(payload.batch)):
                yield {**common, "slot": slot, "row": row, "data": data}
        else:
            data = b"".join(encode_stream(payload.batch))
            yield {**common, "slot": slot, "row": None, "data": data}
