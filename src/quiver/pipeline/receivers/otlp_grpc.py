"""OTLP over gRPC: the three Export methods, and the health service.

Requests are handled as bytes; nothing is parsed but the way down to the items. Whoever may not send
is refused before the message is received. Compression is that of the library: gzip and deflate (see
the decision on zstd in ``docs/adr``). Its limit is ``max_request_bytes``, before and after
decompression.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio

from quiver.bundle import Signal
from quiver.metrics import Metrics
from quiver.pipeline.node import Port
from quiver.pipeline.receivers.admission import Admission, Taken
from quiver.pipeline.receivers.answers import Refusal, partial_success, retry_info, status
from quiver.pipeline.receivers.grpc_server import (
    CODES,
    LAST_ANSWERS,
    GrpcServer,
    lookup,
    peer_address,
)
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
        self._listener = GrpcServer(name, options)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        return self._listener.address

    async def start(self) -> None:
        """Listen."""
        await self._admission.start()
        try:
            # More than may wait: whoever comes too much is told so, instead of waiting.
            streams = 2 * self._options.max_waiting_requests
            await self._listener.start(_Exports(self._admission), SERVICES, streams)
        except BaseException:
            await self._admission.end()
            raise

    async def stop(self, deadline: float) -> None:
        """Take no more, answer what was received, end."""
        self._admission.is_stopping = True
        server = await self._listener.begin_stopping()
        if server is None:
            return
        # New calls are answered until everything else is done: the library would cancel them.
        await self._admission.drain(deadline)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        # Those who watch our health would hold it up for as long as they are given.
        await server.stop(min(LAST_ANSWERS, left))
        await self._admission.end()


class _Exports(grpc.GenericRpcHandler):
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - it has no name of its own
        """The handler of a call. One who may not send gets one that does not read the message."""
        signal = _METHODS.get(details.method)
        if signal is None:
            return None
        headers = lookup(details.invocation_metadata)
        try:
            key_id = self._admission.screen(headers)
        except Exception as error:  # noqa: BLE001 - every one gets an answer
            refusal = self._admission.refusal(error)
            return grpc.stream_unary_rpc_method_handler(self._refusing(refusal))

        async def export(request: bytes, context: Context) -> bytes:
            try:
                facts = self._admission.context(peer_address(context.peer()), key_id, headers)
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
            CODES[refusal.reason.grpc_code], refusal.message, trailing_metadata=tuple(trailers)
        )
