"""What the exporters of the OpenTelemetry SDK send arrives as it was sent, in all ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf.message import Message
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Status, StatusCode
from receiving import Collector, grpc_receiver, http_receiver

from quiver.bundle import Signal
from quiver.errors import TryLater
from quiver.otlp.messages import REQUEST_TYPES
from quiver.pipeline.item import Item

RESOURCE = Resource.create({"service.name": "shop", "list": [1, 2, 3], "text": "ü"})


def made_spans() -> Any:  # noqa: ANN401 - as the SDK hands them on
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("tests", "1.0", attributes={"scope": True})
    with tracer.start_as_current_span("parent") as parent:
        for index in range(50):
            links = [Link(parent.get_span_context(), {"index": index})]
            with tracer.start_as_current_span(f"child {index}", links=links) as span:
                span.set_attributes({"i": index, "f": index / 3, "b": True, "s": "text" * 20})
                span.add_event("event", {"n": index})
                span.set_status(Status(StatusCode.ERROR, "it broke"))
    provider.shutdown()
    return kept.get_finished_spans()


def made_logs() -> Any:  # noqa: ANN401 - as the SDK hands them on
    kept = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call] # as it says
    provider = LoggerProvider(resource=RESOURCE)
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    logger = provider.get_logger("tests")
    for index in range(50):
        logger.emit(
            LogRecord(
                timestamp=1_700_000_000_000_000_000 + index,
                severity_number=SeverityNumber.WARN,
                severity_text="WARN",
                body={"number": index, "nested": ["a", {"b": 1.5}]},
                attributes={"index": index},
            )
        )
    logs = kept.get_finished_logs()
    provider.shutdown()
    return logs


def made_metrics() -> Any:  # noqa: ANN401 - as the SDK hands them on
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], resource=RESOURCE)
    meter = provider.get_meter("tests")
    for index in range(20):
        meter_attributes = {"index": index}
        meter.create_counter("counter").add(index, meter_attributes)
        meter.create_histogram("histogram").record(index * 1.5, meter_attributes)
        meter.create_gauge("gauge").set(index, meter_attributes)
    data = reader.get_metrics_data()
    provider.shutdown()
    return data


class Way(NamedTuple):
    make: Callable[[], Any]
    encode: Callable[[Any], Message]
    over_grpc: Callable[..., Any]
    over_http: Callable[..., Any]


WAYS = {
    Signal.TRACES: Way(
        made_spans, encode_spans, grpc_traces.OTLPSpanExporter, http_traces.OTLPSpanExporter
    ),
    Signal.LOGS: Way(made_logs, encode_logs, grpc_logs.OTLPLogExporter, http_logs.OTLPLogExporter),
    Signal.METRICS: Way(
        made_metrics,
        encode_metrics,
        grpc_metrics.OTLPMetricExporter,
        http_metrics.OTLPMetricExporter,
    ),
}


async def exported(exporter: Any, data: object) -> str:  # noqa: ANN401 - there are six kinds
    """The name of the result, from a thread, as exporters do it."""
    try:
        result = await asyncio.to_thread(exporter.export, data)
        return str(result.name)
    finally:
        await asyncio.to_thread(exporter.shutdown)


def assert_arrived(taker: Collector, signal: Signal, expected: Message) -> None:
    (item,) = taker.items
    assert REQUEST_TYPES[signal].FromString(item.requests[0]) == expected
    assert item.signal is signal
    assert item.count == {Signal.TRACES: 51, Signal.LOGS: 50, Signal.METRICS: 60}[signal]


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_over_grpc(signal: Signal, compression: grpc.Compression) -> None:
    async def test() -> None:
        way = WAYS[signal]
        data = way.make()
        async with grpc_receiver() as rig:
            exporter = way.over_grpc(
                endpoint=f"http://{rig.where}", insecure=True, compression=compression
            )
            assert await exported(exporter, data) == "SUCCESS"
            assert_arrived(rig.taker, signal, way.encode(data))

    asyncio.run(test())


@pytest.mark.parametrize("signal", list(Signal))
@pytest.mark.parametrize(
    "compression", [Compression.NoCompression, Compression.Gzip, Compression.Deflate]
)
def test_over_http(signal: Signal, compression: Compression) -> None:
    async def test() -> None:
        way = WAYS[signal]
        data = way.make()
        async with http_receiver() as rig:
            exporter = way.over_http(
                endpoint=f"http://{rig.where}/v1/{signal}", compression=compression
            )
            assert await exported(exporter, data) == "SUCCESS"
            assert_arrived(rig.taker, signal, way.encode(data))

    asyncio.run(test())


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_who_is_told_to_come_later_comes_later(way: str) -> None:
    async def test() -> None:
        data = made_spans()
        refusals = [TryLater("not yet", 0.05), ZeroDivisionError("a defect")]

        def answer(_: Item) -> Exception | None:
            return refusals.pop(0) if refusals else None

        taker = Collector(answer=answer)
        receiver = grpc_receiver if way == "grpc" else http_receiver
        async with receiver(taker, retry_after=0.05) as rig:
            exporter: Any = (
                grpc_traces.OTLPSpanExporter(endpoint=f"http://{rig.where}", insecure=True)
                if way == "grpc"
                else http_traces.OTLPSpanExporter(endpoint=f"http://{rig.where}/v1/traces")
            )
            assert await exported(exporter, data) == "SUCCESS"
            assert_arrived(taker, Signal.TRACES, encode_spans(data))
            assert refusals == []

    asyncio.run(test())
