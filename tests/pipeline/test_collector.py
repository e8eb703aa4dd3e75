"""A whole collector: what the SDK sends to it is what arrives behind it, whatever the disk does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from answering import BOUND, Server, http_server
from configurations import graph, load
from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from sdk_traffic import send_logs, send_metrics, send_traces

from quiver.bundle import Signal
from quiver.otlp import decode
from quiver.pipeline.worker import Pipeline
from quiver.testing import Shape, SimulatedDisk, Telemetry

PROTOBUF = {"content-type": "application/x-protobuf"}
PATHS = {Signal.TRACES: "v1/traces", Signal.LOGS: "v1/logs", Signal.METRICS: "v1/metrics"}
SEND: dict[Signal, Callable[..., None]] = {
    Signal.TRACES: send_traces,
    Signal.LOGS: send_logs,
    Signal.METRICS: send_metrics,
}
OVER_GRPC: dict[Signal, Any] = {
    Signal.TRACES: grpc_traces.OTLPSpanExporter,
    Signal.LOGS: grpc_logs.OTLPLogExporter,
    Signal.METRICS: grpc_metrics.OTLPMetricExporter,
}
OVER_HTTP: dict[Signal, Any] = {
    Signal.TRACES: http_traces.OTLPSpanExporter,
    Signal.LOGS: http_logs.OTLPLogExporter,
    Signal.METRICS: http_metrics.OTLPMetricExporter,
}


def exporter(pipeline: Pipeline, signal: Signal, protocol: str, *, compressed: bool) -> Any:  # noqa: ANN401 - of six classes
    host, port = pipeline[protocol].address
    if protocol == "grpc":
        packing = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
        return OVER_GRPC[signal](endpoint=f"{host}:{port}", insecure=True, compression=packing)
    method = Compression.Gzip if compressed else Compression.NoCompression
    return OVER_HTTP[signal](endpoint=f"http://{host}:{port}/{PATHS[signal]}", compression=method)


def rows(signal: Signal, bodies: list[bytes]) -> list[str]:
    """Everything that was said, without where it stood in its request."""
    decoded = decode(signal, bodies)
    assert not decoded.failures
    table = decoded.table
    names = [name for name in table.schema.names if not name.startswith("source_")]
    if signal is Signal.METRICS:  # two exporters ask for the figures at two moments
        names = [name for name in names if "time" not in name]
    return sorted(map(repr, table.select(names).to_pylist()))


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_what_the_sdk_sends_arrives_behind_the_collector(
    signal: Signal, protocol: str, compressed: bool, tmp_path: Path
) -> None:
    async def run() -> None:
        behind, beside = Server(), Server()
        async with http_server(behind), http_server(beside):
            text = graph(
                grpc="receiver:otlp_grpc -> store | listening_addr: 127.0.0.1:0",
                http="receiver:otlp_http -> store | listening_addr: 127.0.0.1:0",
                store=f"processor:persistence -> out | path: {tmp_path}",
                out=f"exporter:otlp_http | endpoint: 'http://127.0.0.1:{behind.port}'",
            )
            async with Pipeline(load(text)) as pipeline:
                direct = OVER_HTTP[signal](
                    endpoint=f"http://127.0.0.1:{beside.port}/{PATHS[signal]}"
                )
                through = exporter(pipeline, signal, protocol, compressed=compressed)
                await asyncio.to_thread(SEND[signal], through, direct)
        assert rows(signal, beside.bodies)
        assert rows(signal, behind.bodies) == rows(signal, beside.bodies)

    asyncio.run(run())


def test_a_full_disk_refuses_and_recovers_and_loses_nothing() -> None:
    requests = Telemetry(5, Shape(items_per_request=40)).take(Signal.TRACES, 60)

    async def run() -> None:
        closed = asyncio.Event()
        behind = Server(gate=closed.wait)
        disk = SimulatedDisk(capacity_bytes=400_000)
        async with http_server(behind):
            text = graph(
                http="receiver:otlp_http -> store | listening_addr: 127.0.0.1:0",
                store="processor:persistence -> out | path: /store, "
                "retention: {min_free_space: 100kB}, segment: {max_open_duration: 20ms}",
                out=f"exporter:otlp_http | endpoint: 'http://127.0.0.1:{behind.port}'",
            )
            async with Pipeline(load(text), disk=disk) as pipeline:
                host, port = pipeline["http"].address
                async with httpx.AsyncClient(base_url=f"http://{host}:{port}") as client:

                    async def send(body: bytes) -> httpx.Response:
                        return await client.post("/v1/traces", content=body, headers=PROTOBUF)

                    taken = []
                    for body in requests:
                        answer = await send(body)
                        if answer.status_code != 200:
                            break
                        taken.append(body)
                    assert 0 < len(taken) < len(requests)
                    assert answer.status_code in {429, 503}
                    assert int(answer.headers["retry-after"]) >= 1

                    disk.capacity_bytes = 100_000_000  # somebody made room
                    async with asyncio.timeout(BOUND):
                        while (await send(requests[len(taken)])).status_code != 200:  # noqa: ASYNC110 - as a client
                            await asyncio.sleep(0.05)
                    taken.append(requests[len(taken)])
                closed.set()
                await behind.until(len(taken))
        assert set(taken) <= set(behind.bodies)

    asyncio.run(run())
