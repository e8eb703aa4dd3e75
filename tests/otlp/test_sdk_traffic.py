"""What the exporters of the OpenTelemetry SDK really send comes back byte for byte."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc import (
    _log_exporter as grpc_logs,
)
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from sdk_traffic import send_logs, send_metrics, send_traces

from quiver.bundle import Signal
from quiver.otlp.convert import decode, encode, from_otap, to_otap

SEND: dict[Signal, Callable[..., None]] = {
    Signal.TRACES: send_traces,
    Signal.LOGS: send_logs,
    Signal.METRICS: send_metrics,
}
GRPC = {
    Signal.TRACES: grpc_traces.OTLPSpanExporter,
    Signal.LOGS: grpc_logs.OTLPLogExporter,
    Signal.METRICS: grpc_metrics.OTLPMetricExporter,
}
HTTP = {
    Signal.TRACES: http_traces.OTLPSpanExporter,
    Signal.LOGS: http_logs.OTLPLogExporter,
    Signal.METRICS: http_metrics.OTLPMetricExporter,
}


class _Everything(grpc.GenericRpcHandler):
    def __init__(self, got: list[bytes]) -> None:
        self._got = got

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def answer(request: bytes, _: object) -> bytes:
            self._got.append(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def grpc_server(got: list[bytes]) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([_Everything(got)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def http_server(got: list[bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            packed = self.headers.get("content-encoding") == "gzip"
            got.append(gzip.decompress(body) if packed else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_it_round_trips(signal: Signal, protocol: str, compressed: bool) -> None:
    got: list[bytes] = []
    if protocol == "grpc":
        with grpc_server(got) as endpoint:
            packing = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
            SEND[signal](GRPC[signal](endpoint=endpoint, insecure=True, compression=packing))
    else:
        with http_server(got) as endpoint:
            method = Compression.Gzip if compressed else Compression.NoCompression
            SEND[signal](HTTP[signal](endpoint=endpoint, compression=method))
    assert got
    decoded = decode(signal, got)
    assert not decoded.failures
    assert decoded.table.num_rows > 0
    assert encode(signal, decoded.table, decoded.requests) == got
    converted = to_otap(signal, got)
    assert not converted.failures
    rows = sum(decode(signal, [from_otap(signal, t)]).table.num_rows for t in converted.batches)
    assert rows == decoded.table.num_rows
