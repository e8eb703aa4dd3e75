"""The OTLP messages, for the two libraries that read them.

upb (``protobuf``) uses the descriptors of ``opentelemetry-proto`` as they are. ptars, which turns
bytes into Arrow columns without making objects, uses descriptors made here from those. They
describe the same bytes on the wire with four differences, each for a reason:

==========================================  ====================================================
field                                       declared as
==========================================  ====================================================
``AnyValue.array_value``, ``kvlist_value``  bytes: a column cannot contain itself, and most
                                            readers never look inside
``Resource.entity_refs``                    repeated bytes: carried along, not looked into
``AnyValue.string_value_strindex``,         not at all: they point into the table of a profile,
``KeyValue.key_strindex``                   which traces, logs and metrics do not have
==========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, Protocol, cast

import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from ptars import HandlerPool

from quiver.bundle import Signal

REQUEST_TYPES: Final[Mapping[Signal, type[Message]]] = MappingProxyType(
    {
        Signal.TRACES: ExportTraceServiceRequest,
        Signal.LOGS: ExportLogsServiceRequest,
        Signal.METRICS: ExportMetricsServiceRequest,
    }
)
_OPAQUE: Final = frozenset(
    {
        ("AnyValue", "array_value"),
        ("AnyValue", "kvlist_value"),
        ("Resource", "entity_refs"),
    }
)
_LEFT_OUT: Final = frozenset(
    {
        ("AnyValue", "string_value_strindex"),
        ("KeyValue", "key_strindex"),
    }
)


class Converter(Protocol):
    """What ptars offers for one type of message. It holds the GIL while it works."""

    def list_to_record_batch(self, messages: list[bytes]) -> pa.RecordBatch:
        """One row for each message."""

    def array_to_record_batch(self, messages: pa.BinaryArray) -> pa.RecordBatch:
        """One row for each message."""

    def record_batch_to_array(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """One message for each row."""

    def schema(self) -> pa.Schema:
        """The columns."""


@dataclass(frozen=True, slots=True)
class RequestType:
    """The request of one signal: as upb parses it, and as ptars turns it into columns."""

    signal: Signal
    message: type[Message]
    converter: Converter
    schema: pa.Schema


@cache
def request_type(signal: Signal) -> RequestType:
    """Made once; ptars takes about a millisecond for it."""
    message = REQUEST_TYPES[signal]
    converter = _converter(cast("Descriptor", message.DESCRIPTOR))
    return RequestType(signal, message, converter, converter.schema())


@cache
def value_converter(message: str) -> Converter:
    """For a message of OTLP's common types: ``ArrayValue``, ``KeyValueList``, ``EntityRef``."""
    return _converter(AnyValue.DESCRIPTOR.file.message_types_by_name[message])


def _converter(message: Descriptor) -> Converter:
    pool = DescriptorPool()
    _add_redeclared(pool, message.file)
    described = pool.FindMessageTypeByName(message.full_name)
    return cast("Converter", HandlerPool([described.file]).get_for_message(described))


def _add_redeclared(pool: DescriptorPool, file: FileDescriptor) -> None:
    """Add a file to the pool after those that it imports."""
    for imported in file.dependencies:
        _add_redeclared(pool, imported)
    described = FileDescriptorProto()
    file.CopyToProto(described)
    for message in described.message_type:
        kept = [f for f in message.field if (message.name, f.name) not in _LEFT_OUT]
        for field in kept:
            if (message.name, field.name) in _OPAQUE:
                field.type = FieldDescriptorProto.TYPE_BYTES
                field.ClearField("type_name")
        del message.field[:]
        message.field.extend(kept)
    pool.Add(described)
