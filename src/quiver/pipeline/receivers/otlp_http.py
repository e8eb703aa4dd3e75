"""OTLP over HTTP: ``POST /v1/traces``, ``/v1/logs`` and ``/v1/metrics``, protobuf or JSON.

Bodies may be compressed with gzip, deflate or zstd. Answers are in the type of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import httptools

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.otlp.json_text import from_json
from quiver.pipeline.node import Port
from quiver.pipeline.receivers.admission import ALL_TAKEN, Admission, Taken
from quiver.pipeline.receivers.answers import (
    Reason,
    Refusal,
    partial_success,
    partial_success_json,
    status,
    status_json,
)
from quiver.pipeline.receivers.decompression import ENCODINGS, decompress
from quiver.pipeline.receivers.http_protocol import HttpAnswer, HttpConnection, HttpRequest
from quiver.pipeline.security.tls import server_context
from quiver.pipeline.settings.options import OtlpHttpOptions

logger = logging.getLogger(__name__)

_PATHS: Final[Mapping[bytes, Signal]] = MappingProxyType(
    {b"/v1/traces": Signal.TRACES, b"/v1/logs": Signal.LOGS, b"/v1/metrics": Signal.METRICS}
)
_PROTOBUF: Final = "application/x-protobuf"
_JSON: Final = "application/json"
_BACKLOG: Final = 1024
_HANDSHAKE_TIMEOUT: Final = 10.0
_OFF_LOOP: Final = 32 * 1024
"""Compressed bodies and JSON above this size are worked on in a thread."""
_SLOW: Final = 1.0
"""Seconds after which a request that is still being received may have to make room for others."""
_STOPPING_SENDERS: Final = 2.0
_SWEEPS_PER_TIMEOUT: Final = 4
_TAKEN: Final = HttpAnswer(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\n")
_TAKEN_JSON: Final = HttpAnswer(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n", b"{}")
_MORE_HEADERS: Final = {
    Reason.WRONG_METHOD: b"allow: POST\r\n",
    Reason.WRONG_MEDIA_TYPE: b"accept: application/x-protobuf, application/json\r\n"
    b"accept-encoding: gzip, deflate, zstd, identity\r\n",
    Reason.UNAUTHENTICATED: b"www-authenticate: Bearer\r\n",
}


@dataclass(frozen=True, slots=True)
class _Plan:
    signal: Signal
    is_json: bool
    encoding: str
    key_id: str | None


class OtlpHttpReceiver:
    """Listens between ``start`` and ``stop``."""

    def __init__(
        self,
        name: str,
        options: OtlpHttpOptions,
        port: Port,
        *,
        metrics: Metrics,
        pressure: Callable[[], bool],
        now_ns: Callable[[], int],
    ) -> None:
        self.name = name
        self._options = options
        self._admission = Admission(
            name, options, port, metrics=metrics, pressure=pressure, now_ns=now_ns
        )
        self._hub = _HttpHub(options, self._admission)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        if self._server is None:
            raise RuntimeError(f"{self.name} is not listening")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen."""
        context = server_context(self._options.tls) if self._options.tls else None
        await self._admission.start()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: HttpConnection(self._hub, loop),
                self._options.host,
                self._options.port,
                ssl=context,
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT if context else None,
                backlog=_BACKLOG,
                reuse_port=hasattr(socket, "SO_REUSEPORT") or None,
            )
        except OSError as error:
            await self._admission.end()
            raise InvalidConfig(
                f"{self.name} cannot listen on {self._options.listening_addr}: {error.strerror}"
            ) from error
        self._sweeper = asyncio.create_task(self._hub.sweep())
        logger.info("%s listens on %s:%d", self.name, *self.address)

    async def stop(self, deadline: float) -> None:
        """Take no more, answer what was received, end."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        self._hub.stop_connections(deadline)
        await self._admission.drain(deadline)
        await self._hub.all_left(deadline)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self._admission.end()


class _HttpHub:
    """The connections of the receiver, and what they ask for."""

    def __init__(self, options: OtlpHttpOptions, admission: Admission) -> None:
        self._options = options
        self._admission = admission
        self._limits = OtlpConfig(max_request_bytes=options.max_request_bytes)
        self._connections: set[HttpConnection] = set()
        self._idle: dict[HttpConnection, None] = {}
        """Those without the headers of a request, the longest first."""
        self._nobody = asyncio.Event()
        self.max_header_bytes = options.max_header_bytes
        self.idle_timeout = options.idle_timeout
        self.request_timeout = options.request_timeout
        self.is_stopping = False

    # --- connections ----------------------------------------------------------------------------

    def joined(self, connection: HttpConnection) -> bool:
        """When there are too many, the one that was idle for the longest time has to go."""
        full = len(self._connections) >= self._options.max_connections
        if full and self._idle:
            oldest = next(iter(self._idle))
            self._forget(oldest)
            oldest.abort()
            self._admission.count("quiver.receiver.idle_closed_total")
            full = False
        # Whoever is refused is counted as well, until the answer is out; no more than this.
        self._connections.add(connection)
        self._admission.connections(len(self._connections))
        if len(self._connections) > 2 * self._options.max_connections:
            connection.abort()
        if full:
            self._admission.count("quiver.receiver.connections_refused_total")
        return not full

    def left(self, connection: HttpConnection) -> None:
        self._forget(connection)
        self._admission.connections(len(self._connections))

    def _forget(self, connection: HttpConnection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)
        if not self._connections:
            self._nobody.set()

    def became_idle(self, connection: HttpConnection) -> None:
        self._idle.pop(connection, None)
        self._idle[connection] = None

    def became_busy(self, connection: HttpConnection) -> None:
        self._idle.pop(connection, None)

    async def sweep(self) -> None:
        """Give up connections whose time is over, until cancelled."""
        loop = asyncio.get_running_loop()
        shortest = min(self.idle_timeout, self.request_timeout)
        pause = min(1.0, max(0.01, shortest / _SWEEPS_PER_TIMEOUT))
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in list(self._connections):
                if connection.deadline is not None and connection.deadline < now:
                    self._admission.count("quiver.receiver.timeouts_total")
                    connection.give_up()

    def stop_connections(self, deadline: float) -> None:
        """Close what is idle; the others close when they are done."""
        self.is_stopping = True
        self._admission.is_stopping = True
        soon = min(deadline, asyncio.get_running_loop().time() + _STOPPING_SENDERS)
        for connection in list(self._connections):
            connection.stop(soon)

    async def all_left(self, deadline: float) -> None:
        """Wait until every connection is closed; at the deadline they are."""
        if self._connections:
            self._nobody.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._nobody.wait()
        for connection in list(self._connections):
            connection.abort()

    # --- requests -------------------------------------------------------------------------------

    def screen(self, request: HttpRequest) -> None:
        is_json = _media_type(request) == _JSON
        encoding = request.headers.get("content-encoding", "").lower()
        encoding = "" if encoding == "identity" else encoding
        options = self._options
        most = options.max_json_bytes if is_json else options.max_request_bytes
        request.limit = options.max_compressed_bytes if encoding else most
        path = request.target
        signal = _PATHS.get(path) or _PATHS.get(_path(path))
        if signal is None:
            raise Refusal(Reason.NOT_FOUND, "telemetry goes to /v1/traces, /v1/logs, /v1/metrics")
        if request.method != "POST":
            raise Refusal(Reason.WRONG_METHOD, f"{request.method} is not possible here, POST is")
        key_id = self._admission.screen(request.headers.get)
        if not is_json and _media_type(request) != _PROTOBUF:
            raise Refusal(
                Reason.WRONG_MEDIA_TYPE, f"content-type must be {_PROTOBUF} or {_JSON}, with POST"
            )
        if encoding and encoding not in ENCODINGS:
            raise Refusal(
                Reason.WRONG_MEDIA_TYPE, "content-encoding must be gzip, deflate, zstd or identity"
            )
        request.plan = _Plan(signal, is_json, encoding, key_id)

    def hold(self, request: HttpRequest, size: int) -> None:
        if not self._admission.has_room(size):
            self._make_room(request, size)
        self._admission.hold(size)
        request.held += size

    def let_go(self, request: HttpRequest) -> None:
        self._admission.let_go(request.held)
        request.held = 0

    def _make_room(self, request: HttpRequest, size: int) -> None:
        """Bodies that come slowly do not keep others out: the oldest of them have to go."""
        before = asyncio.get_running_loop().time() - _SLOW
        slow = [
            (other.begun, connection)
            for connection in self._connections
            if (other := connection.slow_request) is not None
            and other is not request
            and other.held
            and other.begun < before
        ]
        for _, connection in sorted(slow, key=lambda entry: entry[0]):
            if self._admission.has_room(size):
                return
            self._admission.count("quiver.receiver.slow_closed_total")
            connection.give_up()

    async def serve(self, request: HttpRequest, peer: str) -> HttpAnswer:
        plan = request.plan
        try:
            if not isinstance(plan, _Plan):
                raise TypeError("a request was not screened")
            body = await self._decoded(request, plan)
            context = self._admission.context(peer, plan.key_id, request.headers.get)
            taken = await self._admission.submit(plan.signal, body, context)
        except Exception as error:  # noqa: BLE001 - every one gets an answer
            return self.refuse(request, self._admission.refusal(error))
        finally:
            self.let_go(request)
        return _answer(plan, taken)

    async def _decoded(self, request: HttpRequest, plan: _Plan) -> bytes:
        """The request in protobuf. What is held for it is counted anew: it has another size."""
        body = request.take_body()
        if not plan.encoding and not plan.is_json:
            return body
        if len(body) > _OFF_LOOP:
            body = await asyncio.to_thread(self._decode, plan, body)
        else:
            body = self._decode(plan, body)
        self.let_go(request)
        self.hold(request, len(body))
        return body

    def _decode(self, plan: _Plan, body: bytes) -> bytes:
        options = self._options
        if plan.encoding:
            limit = options.max_json_bytes if plan.is_json else options.max_request_bytes
            body = decompress(plan.encoding, body, limit)
        return from_json(plan.signal, body, self._limits) if plan.is_json else body

    def refuse(self, request: HttpRequest, refusal: Refusal) -> HttpAnswer:
        self._admission.refused(refusal)
        reason = refusal.reason
        is_protobuf = _media_type(request) == _PROTOBUF
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\n" % (
            reason.http_status,
            reason.http_text.encode(),
            (_PROTOBUF if is_protobuf else _JSON).encode(),
        )
        head += _MORE_HEADERS.get(reason, b"")
        if refusal.retry_after is not None:
            head += b"retry-after: %d\r\n" % refusal.whole_seconds
        return HttpAnswer(head, status(refusal) if is_protobuf else status_json(refusal))


def _answer(plan: _Plan, taken: Taken) -> HttpAnswer:
    whole = _TAKEN_JSON if plan.is_json else _TAKEN
    if taken is ALL_TAKEN:
        return whole
    if plan.is_json:
        body = partial_success_json(plan.signal, taken.rejected, taken.message)
    else:
        body = partial_success(taken.rejected, taken.message)
    return HttpAnswer(whole.head, body)


def _media_type(request: HttpRequest) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _path(target: bytes) -> bytes:
    """Of a target with a query, or with a host before it."""
    try:
        return httptools.parse_url(target).path or b""
    except httptools.HttpParserInvalidURLError:
        return b""
