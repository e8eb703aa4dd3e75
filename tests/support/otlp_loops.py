"""OTLP requests walked with loops over the SDK's messages: what columnar code is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from quiver import Signal
from quiver.pipeline.item import Item
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = [Signal.TRACES, Signal.LOGS, Signal.METRICS]
REQUESTS: dict[Signal, Any] = {
    Signal.TRACES: ExportTraceServiceRequest,
    Signal.LOGS: ExportLogsServiceRequest,
    Signal.METRICS: ExportMetricsServiceRequest,
}
SHAPE = Shape(items_per_request=60, error_share=0.2)


@dataclass
class Destination:
    """Keeps what it gets."""

    got: list[Item] = field(default_factory=list)
    error: Exception | None = None
    name: str = "next"

    async def start(self) -> None: ...

    async def stop(self, deadline: float) -> None: ...

    async def take(self, item: Item) -> None:
        if self.error:
            raise self.error
        self.got.append(item)


def sample(signal: Signal, count: int = 3) -> Item:
    requests = Telemetry(5, SHAPE).take(signal, count)
    total = sum(1 for request in requests for _ in walk(signal, parse(signal, request)))
    return Item(signal=signal, requests=tuple(requests), count=total, context={"peer": "x"})


def parse(signal: Signal, request: bytes) -> Any:  # noqa: ANN401 - one of three
    return REQUESTS[signal].FromString(request)


@dataclass
class Row:
    """A span, record or point, with what it belongs to."""

    item: Any
    metric: Any
    scope: Any
    resource: Any
    home: Any

    def attribute(self, on: str, key: str) -> AnyValue | None:
        owner = getattr(self, on)
        return next((pair.value for pair in owner.attributes if pair.key == key), None)


def walk(signal: Signal, request: Any) -> Iterator[Row]:  # noqa: ANN401 - one of three
    for resource in request.ListFields()[0][1] if request.ListFields() else ():
        scopes = getattr(resource, f"scope_{_word(signal)}")
        for scope in scopes:
            if signal is not Signal.METRICS:
                home = scope.spans if signal is Signal.TRACES else scope.log_records
                for each in home:
                    yield Row(each, each, scope.scope, resource.resource, home)
                continue
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                home = getattr(metric, kind).data_points if kind else ()
                for each in home:
                    yield Row(each, metric, scope.scope, resource.resource, home)


def _word(signal: Signal) -> str:
    return {"traces": "spans", "logs": "logs", "metrics": "metrics"}[str(signal)]


def keep_only(signal: Signal, request: bytes, keep: Callable[[Row], bool]) -> Message | None:
    """The request without the others, and without what is empty then; None: nothing is left."""
    message = parse(signal, request)
    for row in [row for row in walk(signal, message) if not keep(row)]:
        row.home.remove(row.item)
    resources = message.ListFields()[0][1] if message.ListFields() else []
    for resource in list(resources):
        scopes = getattr(resource, f"scope_{_word(signal)}")
        for scope in list(scopes):
            if signal is Signal.METRICS:
                for metric in list(scope.metrics):
                    kind = metric.WhichOneof("data")
                    if not kind or not getattr(metric, kind).data_points:
                        scope.metrics.remove(metric)
            if not any(isinstance(value, Sequence) and len(value) for value in _items(scope)):
                scopes.remove(scope)
        if not scopes:
            resources.remove(resource)
    return message if resources else None


def _items(scope: Any) -> list[Any]:  # noqa: ANN401 - one of three
    return [
        getattr(scope, name)
        for name in ("spans", "log_records", "metrics")
        if name in scope.DESCRIPTOR.fields_by_name
    ]


def with_ids(signal: Signal, message: Message) -> Message:
    """Spans and links must have ids, or nobody reads them."""
    for row in walk(signal, message):
        for each in (row.item, *row.item.links) if signal is Signal.TRACES else ():
            each.trace_id, each.span_id = b"t" * 16, b"s" * 8
    return message
