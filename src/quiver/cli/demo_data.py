"""Log telemetry as a small shop would send it, made up from a seed: for ``quiver demo``.

Bundles come in three kinds, in turns:

===============  ========================================  ===================================
kind             slots                                     what is special
===============  ========================================  ===================================
application log  RESOURCE_ATTRS, SCOPE_ATTRS, LOGS,        dictionaries; trace and span ids
                 LOG_ATTRS
access log       RESOURCE_ATTRS, LOGS, LOG_ATTRS           another schema for LOGS: no ids
OTLP request     OTLP_LOGS                                 the bytes of a request, as received
===============  ========================================  ===================================
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3

from quiver.bundle import Payload, RecordBundle, Slot

_START_NS: Final = 1_714_550_400_000_000_000  # 2024-05-01 08:00 UTC
_BETWEEN_BUNDLES_NS = 250_000_000
_OTLP_FINGERPRINT: Final = blake3(b"otlp_binary_v1").digest()

_SERVICES: Final = ("checkout", "catalogue", "payment", "shipping")
_SEVERITIES: Final = (("INFO", 9), ("INFO", 9), ("INFO", 9), ("WARN", 13), ("ERROR", 17))
_METHODS: Final = ("GET", "GET", "GET", "POST", "DELETE")
_BODIES: Final = (
    "order {} accepted",
    "cart {} has expired",
    "retrying the card service for order {}",
    "stock of article {} is low",
)

_TEXT = pa.dictionary(pa.uint8(), pa.string())
_OTLP_SCHEMA: Final = pa.schema([pa.field("data", pa.binary(), nullable=False)])


def make_bundles(seed: int, count: int) -> Iterator[RecordBundle]:
    """Bundles in the order in which they arrive; the same for the same seed."""
    generator = random.Random(seed)  # noqa: S311  # no secrets
    kinds = (_application_log, _access_log, _application_log, _otlp_request)
    for i in range(count):
        yield kinds[i % len(kinds)](generator, _START_NS + i * _BETWEEN_BUNDLES_NS)


def _application_log(generator: random.Random, now: int) -> RecordBundle:
    rows = generator.randint(40, 160)
    severities = generator.choices(_SEVERITIES, k=rows)
    logs = pa.record_batch(
        {
            **_columns_of_every_log(generator, now, rows),
            "severity_text": pa.array([name for name, _ in severities], _TEXT),
            "severity_number": pa.array([number for _, number in severities], pa.int32()),
            "body": pa.array(
                [
                    generator.choice(_BODIES).format(generator.randint(1000, 9999))
                    for _ in range(rows)
                ]
            ),
            "trace_id": pa.array([generator.randbytes(16) for _ in range(rows)], pa.binary(16)),
            "span_id": pa.array([generator.randbytes(8) for _ in range(rows)], pa.binary(8)),
        }
    )
    attributes = [
        (row, key, value)
        for row in range(rows)
        for key, value in (
            ("thread.name", f"worker-{generator.randint(1, 8)}"),
            ("user.id", f"u{generator.randint(1, 2000)}"),
        )
    ]
    batches: dict[int, pa.RecordBatch | None] = {
        Slot.RESOURCE_ATTRS: _resource(generator),
        Slot.SCOPE_ATTRS: _attributes([(0, "library", "shop.logging")]),
        Slot.LOGS: logs,
        Slot.LOG_ATTRS: _attributes(attributes),
    }
    return RecordBundle.from_batches(batches, ingestion_time_ns=now, item_count=rows)


def _access_log(generator: random.Random, now: int) -> RecordBundle:
    rows = generator.randint(80, 240)
    methods = generator.choices(_METHODS, k=rows)
    logs = pa.record_batch(
        {
            **_columns_of_every_log(generator, now, rows),
            "body": pa.array(
                [f"{method} /article/{generator.randint(1, 500)}" for method in methods]
            ),
        }
    )
    attributes = [(row, "http.method", method) for row, method in enumerate(methods)]
    batches: dict[int, pa.RecordBatch | None] = {
        Slot.RESOURCE_ATTRS: _resource(generator),
        Slot.LOGS: logs,
        Slot.LOG_ATTRS: _attributes(attributes),
    }
    return RecordBundle.from_batches(batches, ingestion_time_ns=now, item_count=rows)


def _columns_of_every_log(generator: random.Random, now: int, rows: int) -> dict[str, Any]:
    times = sorted(now - generator.randrange(2_000_000_000) for _ in range(rows))
    return {
        "id": pa.array(range(rows), pa.uint16()),
        "time_unix_nano": pa.array(times, pa.timestamp("ns")),
    }


def _resource(generator: random.Random) -> pa.RecordBatch:
    service = generator.choice(_SERVICES)
    host = f"{service}-{generator.randint(1, 3)}"
    return _attributes([(0, "service.name", service), (0, "host.name", host)])


def _attributes(rows: Sequence[tuple[int, str, str]]) -> pa.RecordBatch:
    parents, keys, values = zip(*rows, strict=True)
    return pa.record_batch(
        {
            "parent_id": pa.array(parents, pa.uint16()),
            "key": pa.array(keys, _TEXT),
            "str": pa.array(values, pa.dictionary(pa.uint16(), pa.string())),
        }
    )


# --- OTLP --------------------------------------------------------------------------------------


def _otlp_request(generator: random.Random, now: int) -> RecordBundle:
    rows = generator.randint(20, 60)
    records = b"".join(
        _field(2, _log_record(now - generator.randrange(2_000_000_000), f"heartbeat {row}"))
        for row in range(rows)
    )
    request = _field(1, _field(2, records))  # resource_logs { scope_logs { log_records } }
    batch = pa.record_batch([pa.array([request], pa.binary())], schema=_OTLP_SCHEMA)
    return RecordBundle({Slot.OTLP_LOGS: Payload(batch, _OTLP_FINGERPRINT)}, now, rows)


def _log_record(time_ns: int, body: str) -> bytes:
    severity, number = _SEVERITIES[0]
    time = b"\x09" + struct.pack("<Q", time_ns)
    return (
        time
        + bytes([0x10, number])
        + _field(3, severity.encode())
        + _field(5, _field(1, body.encode()))
    )


def _field(number: int, data: bytes) -> bytes:
    """A protobuf field that holds bytes: its tag, their length, and they."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    groups = []
    while value >= 1 << 7:
        groups.append(1 << 7 | value % (1 << 7))
        value >>= 7
    return bytes([*groups, value])
