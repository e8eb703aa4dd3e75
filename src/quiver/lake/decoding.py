"""From what a store keeps to rows of the lake: in groups, in order, with their coordinates.

::

    requests = requests_of_segment(reader, Signal.TRACES, store="01J...", segment=17)
    for rows in decode_rows(Signal.TRACES, requests):
        rows.table       # in the schema of the table's files, at most one group of it
        rows.letters     # requests that are no telemetry, and why

A group is some requests of together at most ``group_bytes``: what is in memory is bounded by it,
whatever the backlog. Only a request that is larger makes a larger group, of its own. A request that
cannot be decoded becomes a dead letter and does not touch the others. Letters have deterministic
names, so that a second attempt at the same work writes the same files:

==============================================  ================================================
``dead_letter/<signal>/<coordinates>.bin``      the request; or what there is of it
``dead_letter/<signal>/<coordinates>.json``     why, where in it, when it came; written last
==============================================  ================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.bundle import RecordBundle, Signal, Slot, signal_of
from quiver.config import OtlpConfig
from quiver.errors import FormatError, InvalidBundle, InvalidRequest
from quiver.lake.layout import DEAD_LETTERS, Window, check_name, file_schema, with_ingestion
from quiver.lake.places import Place
from quiver.otlp import Decoded, Source, decode, from_otap
from quiver.pipeline.item import from_bundle
from quiver.segment.reader import SegmentReader

GROUP_BYTES: Final = 8 * 1024 * 1024
GROUP_REQUESTS: Final = 10_000
MAX_REASON: Final = 2_000
_DEFAULTS: Final = OtlpConfig()
_WINDOW: Final = Window()
_REFUSED: Final = (InvalidRequest, pa.ArrowInvalid, pa.ArrowCapacityError)


class StoredRequest(NamedTuple):
    """A request, where it is kept, and when it came."""

    data: bytes
    source: Source
    ingested_ns: int


class DeadLetter(NamedTuple):
    """A request that cannot be decoded."""

    signal: Signal
    source: Source
    ingested_ns: int
    reason: str
    where: str
    data: bytes

    @property
    def name(self) -> str:
        """Its coordinates: the same for every attempt."""
        store, segment, bundle, row = self.source
        return check_name(f"{store}-{segment}-{bundle}-{row}")


class Rows(NamedTuple):
    """What a group of requests became."""

    table: pa.Table
    letters: list[DeadLetter]
    requests: int
    request_bytes: int


# --- What a store keeps -------------------------------------------------------------------------


def requests_of_segment(
    reader: SegmentReader,
    signal: Signal,
    *,
    store: str,
    segment: int,
    bundles: Iterable[int] | None = None,
) -> Iterator[StoredRequest | DeadLetter]:
    """The requests of a signal in a segment, in order; of all its bundles, or of some.

    A bundle that cannot be read is a letter; streams of other signals are not touched.
    """
    manifest = reader.manifest
    for index in range(reader.bundle_count) if bundles is None else bundles:
        if signal_of(slot for slot, _, _ in manifest.slot_refs(index)) is not signal:
            continue
        source = Source(store, segment, index, 0)
        ingested = max(0, manifest.ingestion_time_ns(index) or 0)
        try:
            bundle = reader.bundle(index)
        except FormatError as error:
            yield _letter(signal, StoredRequest(b"", source, ingested), error)
            continue
        yield from requests_of_bundle(bundle, signal, source)


def requests_of_bundle(
    bundle: RecordBundle, signal: Signal, source: Source
) -> Iterator[StoredRequest | DeadLetter]:
    """The requests of a bundle; OTAP tables as the one request that they make."""
    when = bundle.ingestion_time_ns
    try:
        item = from_bundle(bundle)
        if item.signal is not signal:
            return
        requests = item.requests or (from_otap(signal, item.tables),)
    except (InvalidBundle, InvalidRequest) as error:
        yield _letter(signal, StoredRequest(_as_ipc(bundle), source, when), error)
        return
    for row, data in enumerate(requests):
        yield StoredRequest(data, source._replace(row=row), when)


# --- Rows -----------------------------------------------------------------------------------------


def decode_rows(
    signal: Signal,
    requests: Iterable[StoredRequest | DeadLetter],
    config: OtlpConfig = _DEFAULTS,
    *,
    window: Window = _WINDOW,
    group_bytes: int = GROUP_BYTES,
) -> Iterator[Rows]:
    """Rows of the table's files, group by group; requests are taken as they are needed."""
    group: list[StoredRequest] = []
    letters: list[DeadLetter] = []
    size = 0
    for request in requests:
        if isinstance(request, DeadLetter):
            letters.append(request)
            continue
        if group and (size + len(request.data) > group_bytes or len(group) >= GROUP_REQUESTS):
            yield _decode_group(signal, group, letters, config, window)
            group, letters, size = [], [], 0
        group.append(request)
        size += len(request.data)
    if group or letters:
        yield _decode_group(signal, group, letters, config, window)


