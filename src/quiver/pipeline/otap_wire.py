"""The messages of OTAP over gRPC, and where they are sent.

From ``opentelemetry/proto/experimental/arrow/v1/arrow_service.proto`` of open-telemetry/otel-arrow
(commit f7d6f90c). The descriptors are made here, in a pool of their own, so that nothing has to be
generated and nobody else's descriptors are in the way.

===================  ==========================================================================
BatchArrowRecords    batch_id [1] int64, arrow_payloads [2] ArrowPayload, headers [3] bytes
ArrowPayload         schema_id [1] string, type [2] ArrowPayloadType, record [3] bytes
BatchStatus          batch_id [1] int64, status_code [2] StatusCode, status_message [3] string
===================  ==========================================================================

Payload types have the numbers of our slots. ``headers`` are in HPACK and not looked at: what is
kept of a sender's headers comes from the gRPC call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest

PACKAGE: Final = "opentelemetry.proto.experimental.arrow.v1"
MAX_PAYLOADS: Final = 64
"""More than there are payload types."""
_SERVICES: Final[Mapping[Signal, str]] = MappingProxyType(
    {
        Signal.TRACES: "ArrowTraces",
        Signal.LOGS: "ArrowLogs",
        Signal.METRICS: "ArrowMetrics",
    }
)
SERVICES: Final[Mapping[str, Signal]] = MappingProxyType(
    {f"{PACKAGE}.{name}Service": signal for signal, name in _SERVICES.items()}
)
METHODS: Final[Mapping[Signal, str]] = MappingProxyType(
    {signal: f"/{PACKAGE}.{name}Service/{name}" for signal, name in _SERVICES.items()}
)


class BatchCode(enum.IntEnum):
    """What became of a batch: codes of gRPC."""

    OK = 0
    CANCELED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class ArrowPayload(NamedTuple):
    """A fragment of an Arrow IPC stream. ``type`` is a slot, or a number that nobody knows."""

    schema_id: str
    type: int
    record: bytes


class BatchArrowRecords(NamedTuple):
    """The tables of one OTAP batch."""

    batch_id: int
    payloads: Sequence[ArrowPayload]


class BatchStatus(NamedTuple):
    """The answer to a batch. ``code`` is a ``BatchCode``, or a number that is newer than this."""

    batch_id: int
    code: int = BatchCode.OK
    message: str = ""


# --- descriptors ----------------------------------------------------------------------------------


def describe() -> FileDescriptorProto:
    """The file that the messages and services are declared in."""
    kinds = FieldDescriptorProto
    made = FileDescriptorProto(
        name="opentelemetry/proto/experimental/arrow/v1/arrow_service.proto",
        package=PACKAGE,
        syntax="proto3",
    )
    payload_types = {"UNKNOWN": 0, **{s.name: s.value for s in Slot if s <= Slot.SPAN_LINK_ATTRS}}
    made.enum_type.append(_enumeration("ArrowPayloadType", payload_types))
    made.enum_type.append(_enumeration("StatusCode", {code.name: code.value for code in BatchCode}))
    for name, fields in (
        (
            "BatchArrowRecords",
            (
                ("batch_id", kinds.TYPE_INT64, ""),
                ("arrow_payloads", kinds.TYPE_MESSAGE, "ArrowPayload"),
                ("headers", kinds.TYPE_BYTES, ""),
            ),
        ),
        (
            "ArrowPayload",
            (
                ("schema_id", kinds.TYPE_STRING, ""),
                ("type", kinds.TYPE_ENUM, "ArrowPayloadType"),
                ("record", kinds.TYPE_BYTES, ""),
            ),
        ),
        (
            "BatchStatus",
            (
                ("batch_id", kinds.TYPE_INT64, ""),
                ("status_code", kinds.TYPE_ENUM, "StatusCode"),
                ("status_message", kinds.TYPE_STRING, ""),
            ),
        ),
    ):
        made.message_type.append(_message(name, fields))
    for name in _SERVICES.values():
        made.service.add(name=f"{name}Service").method.add(
            name=name,
            input_type=f".{PACKAGE}.BatchArrowRecords",
            output_type=f".{PACKAGE}.BatchStatus",
            client_streaming=True,
            server_streaming=True,
        )
    return made


def _enumeration(name: str, values: Mapping[str, int]) -> EnumDescriptorProto:
    made = EnumDescriptorProto(name=name)
    for value, number in values.items():
        made.value.add(name=value, number=number)
    return made


def _message(
    name: str, fields: Sequence[tuple[str, FieldDescriptorProto.Type.ValueType, str]]
) -> DescriptorProto:
    made = DescriptorProto(name=name)
    for number, (field, kind, of) in enumerate(fields, 1):
        repeated = kind == FieldDescriptorProto.TYPE_MESSAGE
        label = (
            FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        )
        made.field.add(
            name=field,
            number=number,
            type=kind,
            label=label,
            type_name=f".{PACKAGE}.{of}" if of else None,
        )
    return made


def _classes() -> tuple[Any, Any]:
    """Made at run time, so a type checker knows nothing about them."""
    pool = DescriptorPool()
    pool.AddSerializedFile(describe().SerializeToString())
    return tuple(
        GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in ("BatchArrowRecords", "BatchStatus")
    )  # type: ignore[return-value]  # two names, two classes


_Records, _Status = _classes()


# --- codec ----------------------------------------------------------------------------------------


def read_records(data: bytes) -> BatchArrowRecords:
    """The message in these bytes; ``InvalidRequest`` when it is none."""
    try:
        message = _Records.FromString(data)
    except DecodeError:
        raise InvalidRequest("not a BatchArrowRecords message: it is no such protobuf") from None
    found = message.arrow_payloads
    if len(found) > MAX_PAYLOADS:
        raise InvalidRequest(
            f"{len(found)} payloads in a batch, {MAX_PAYLOADS} are possible: send one of each type",
            where="arrow_payloads",
        )
    return BatchArrowRecords(
        message.batch_id,
        [ArrowPayload(payload.schema_id, payload.type, payload.record) for payload in found],
    )


def write_records(batch: BatchArrowRecords) -> bytes:
    """The message as bytes."""
    message = _Records(batch_id=batch.batch_id)
    for payload in batch.payloads:
        message.arrow_payloads.add(
            schema_id=payload.schema_id, type=payload.type, record=payload.record
        )
    return bytes(message.SerializeToString())


def read_status(data: bytes) -> BatchStatus:
    """The message in these bytes; ``InvalidRequest`` when it is none."""
    try:
        message = _Status.FromString(data)
    except DecodeError:
        raise InvalidRequest("not a BatchStatus message: it is no such protobuf") from None
    return BatchStatus(message.batch_id, message.status_code, message.status_message)


def write_status(status: BatchStatus) -> bytes:
    """The message as bytes."""
    message = _Status(
        batch_id=status.batch_id, status_code=status.code, status_message=status.message
    )
    return bytes(message.SerializeToString())
