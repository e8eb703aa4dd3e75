"""OTLP servers, gRPC and HTTP, that answer as they are told; and exporters that send to them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from quiver import Signal
from quiver.errors import DeliveryError
from quiver.metrics import Metrics
from quiver.pipeline.exporters.otlp_grpc import OtlpGrpcExporter
from quiver.pipeline.exporters.otlp_http import OtlpHttpExporter
from quiver.pipeline.item import Item
from quiver.pipeline.node import Taker
from quiver.pipeline.settings.options import OtlpExporterOptions

BOUND = 60.0


def item(*requests: bytes, signal: Signal = Signal.TRACES) -> Item:
    return Item(signal=signal, requests=requests)


async def refusal(node: Taker, sent: Item) -> DeliveryError:
    with pytest.raises(DeliveryError) as caught:
        await node.take(sent)
    return caught.value


@dataclass
class Answer:
    """What a server says."""

    body: bytes = b""
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Server:
    """What it got, and what it answers; ``gate`` holds answers back."""

    answer: Callable[[bytes], Answer] = lambda _: Answer()
    gate: Callable[[], Awaitable[object]] | None = None
    got: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    port: int = 0
    now: int = 0
    most_at_once: int = 0
    connections: int = 0

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body, _ in self.got]

    async def take(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        self.got.append((path, body, headers))
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            if self.gate is not None:
                await self.gate()
            return self.answer(body)
        finally:
            self.now -= 1

    async def until(self, count: int) -> None:
        async with asyncio.timeout(BOUND):
            while len(self.got) < count:  # noqa: ASYNC110 - what is waited for tells nobody
                await asyncio.sleep(0.005)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, server: Server) -> None:
        self._server = server

    def service(self, details: Any) -> Any:  # noqa: ANN401 - grpc has no types
        async def export(request: bytes, context: Any) -> bytes:  # noqa: ANN401 - the same
            metadata = dict(context.invocation_metadata())
            answer = await self._server.take(details.method, request, metadata)
            if answer.code is not grpc.StatusCode.OK:
                await context.abort(answer.code, answer.details, answer.trailers)
            return answer.body

        return grpc.unary_unary_rpc_method_handler(export)


@asynccontextmanager
async def grpc_server(
    server: Server,
    credentials: grpc.ServerCredentials | None = None,
    **options: int,
) -> AsyncIterator[Server]:
    running = grpc.aio.server(
        handlers=[_Handler(server)], options=[(f"grpc.{k}", v) for k, v in options.items()]
    )
    address = f"127.0.0.1:{server.port}"
    if credentials is None:
        server.port = running.add_insecure_port(address)
    else:
        server.port = running.add_secure_port(address, credentials)
    await running.start()
    try:
        yield server
    finally:
        await running.stop(0)


@asynccontextmanager
async def http_server(server: Server, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode().rstrip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                answer = await server.take(first, body, headers)
                facts = {"content-length": str(len(answer.body)), **answer.headers}
                text = "".join(f"{key}: {value}\r\n" for key, value in facts.items())
                writer.write(f"HTTP/1.1 {answer.status} -\r\n{text}\r\n".encode() + answer.body)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        talks.add(asyncio.get_running_loop().create_task(talk(reader, writer)))

    running = await asyncio.start_server(connected, "127.0.0.1", server.port, ssl=tls)
    server.port = running.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        running.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


@asynccontextmanager
async def grpc_exporter(
    server: Server, *, metrics: Metrics | None = None, **changes: object
) -> AsyncIterator[OtlpGrpcExporter]:
    options: Any = {"grpc_endpoint": f"http://127.0.0.1:{server.port}", "timeout": BOUND, **changes}
    node = OtlpGrpcExporter("out", OtlpExporterOptions(**options), metrics=metrics)
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time())


@asynccontextmanager
async def http_exporter(
    server: Server, *, metrics: Metrics | None = None, **changes: object
) -> AsyncIterator[OtlpHttpExporter]:
    options: Any = {"http_endpoint": f"http://127.0.0.1:{server.port}", "timeout": BOUND, **changes}
    node = OtlpHttpExporter("out", OtlpExporterOptions(**options), metrics=metrics)
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time())


@dataclass(frozen=True)
class Protocol:
    """One of the two ways, so that a test can be about both."""

    name: str
    server: Any
    exporter: Any
    later: Answer
    never: Answer

    def __str__(self) -> str:
        return self.name


GRPC = Protocol(
    "grpc",
    grpc_server,
    grpc_exporter,
    Answer(code=grpc.StatusCode.UNAVAILABLE, details="busy"),
    Answer(code=grpc.StatusCode.INVALID_ARGUMENT, details="bad span"),
)
HTTP = Protocol(
    "http",
    http_server,
    http_exporter,
    Answer(status=503, body=b"busy"),
    Answer(status=400, body=b"bad span"),
)
