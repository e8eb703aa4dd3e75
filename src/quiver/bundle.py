"""RecordBundle, the unit that Quiver stores, and what identifies its parts.

A bundle is an ordered set of slots. Each slot holds one Arrow RecordBatch or nothing. Slots are
numbered as OTAP numbers its payload types; three more carry OTLP requests as they came in, and
63 what is known of the request: peer, key, chosen headers.

======  ===================================  ======  =================================
slot    payload                              slot    payload
======  ===================================  ======  =================================
1       RESOURCE_ATTRS (all signals)         22      NUMBER_DP_EXEMPLAR_ATTRS
2       SCOPE_ATTRS (all signals)            23      HISTOGRAM_DP_EXEMPLAR_ATTRS
10      UNIVARIATE_METRICS                   24      EXP_HISTOGRAM_DP_EXEMPLAR_ATTRS
11      NUMBER_DATA_POINTS                   25      MULTIVARIATE_METRICS
12      SUMMARY_DATA_POINTS                  26      METRIC_ATTRS
13      HISTOGRAM_DATA_POINTS                30      LOGS
14      EXP_HISTOGRAM_DATA_POINTS            31      LOG_ATTRS
15      NUMBER_DP_ATTRS                      40      SPANS
16      SUMMARY_DP_ATTRS                     41      SPAN_ATTRS
17      HISTOGRAM_DP_ATTRS                   42      SPAN_EVENTS
18      EXP_HISTOGRAM_DP_ATTRS               43      SPAN_LINKS
19      NUMBER_DP_EXEMPLARS                  44      SPAN_EVENT_ATTRS
20      HISTOGRAM_DP_EXEMPLARS               45      SPAN_LINK_ATTRS
21      EXP_HISTOGRAM_DP_EXEMPLARS           60-62   OTLP_LOGS, OTLP_TRACES, OTLP_METRICS
======  ===================================  ======  =================================

Any number from 0 to 63 can be stored; a number without a name is somebody else's payload.

The schema fingerprint is BLAKE3 over a text made of the schema: ``name:type`` for each field, in
order, joined by commas. Nullability, metadata, time units and zones do not take part.

=====================================  ==============================================
type                                   text
=====================================  ==============================================
bool; (u)int8..64; float32, float64    ``Bol``; ``I8``..``U64``; ``F32``, ``F64``
string, binary, fixed binary of n      ``Str``, ``Bin``, ``FSB<n>``
timestamp, duration (any unit)         ``Tns``, ``Dur``
list, dictionary, map                  ``[T]``, ``Dic<K,V>``, ``Map<K,V>``
struct, dense union, sparse union      ``{f:T,..}``, ``DU{f:T,..}``, ``SU{f:T,..}``
=====================================  ==============================================

Types below have no text in the reference implementation (it stops there); these are ours:

=====================================  ==============================================
null, float16                          ``Nul``, ``F16``
large string, binary, list             ``LStr``, ``LBin``, ``L[T]``
string, binary, list view              ``VStr``, ``VBin``, ``V[T]``, ``LV[T]``
fixed-size list of n                   ``FSL<n>[T]``
date32/64, time32/64                   ``D32``, ``D64``, ``T32``, ``T64``
decimal of n bits                      ``Decn<precision,scale>``
month-day-nano interval                ``Ivl``
run-end encoded                        ``REE<R,V>``
extension                              the text of its storage type
=====================================  ==============================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pyarrow as pa
from blake3 import blake3
from pyarrow import types

from quiver.errors import InvalidBundle

SLOT_COUNT: Final = 64
FINGERPRINT_SIZE: Final = 32
MAX_ROWS: Final = 2**32 - 1
MAX_TIME_NS: Final = 2**63 - 1
MAX_SCHEMA_DEPTH: Final = 64

_T = TypeVar("_T")


class Slot(enum.IntEnum):
    """The slots that have a name."""

    RESOURCE_ATTRS = 1
    SCOPE_ATTRS = 2
    UNIVARIATE_METRICS = 10
    NUMBER_DATA_POINTS = 11
    SUMMARY_DATA_POINTS = 12
    HISTOGRAM_DATA_POINTS = 13
    EXP_HISTOGRAM_DATA_POINTS = 14
    NUMBER_DP_ATTRS = 15
    SUMMARY_DP_ATTRS = 16
    HISTOGRAM_DP_ATTRS = 17
    EXP_HISTOGRAM_DP_ATTRS = 18
    NUMBER_DP_EXEMPLARS = 19
    HISTOGRAM_DP_EXEMPLARS = 20
    EXP_HISTOGRAM_DP_EXEMPLARS = 21
    NUMBER_DP_EXEMPLAR_ATTRS = 22
    HISTOGRAM_DP_EXEMPLAR_ATTRS = 23
    EXP_HISTOGRAM_DP_EXEMPLAR_ATTRS = 24
    MULTIVARIATE_METRICS = 25
    METRIC_ATTRS = 26
    LOGS = 30
    LOG_ATTRS = 31
    SPANS = 40
    SPAN_ATTRS = 41
    SPAN_EVENTS = 42
    SPAN_LINKS = 43
    SPAN_EVENT_ATTRS = 44
    SPAN_LINK_ATTRS = 45
    OTLP_LOGS = 60
    OTLP_TRACES = 61
    OTLP_METRICS = 62
    REQUEST_CONTEXT = 63


class Signal(enum.StrEnum):
    """What a bundle is about."""

    LOGS = "logs"
    TRACES = "traces"
    METRICS = "metrics"


_SHARED_SLOTS: Final = frozenset({Slot.RESOURCE_ATTRS, Slot.SCOPE_ATTRS, Slot.REQUEST_CONTEXT})
_SIGNAL_OF_SLOT: Final[Mapping[int, Signal]] = MappingProxyType(
    {
        **dict.fromkeys(range(Slot.UNIVARIATE_METRICS, Slot.METRIC_ATTRS + 1), Signal.METRICS),
        **dict.fromkeys(range(Slot.LOGS, Slot.LOG_ATTRS + 1), Signal.LOGS),
        **dict.fromkeys(range(Slot.SPANS, Slot.SPAN_LINK_ATTRS + 1), Signal.TRACES),
        Slot.OTLP_LOGS: Signal.LOGS,
        Slot.OTLP_TRACES: Signal.TRACES,
        Slot.OTLP_METRICS: Signal.METRICS,
    }
)


def slot_name(slot: int) -> str:
    """``LOGS`` for 30; ``SLOT_7`` for a number without a name."""
    try:
        return Slot(slot).name
    except ValueError:
        return f"SLOT_{slot}"


def signal_of(slots: Iterable[int]) -> Signal | None:
    """The signal of a bundle with these slots: that of the first which is not shared by all."""
    for slot in slots:
        if slot not in _SHARED_SLOTS:
            return _SIGNAL_OF_SLOT.get(slot)
    return None


class Payload(NamedTuple):
    """What one slot holds: a batch, and the fingerprint that its stream goes by."""

    batch: pa.RecordBatch
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class RecordBundle:
    """Slots in the order of the descriptor, the time of arrival, and how many items are inside.

    ``item_count`` counts what users count (log records, spans, data points); None is unknown.
    """

    payloads: Mapping[int, Payload]
    ingestion_time_ns: int
    item_count: int | None = None

    def __post_init__(self) -> None:
        for slot, payload in self.payloads.items():
            if not 0 <= slot < SLOT_COUNT:
                raise InvalidBundle(f"slot {slot} is outside 0 to {SLOT_COUNT - 1}")
            if len(payload.fingerprint) != FINGERPRINT_SIZE:
                raise InvalidBundle(
                    f"the fingerprint of slot {slot} has {len(payload.fingerprint)} bytes, "
                    f"not {FINGERPRINT_SIZE}"
                )
            if payload.batch.num_rows > MAX_ROWS:
                raise InvalidBundle(
                    f"slot {slot} has {payload.batch.num_rows} rows and {MAX_ROWS} fit: split it"
                )
        if not 0 <= self.ingestion_time_ns <= MAX_TIME_NS:
            raise InvalidBundle(
                f"ingestion time {self.ingestion_time_ns} is not in nanoseconds since 1970 "
                "as a signed 64-bit number"
            )
        if self.item_count is not None and not 0 <= self.item_count < 2**64:
            raise InvalidBundle(f"item count {self.item_count} is outside 0 to 2^64 - 1")

    @classmethod
    def from_batches(
        cls,
        batches: Mapping[int, pa.RecordBatch | None],
        *,
        ingestion_time_ns: int,
        item_count: int | None = None,
    ) -> RecordBundle:
        """A bundle of these batches, fingerprinted by their schemas; None marks an empty slot."""
        payloads = {
            slot: Payload(batch, fingerprint(batch.schema))
            for slot, batch in batches.items()
            if batch is not None
        }
        return cls(MappingProxyType(payloads), ingestion_time_ns, item_count)

    @property
    def signal(self) -> Signal | None:
        """Logs, traces or metrics; None when no slot tells."""
        return signal_of(self.payloads)

    @property
    def row_count(self) -> int:
        """Rows of all slots together."""
        return sum(payload.batch.num_rows for payload in self.payloads.values())

    def batch(self, slot: int) -> pa.RecordBatch | None:
        """The batch in a slot, or None."""
        payload = self.payloads.get(slot)
        return None if payload is None else payload.batch


class RecentSchemas(Generic[_T]):
    """Remembers what was computed for the schemas seen last, because streams repeat them.

    Comparing with a handful of schemas costs less than hashing one. Entries leave in the order
    they came, so the memory is bounded; two threads may at worst compute the same thing twice.
    """

    def __init__(self, compute: Callable[[pa.Schema], _T], size: int = 64) -> None:
        self._compute = compute
        self._size = size
        self._recent: tuple[tuple[pa.Schema, _T], ...] = ()

    def __call__(self, schema: pa.Schema) -> _T:
        for known, value in self._recent:
            if known.equals(schema, check_metadata=True):
                return value
        value = self._compute(schema)
        self._recent = ((schema, value), *self._recent[: self._size - 1])
        return value


def fingerprint(schema: pa.Schema) -> bytes:
    """The 32 bytes that tell one schema from another inside a slot."""
    return _recent_fingerprints(schema)


_recent_fingerprints = RecentSchemas(lambda schema: blake3(schema_id(schema).encode()).digest())


def schema_id(schema: pa.Schema) -> str:
    """The text that the fingerprint is made of."""
    return _fields_text(schema, depth=0)


def _fields_text(fields: Iterable[pa.Field[Any]], depth: int) -> str:
    return ",".join(f"{field.name}:{_type_text(field.type, depth)}" for field in fields)


def _type_text(data_type: pa.DataType, depth: int) -> str:
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidBundle(f"a schema nests types at most {MAX_SCHEMA_DEPTH} deep")
    plain = _PLAIN_TYPES.get(data_type)
    if plain is not None:
        return plain
    for is_kind, text in _COMPOSED_TYPES:
        if is_kind(data_type):
            return text(data_type, depth + 1)
    if isinstance(data_type, pa.BaseExtensionType):
        return _type_text(data_type.storage_type, depth + 1)
    raise InvalidBundle(f"Arrow type {data_type} cannot be stored: it has no fingerprint text")


_PLAIN_TYPES: Final[Mapping[pa.DataType, str]] = {
    pa.bool_(): "Bol",
    pa.uint8(): "U8",
    pa.uint16(): "U16",
    pa.uint32(): "U32",
    pa.uint64(): "U64",
    pa.int8(): "I8",
    pa.int16(): "I16",
    pa.int32(): "I32",
    pa.int64(): "I64",
    pa.float32(): "F32",
    pa.float64(): "F64",
    pa.string(): "Str",
    pa.binary(): "Bin",
    pa.null(): "Nul",
    pa.float16(): "F16",
    pa.large_string(): "LStr",
    pa.large_binary(): "LBin",
    pa.string_view(): "VStr",
    pa.binary_view(): "VBin",
    pa.date32(): "D32",
    pa.date64(): "D64",
    pa.month_day_nano_interval(): "Ivl",
}

# The Arrow stubs type each predicate's argument and each attribute differently, hence Any.
_TypeText = Callable[[Any, int], str]
_COMPOSED_TYPES: Final[tuple[tuple[Callable[[Any], bool], _TypeText], ...]] = (
    (types.is_timestamp, lambda _t, _d: "Tns"),
    (types.is_duration, lambda _t, _d: "Dur"),
    (types.is_fixed_size_binary, lambda t, _d: f"FSB<{t.byte_width}>"),
    (types.is_dictionary, lambda t, d: f"Dic<{_types_text((t.index_type, t.value_type), d)}>"),
    (types.is_struct, lambda t, d: f"{{{_fields_text(t, d)}}}"),
    (types.is_list, lambda t, d: f"[{_type_text(t.value_type, d)}]"),
    (types.is_map, lambda t, d: f"Map<{_types_text((t.key_type, t.item_type), d)}>"),
    (types.is_union, lambda t, d: f"{_union_tag(t)}{{{_fields_text(t, d)}}}"),
    (types.is_large_list, lambda t, d: f"L[{_type_text(t.value_type, d)}]"),
    (types.is_list_view, lambda t, d: f"V[{_type_text(t.value_type, d)}]"),
    (types.is_large_list_view, lambda t, d: f"LV[{_type_text(t.value_type, d)}]"),
    (types.is_fixed_size_list, lambda t, d: f"FSL<{t.list_size}>[{_type_text(t.value_type, d)}]"),
    (types.is_time, lambda t, _d: f"T{t.bit_width}"),
    (types.is_decimal, lambda t, _d: f"Dec{t.bit_width}<{t.precision},{t.scale}>"),
    (
        types.is_run_end_encoded,
        lambda t, d: f"REE<{_types_text((t.run_end_type, t.value_type), d)}>",
    ),
)


def _types_text(data_types: Iterable[pa.DataType], depth: int) -> str:
    return ",".join(_type_text(data_type, depth) for data_type in data_types)


def _union_tag(data_type: pa.UnionType) -> str:
    return "DU" if data_type.mode == "dense" else "SU"
