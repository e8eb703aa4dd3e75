"""An instrumented program: it uses the SDK as users do, and sends the same to all exporters."""

from __future__ import annotations

from typing import Any

from opentelemetry._logs import SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

RESOURCE = Resource.create({"service.name": "shop", "service.version": "1.2", "replicas": 3})


def send_traces(*exporters: Any) -> None:  # noqa: ANN401 - of several classes of the SDK
    provider = TracerProvider(resource=RESOURCE)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("shop.checkout", "0.3", attributes={"team": "web"})
    for number in range(20):
        with tracer.start_as_current_span("checkout", kind=SpanKind.SERVER) as root:
            root.set_attributes({"http.request.method": "POST", "cart.size": number, "vip": True})
            root.set_attribute("prices", [1.5, 2.25])
            root.set_attribute("tags", ["a", "ü"])
            link = Link(root.get_span_context(), {"why": "retry"})
            with tracer.start_as_current_span("pay", kind=SpanKind.CLIENT, links=[link]) as child:
                child.add_event("sent", {"bytes": 12})
                if number % 5 == 0:
                    child.record_exception(ValueError("no money"))
                    child.set_status(Status(StatusCode.ERROR, "declined"))
    provider.shutdown()


def send_logs(*exporters: Any) -> None:  # noqa: ANN401 - of several classes of the SDK
    provider = LoggerProvider(resource=RESOURCE)
    for exporter in exporters:
        provider.add_log_record_processor(BatchLogRecordProcessor(exporter))
    logger = provider.get_logger("shop", "0.1")
    for number in range(20):
        logger.emit(
            timestamp=1_760_000_000_000_000_000 + number,
            severity_number=SeverityNumber.WARN,
            severity_text="WARN",
            body=f"order {number} is late",
            attributes={"order.id": number, "late": True},
        )
    logger.emit(body={"what": "ümlaut", "list": [1, "two", None]}, event_name="odd")
    provider.shutdown()


def send_metrics(*exporters: Any) -> None:  # noqa: ANN401 - of several classes of the SDK
    readers = [
        PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
        for exporter in exporters
    ]
    provider = MeterProvider(readers, resource=RESOURCE)
    meter = provider.get_meter("shop.metrics", "1")
    requests = meter.create_counter("requests", unit="1", description="how many")
    active = meter.create_up_down_counter("active")
    seconds = meter.create_histogram("seconds", unit="s")
    meter.create_observable_gauge("load", [lambda _: []])
    for number in range(30):
        requests.add(1, {"route": f"/{number % 3}"})
        active.add(1 if number % 2 else -1)
        seconds.record(number / 10, {"route": f"/{number % 3}"})
    provider.shutdown()