def _decode_group(
    signal: Signal,
    group: Sequence[StoredRequest],
    letters: list[DeadLetter],
    config: OtlpConfig,
    window: Window,
) -> Rows:
    """``letters`` came with the group; those that it makes itself are added."""
    tables: list[pa.Table] = []
    waiting = [group] if group else []
    while waiting:
        part = waiting.pop()
        try:
            decoded = decode(signal, [r.data for r in part], config, [r.source for r in part])
        except _REFUSED as error:
            # Too much together, or one that spoils the others: smaller parts tell.
            if len(part) == 1:
                letters.append(_letter(signal, part[0], error))
            else:
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
            continue
        letters += [_letter(signal, part[error.request], error) for error in decoded.failures]
        tables.append(with_ingestion(signal, decoded.table, _ingested(decoded, part), window))
    table = pa.concat_tables(tables or [file_schema(signal, config.promoted).empty_table()])
    return Rows(table, letters, len(group), sum(len(request.data) for request in group))


def _ingested(decoded: Decoded, part: Sequence[StoredRequest]) -> NDArray[np.int64]:
    """For each row when its request came, in microseconds."""
    times = np.array([request.ingested_ns // 1000 for request in part], np.int64)
    return times[cast("NDArray[np.int32]", decoded.requests.to_numpy())]


# --- Letters ----------------------------------------------------------------------------------


def write_letters(root: Place, letters: Iterable[DeadLetter]) -> int:
    """Keep letters in the lake's folder for them, durably: how many."""
    count = 0
    for letter in letters:
        path = f"{DEAD_LETTERS}/{letter.signal.value}/{letter.name}"
        root.put(f"{path}.bin", [letter.data], contended=True)
        root.put(f"{path}.json", [_note(letter)], contended=True)
        count += 1
    return count


def _note(letter: DeadLetter) -> bytes:
    facts: Mapping[str, object] = {
        "signal": letter.signal.value,
        **letter.source._asdict(),
        "ingested_ns": letter.ingested_ns,
        "reason": letter.reason,
        "where": letter.where,
        "bytes": len(letter.data),
    }
    return json.dumps(facts, indent=1).encode() + b"\n"


def _letter(signal: Signal, request: StoredRequest, error: Exception) -> DeadLetter:
    reason, where = str(error), ""
    if isinstance(error, InvalidRequest):
        reason, where = error.reason, error.where
    return DeadLetter(
        signal, request.source, request.ingested_ns, reason[:MAX_REASON], where, request.data
    )


def _as_ipc(bundle: RecordBundle) -> bytes:
    """The batches of a bundle that holds no request: one IPC stream after the other, by slot."""
    streams = []
    for slot, payload in sorted(bundle.payloads.items()):
        if slot != Slot.REQUEST_CONTEXT:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, payload.batch.schema) as writer:
                writer.write_batch(payload.batch)
            streams.append(sink.getvalue().to_pybytes())
    return b"".join(streams)
