"""What the answers of real servers mean to the OTLP exporters, and what each protocol has alone."""

from __future__ import annotations

import asyncio
import gzip
import time
import zlib
from collections.abc import Callable
from email.utils import formatdate

import grpc
import pytest
import zstandard
from answering import (
    Answer,
    Server,
    grpc_exporter,
    grpc_server,
    http_exporter,
    http_server,
    item,
    refusal,
)
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]  # it has no types
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # the same
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from quiver import Signal
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.pipeline.exporters.otlp_grpc import OtlpGrpcExporter, grpc_target
from quiver.pipeline.exporters.otlp_http import OtlpHttpExporter, http_urls
from quiver.pipeline.settings.options import ClientTlsOptions, OtlpExporterOptions

# --- gRPC -----------------------------------------------------------------------------------------

NEVER = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "UNIMPLEMENTED"}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
def test_what_a_grpc_status_means(code: grpc.StatusCode) -> None:
    async def run() -> None:
        server = Server(lambda _: Answer(code=code, details="because"))
        async with grpc_server(server), grpc_exporter(server) as node:
            error = await refusal(node, item(b""))
        assert isinstance(error, Undeliverable if code.name in NEVER else TryLater)
        assert code.name in str(error)
        assert "because" in str(error)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"), [(7, 500_000_000, 7.5), (0, 0, 0.0), (10**9, 0, 3600.0)]
)
def test_a_grpc_server_says_how_long_to_wait(seconds: int, nanos: int, expected: float) -> None:
    info = RetryInfo(retry_delay={"seconds": seconds, "nanos": nanos})
    details = Status(code=8, message="full")
    details.details.add().Pack(ExportTraceServiceResponse())
    details.details.add().Pack(info)
    trailers = (("grpc-status-details-bin", details.SerializeToString()),)
    answer = Answer(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        details="message larger than max",
        trailers=trailers,
    )

    async def run() -> None:
        server = Server(lambda _: answer)
        async with grpc_server(server), grpc_exporter(server) as node:
            error = await refusal(node, item(b""))
        assert isinstance(error, TryLater)
        assert error.retry_after == expected

    asyncio.run(run())


@pytest.mark.parametrize("details", [b"\xff" * 20, b"\x1a\x7f", b"\x1a\x02\x0a\xff", b""])
def test_damaged_details_do_no_harm(details: bytes) -> None:
    trailers = (("grpc-status-details-bin", details),)
    answer = Answer(code=grpc.StatusCode.UNAVAILABLE, trailers=trailers)

    async def run() -> None:
        server = Server(lambda _: answer)
        async with grpc_server(server), grpc_exporter(server) as node:
            error = await refusal(node, item(b""))
        assert isinstance(error, TryLater)
        assert error.retry_after is None

    asyncio.run(run())


def test_a_message_that_is_too_large_for_the_server_is_not_tried_for_ever() -> None:
    async def run() -> None:
        server = Server()
        async with (
            grpc_server(server, max_receive_message_length=1000),
            grpc_exporter(server) as node,
        ):
            await node.take(item(b"x" * 900))
            assert isinstance(await refusal(node, item(b"x" * 1100)), Undeliverable)

    asyncio.run(run())


@pytest.mark.parametrize("method", ["none", "gzip", "deflate"])
def test_grpc_headers_and_compression(method: str) -> None:
    async def run() -> None:
        server = Server()
        async with (
            grpc_server(server),
            grpc_exporter(server, compression_method=method, headers={"X-Tenant": "blue"}) as node,
        ):
            await node.take(item(b"x" * 10_000))
        ((_, body, headers),) = server.got
        assert body == b"x" * 10_000
        assert headers["x-tenant"] == "blue"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("endpoint", "tls", "address", "is_secure"),
    [
        ("http://host:1", None, "host:1", False),
        ("https://host", None, "host:4317", True),
        ("host:1", None, "host:1", False),
        ("host:1", ClientTlsOptions(), "host:1", True),
        ("http://[::1]:1/", None, "[::1]:1", False),
    ],
)
def test_grpc_endpoints(
    endpoint: str, tls: ClientTlsOptions | None, address: str, is_secure: bool
) -> None:
    target = grpc_target(endpoint, tls)
    assert (target.address, target.is_secure) == (address, is_secure)


@pytest.mark.parametrize("endpoint", ["ftp://host:1", "http://", "http://host:1/path"])
def test_grpc_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="grpc_endpoint"):
        OtlpGrpcExporter("out", OtlpExporterOptions(grpc_endpoint=endpoint))


