"""What travels between the nodes of a pipeline, and how it looks in a store.

An item is telemetry of one signal, in one of two forms: OTLP requests as they came in, which nobody
has looked into, or the OTAP tables of one batch. Beside it goes the context of the request: where
it came from and the headers that the operator chose to keep.

In a store an item is a bundle. OTLP requests are the rows of one batch in slot 60, 61 or 62, column
``data``, as the reference implementation writes them; it puts one request into a bundle. The
context, when there is one, is a batch of its own in slot 63, one row, column ``context``: a JSON
object of strings.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, cast

import pyarrow as pa
from blake3 import blake3

from quiver.bundle import Payload, RecordBundle, Signal, Slot, signal_of
from quiver.errors import InvalidBundle

MAX_CONTEXT_BYTES: Final = 16 * 1024
_MAX_OFFSET: Final = 2**31 - 1
OTLP_SLOTS: Final[Mapping[Signal, Slot]] = MappingProxyType(
    {
        Signal.LOGS: Slot.OTLP_LOGS,
        Signal.TRACES: Slot.OTLP_TRACES,
        Signal.METRICS: Slot.OTLP_METRICS,
    }
)
_OTLP_SCHEMA: Final = pa.schema([pa.field("data", pa.binary(), nullable=False)])
_OTLP_FINGERPRINT: Final = blake3(b"otlp_binary_v1").digest()
_CONTEXT_SCHEMA: Final = pa.schema([pa.field("context", pa.binary(), nullable=False)])
_CONTEXT_FINGERPRINT: Final = blake3(b"quiver_context_v1").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Telemetry of one signal: ``requests`` or ``tables``, never both."""

    signal: Signal
    requests: tuple[bytes, ...] = ()
    tables: Mapping[Slot, pa.RecordBatch] = field(default_factory=dict)
    count: int | None = None
    """Spans, log records or data points; None when nobody counted them."""
    received_ns: int = 0
    context: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes, about."""
        tables = sum(table.nbytes for table in self.tables.values())
        return sum(map(len, self.requests)) + tables


def to_bundle(item: Item) -> RecordBundle:
    """The item as a store keeps it."""
    payloads: dict[int, Payload] = {}
    if item.requests:
        batch = pa.RecordBatch.from_arrays([_binary(item.requests)], schema=_OTLP_SCHEMA)
        payloads[OTLP_SLOTS[item.signal]] = Payload(batch, _OTLP_FINGERPRINT)
    else:
        bundle = RecordBundle.from_batches(
            {int(slot): table for slot, table in item.tables.items()}, ingestion_time_ns=0
        )
        payloads.update(bundle.payloads)
    if item.context:
        data = json.dumps(dict(item.context), separators=(",", ":")).encode()
        if len(data) > MAX_CONTEXT_BYTES:
            raise InvalidBundle(
                f"the context of a request takes {len(data)} bytes; at most {MAX_CONTEXT_BYTES}: "
                "keep fewer headers"
            )
        batch = pa.RecordBatch.from_arrays([_binary([data])], schema=_CONTEXT_SCHEMA)
        payloads[Slot.REQUEST_CONTEXT] = Payload(batch, _CONTEXT_FINGERPRINT)
    return RecordBundle(dict(sorted(payloads.items())), item.received_ns, item.count)


def _binary(requests: Sequence[bytes]) -> pa.BinaryArray:
    """A column of requests; a single one is not copied, which would be half of the work."""
    ends = list(itertools.accumulate(map(len, requests), initial=0))
    if ends[-1] > _MAX_OFFSET:
        raise InvalidBundle(f"the requests of an item take {ends[-1]} bytes: send several items")
    data = pa.py_buffer(requests[0] if len(requests) == 1 else b"".join(requests))
    offsets = pa.py_buffer(struct.pack(f"<{len(ends)}i", *ends))
    column = pa.Array.from_buffers(pa.binary(), len(requests), [None, offsets, data])
    return cast("pa.BinaryArray", column)


def from_bundle(bundle: RecordBundle) -> Item:
    """The item that a bundle holds; ``InvalidBundle`` when it holds none."""
    context = _read_context(bundle)
    slots = [slot for slot in bundle.payloads if slot != Slot.REQUEST_CONTEXT]
    signal = signal_of(slots)
    if signal is None:
        raise InvalidBundle(f"a bundle with slots {slots} holds no telemetry")
    item = Item(
        signal=signal,
        count=bundle.item_count,
        received_ns=bundle.ingestion_time_ns,
        context=context,
    )
    otlp = OTLP_SLOTS[signal]
    if otlp not in bundle.payloads:
        return replace(item, tables={Slot(slot): bundle.payloads[slot].batch for slot in slots})
    column = bundle.payloads[otlp].batch.column(0)
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise InvalidBundle(f"OTLP requests are binary, not {column.type}")
    return replace(item, requests=tuple(value.as_py() or b"" for value in column))


def _read_context(bundle: RecordBundle) -> Mapping[str, str]:
    payload = bundle.payloads.get(Slot.REQUEST_CONTEXT)
    if payload is None:
        return {}
    try:
        facts = json.loads(payload.batch.column(0)[0].as_py())
        return {str(key): str(value) for key, value in facts.items()}
    except (ValueError, AttributeError, TypeError, IndexError) as error:
        raise InvalidBundle(f"the context of a request cannot be read: {error!r}") from error
