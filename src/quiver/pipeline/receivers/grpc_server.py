"""What receivers over gRPC have in common: the server, its limits, its health service."""

from __future__ import annotations

import contextlib
import logging
import urllib.parse
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import (  # type: ignore[import-untyped]
    health,
    health_pb2,
    health_pb2_grpc,
)

from quiver.errors import InvalidConfig
from quiver.pipeline.receivers.admission import Headers
from quiver.pipeline.security.tls import server_credentials
from quiver.pipeline.settings.options import ReceiverOptions

logger = logging.getLogger(__name__)

CODES: Final[Mapping[int, grpc.StatusCode]] = MappingProxyType(
    {code.value[0]: code for code in grpc.StatusCode}
)
LAST_ANSWERS: Final = 0.25
"""Seconds for answers that are on their way when everything else is done."""
_HANDSHAKE_TIMEOUT_MS: Final = 10_000
_IDLE_MS: Final = 600_000
_MIN_PING_MS: Final = 10_000
_KEEPALIVE_MS: Final = 60_000
_KEEPALIVE_TIMEOUT_MS: Final = 20_000
_MAX_METADATA_BYTES: Final = 64 * 1024
_SPARE_STREAMS: Final = 16


class GrpcServer:
    """A server that listens between ``start`` and the end of its ``server``."""

    def __init__(self, name: str, options: ReceiverOptions) -> None:
        self.name = name
        self._options = options
        self.server: grpc.aio.Server | None = None
        self._health: health.aio.HealthServicer | None = None
        self._bound: tuple[str, int] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        if self._bound is None:
            raise RuntimeError(f"{self.name} is not listening")
        return self._bound

    async def start(
        self, handler: grpc.GenericRpcHandler, services: Iterable[str], max_streams: int
    ) -> None:
        """Listen. Beyond ``max_streams`` there is room to be refused in, and for health."""
        options = self._options
        credentials = server_credentials(options.tls) if options.tls else None
        server = grpc.aio.server(options=server_options(options, max_streams))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_generic_rpc_handlers((handler,))
        host = f"[{options.host}]" if ":" in options.host else options.host
        where = f"{host}:{options.port}"
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
        for service in ("", *services):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self.server = server
        self._bound = (options.host, bound)
        logger.info("%s listens on %s:%d", self.name, *self._bound)

    async def begin_stopping(self) -> grpc.aio.Server | None:
        """Tell those who watch our health; the server, once, for who stops it."""
        server, self.server = self.server, None
        if server is not None and self._health is not None:
            await self._health.enter_graceful_shutdown()
        return server


def server_options(options: ReceiverOptions, max_streams: int) -> list[tuple[str, int]]:
    """What the library is told about limits."""
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", options.max_request_bytes),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", options.max_connections),
        ("grpc.max_concurrent_streams", max_streams + _SPARE_STREAMS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
    ]


def lookup(metadata: Any) -> Headers:  # noqa: ANN401 - its types know no bytes
    """Metadata by name, the first of each; names are in lower case already."""
    values: dict[str, str] = {}

    def header(name: str) -> str | None:
        if not values and metadata:
            for key, value in metadata:
                text = value if isinstance(value, str) else value.decode("latin-1")
                values.setdefault(key, text)
        return values.get(name)

    return header


def peer_address(peer: str) -> str:
    """``127.0.0.1:1234`` from ``ipv4:127.0.0.1:1234``, and the same for the sixth version."""
    with contextlib.suppress(ValueError):
        peer = urllib.parse.unquote(peer)
    return peer.partition(":")[2] if peer.startswith(("ipv4:", "ipv6:")) else peer