# --- HTTP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((status, None) for status in (200, 202, 204)),
        *((status, Undeliverable) for status in (301, 307, 400, 404, 405, 413, 415, 422)),
        *((status, TryLater) for status in (401, 403, 408, 429, 500, 501, 502, 503, 504)),
    ],
)
def test_what_an_http_status_means(status: int, expected: type[Exception] | None) -> None:
    headers = {"location": "http://elsewhere/"} if status < 400 else {}

    async def run() -> None:
        server = Server(lambda _: Answer(status=status, body=b"", headers=headers))
        async with http_server(server), http_exporter(server) as node:
            if expected is None:
                await node.take(item(b""))
            else:
                error = await refusal(node, item(b""))
                assert type(error) is expected
                assert str(status) in str(error)
                assert ("http://elsewhere/" in str(error)) == (status < 400)
            assert len(server.got) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("7", 7, 7),
        ("date", 900, 1000),
        (formatdate(0, usegmt=True), 0, 0),
        ("99999999", 3600, 3600),
        ("soon", None, None),
        ("nan", None, None),
    ],
    ids=["seconds", "date", "past", "too-long", "words", "nan"],  # workers must agree on them
)
def test_an_http_server_says_how_long_to_wait(
    value: str, low: float | None, high: float | None
) -> None:
    when = formatdate(time.time() + 1000, usegmt=True) if value == "date" else value

    async def run() -> None:
        server = Server(lambda _: Answer(status=429, headers={"retry-after": when}))
        async with http_server(server), http_exporter(server) as node:
            error = await refusal(node, item(b""))
        assert isinstance(error, TryLater)
        if low is None or high is None:
            assert error.retry_after is None
        else:
            assert error.retry_after is not None
            assert low <= error.retry_after <= high

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "decompress"),
    [
        ("none", lambda data: data),
        ("gzip", gzip.decompress),
        ("deflate", zlib.decompress),
        ("zstd", zstandard.decompress),
    ],
)
@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_http_headers_and_compression(
    method: str, decompress: Callable[[bytes], bytes], size: int
) -> None:
    async def run() -> None:
        server = Server()
        async with (
            http_server(server),
            http_exporter(server, compression_method=method, headers={"X-Tenant": "blue"}) as node,
        ):
            await node.take(item(b"x" * size))
        ((first, body, headers),) = server.got
        assert first == "POST /v1/traces HTTP/1.1"
        assert decompress(body) == b"x" * size
        assert headers["x-tenant"] == "blue"
        assert headers["content-type"] == "application/x-protobuf"
        assert headers.get("content-encoding", "none") == method

    asyncio.run(run())


def test_the_reason_of_an_http_server_is_told() -> None:
    status = Status(code=3, message="span 7 has no name").SerializeToString()
    answer = Answer(status=400, body=status, headers={"content-type": "application/x-protobuf"})

    async def run() -> None:
        server = Server(lambda _: answer)
        async with http_server(server), http_exporter(server) as node:
            assert "400 span 7 has no name" in str(await refusal(node, item(b"")))

    asyncio.run(run())


def test_an_endless_answer_is_not_read() -> None:
    answer = Answer(status=400, body=b"x" * 1_000_000, headers={"content-length": str(10**12)})

    async def run() -> None:
        server = Server(lambda _: answer)
        async with http_server(server), http_exporter(server) as node:
            error = await refusal(node, item(b""))
        assert isinstance(error, Undeliverable)
        assert len(str(error)) < 1000

    asyncio.run(run())


def test_an_answer_that_drips_is_not_waited_for() -> None:
    """Every byte comes in time, the answer never does."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 -\r\ncontent-length: 60000\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        except OSError:
            writer.close()
            ended.set()

    ended = asyncio.Event()

    async def run() -> None:
        listening = await asyncio.start_server(drip, "127.0.0.1", 0)
        server = Server(port=listening.sockets[0].getsockname()[1])
        async with listening, http_exporter(server, timeout=0.5) as node:
            async with asyncio.timeout(30):
                error = await refusal(node, item(b""))
            assert isinstance(error, TryLater)
            assert "no answer in 0.5 seconds" in str(error)
            async with asyncio.timeout(30):  # the connection is not kept
                await ended.wait()

    asyncio.run(run())


def test_connections_are_used_again() -> None:
    async def run() -> None:
        server = Server()
        async with http_server(server), http_exporter(server) as node:
            for _ in range(20):
                await node.take(item(b"x"))
        assert (len(server.got), server.connections) == (20, 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://host:4318", "http://host:4318/v1/logs"),
        ("http://host:4318/", "http://host:4318/v1/logs"),
        ("https://host/otlp/", "https://host/otlp/v1/logs"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/logs"),
    ],
)
def test_http_endpoints(endpoint: str, expected: str) -> None:
    assert http_urls(endpoint)[Signal.LOGS] == expected


@pytest.mark.parametrize("endpoint", ["host:4318", "ftp://host", "http://host?x=1", "http://"])
def test_http_endpoints_that_are_none(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="http_endpoint"):
        OtlpHttpExporter("out", OtlpExporterOptions(http_endpoint=endpoint))
