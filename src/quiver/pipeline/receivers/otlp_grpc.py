"""OTLP over gRPC: the three Export methods, and the health service.

Requests are handled as bytes; nothing is parsed but the way down to the items. Whoever may not send
is refused before the message is received. Compression is that of the library: gzip and deflate (see
the decision on zstd in ``docs/adr``). Its limit is ``max_request_bytes``, before and after
decompression.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import (  # type: ignore[import-untyped]
    health,
    health_pb2,
    health_pb2_grpc,
)

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.pipeline.node import Port
from quiver.pipeline.receivers.admission import Admission, Headers, Taken
from quiver.pipeline.receivers.answers import Refusal, partial_success, retry_info, status
from quiver.pipeline.security.tls import server_credentials
from quiver.pipeline.settings.options import ReceiverOptions

logger = logging.getLogger(__name__)

SERVICES: Final[Mapping[str, Signal]] = MappingProxyType(
    {
        "opentelemetry.proto.collector.trace.v1.TraceService": Signal.TRACES,
        "opentelemetry.proto.collector.logs.v1.LogsService": Signal.LOGS,
        "opentelemetry.proto.collector.metrics.v1.MetricsService": Signal.METRICS,
    }
)
_METHODS: Final = {f"/{service}/Export": signal for service, signal in SERVICES.items()}
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_LAST_ANSWERS: Final = 0.25
"""Seconds for answers that are on their way when everything else is done."""
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
_IDLE_MS: Final = 600_000
_MIN_PING_MS: Final = 10_000
_KEEPALIVE_MS: Final = 60_000
_KEEPALIVE_TIMEOUT_MS: Final = 20_000
_MAX_METADATA_BYTES: Final = 64 * 1024
_SPARE_STREAMS: Final = 16

Context: TypeAlias = Any
"""``grpc.aio.ServicerContext``: grpcio has no types."""


class OtlpGrpcReceiver:
    """Listens between ``start`` and ``stop``."""

    def __init__(
        self,
        name: str,
        options: ReceiverOptions,
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
        self._server: grpc.aio.Server | None = None
        self._health: health.aio.HealthServicer | None = None
        self._bound: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        if self._bound is None:
            raise RuntimeError(f"{self.name} is not listening")
        return self._bound

    async def start(self) -> None:
        """Listen."""
        credentials = server_credentials(self._options.tls) if self._options.tls else None
        await self._admission.start()
        try:
            await self._listen(credentials)
        except BaseException:
            await self._admission.end()
            raise

    async def _listen(self, credentials: grpc.ServerCredentials | None) -> None:
        server = grpc.aio.server(options=server_options(self._options))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((_Exports(self._admission),))
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        where = f"{host}:{self._options.port}"
        try:
            if credentials is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise InvalidConfig(
                f"{self.name} cannot listen on {where}: is the address free, and of this machine?"
            ) from error
        await server.start()
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        self._bound = (self._options.host, bound)
        logger.info("%s listens on %s:%d", self.name, *self._bound)

    async def stop(self, deadline: float) -> None:
        """Take no more, answer what was received, end."""
        server, self._server = self._server, None
        if server is None:
            return
        self._admission.is_stopping = True
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        # New calls are answered until everything else is done: the library would cancel them.
        await self._admission.drain(deadline)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        # Those who watch our health would hold it up for as long as they are given.
        await server.stop(min(_LAST_ANSWERS, left))
        await self._admission.end()


class _Exports(grpc.GenericRpcHandler):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - it has no name of its own
        """The handler of a call. One who may not send gets one that does not read the message."""
        signal = _METHODS.get(details.method)
        if signal is None:
            return None
        headers = _lookup(details.invocation_metadata)
        try:
            key_id = self._admission.screen(headers)
        except Exception as error:  # noqa: BLE001 - every one gets an answer
            refusal = self._admission.refusal(error)
            return grpc.stream_unary_rpc_method_handler(self._refusing(refusal))

        async def export(request: bytes, context: Context) -> bytes:
            try:
                facts = self._admission.context(_peer(context.peer()), key_id, headers)
                taken = await self._submit(signal, request, facts)
            except Refusal as refusal:
                await self._refuse(refusal, context)
                raise  # never reached: a refusal ends the call
            return partial_success(taken.rejected, taken.message)

        return grpc.unary_unary_rpc_method_handler(export)

    async def _submit(self, signal: Signal, request: bytes, facts: Mapping[str, str]) -> Taken:
        self._admission.hold(len(request))
        try:
            return await self._admission.submit(signal, request, facts)
        finally:
            self._admission.let_go(len(request))

    def _refusing(self, refusal: Refusal) -> Callable[[object, Context], Awaitable[None]]:
        async def refuse(_: object, context: Context) -> None:
            await self._refuse(refusal, context)

        return refuse

    async def _refuse(self, refusal: Refusal, context: Context) -> None:
        """RetryInfo belongs into the details; the Python SDK looks for it in a place of its own."""
        self._admission.refused(refusal)
        trailers = [("grpc-status-details-bin", status(refusal))]
        if refusal.retry_after is not None:
            trailers.append(("google.rpc.retryinfo-bin", retry_info(refusal.retry_after)))
        await context.abort(
            _CODES[refusal.reason.grpc_code], refusal.message, trailing_metadata=tuple(trailers)
        )


def server_options(options: ReceiverOptions) -> list[tuple[str, int]]:
    """What the library is told about limits."""
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", options.max_request_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        # More than may wait: whoever comes too much is told so, instead of waiting for a stream.
        ("grpc.max_concurrent_streams", 2 * options.max_waiting_requests + _SPARE_STREAMS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
    ]


def _lookup(metadata: Any) -> Headers:  # noqa: ANN401 - grpcio has no types
    """Metadata by name, the first of each; names are in lower case already."""
    values: dict[str, str] = {}

    def header(name: str) -> str | None:
        if not values and metadata:
            for key, value in metadata:
                text = value if isinstance(value, str) else value.decode("latin-1")
                values.setdefault(key, text)
        return values.get(name)

    return header


def _peer(peer: str) -> str:
    """``127.0.0.1:1234`` from ``ipv4:127.0.0.1:1234``, and the same for the sixth version."""
    with contextlib.suppress(ValueError):
        peer = urllib.parse.unquote(peer)
    return peer.partition(":")[2] if peer.startswith(("ipv4:", "ipv6:")) else peer
