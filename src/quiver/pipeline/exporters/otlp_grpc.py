"""OTLP over gRPC, to another server.

Requests go out as the bytes that came in, one call each. The requests of an item go out at the same
time, as far as ``max_in_flight`` allows; the item is delivered when all of them are. When some are
not, it is refused as a whole, so those that were taken are sent again with it.

A connection that is lost is made again at the latest after five seconds, however long the other
side was away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import grpc.aio

from quiver.bundle import Signal
from quiver.errors import DeliveryError, InvalidConfig, TryLater
from quiver.metrics import Metrics
from quiver.pipeline.exporters.answers import MAX_ANSWER_BYTES, grpc_refusal, rejected
from quiver.pipeline.exporters.as_otlp import otlp_requests
from quiver.pipeline.exporters.sending import Outcomes, checked_headers, send_all
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import ClientTlsOptions, OtlpExporterOptions

_METHODS: Final[Mapping[Signal, str]] = MappingProxyType(
    {
        Signal.TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        Signal.LOGS: "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
        Signal.METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    }
)
_COMPRESSIONS: Final = MappingProxyType(
    {
        "none": grpc.Compression.NoCompression,
        "gzip": grpc.Compression.Gzip,
        "deflate": grpc.Compression.Deflate,
    }
)
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Servers allow a ping in five minutes. It also makes the system give a connection up that does
    # not acknowledge for 20 seconds, instead of a quarter of an hour.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a channel goes."""

    address: str
    is_secure: bool


def grpc_target(endpoint: str, tls: ClientTlsOptions | None) -> Target:
    """``http://host:port`` without TLS, ``https://`` with it; ``host:port`` as ``tls`` is there."""
    if "://" not in endpoint:
        endpoint = f"{'https' if tls else 'http'}://{endpoint}"
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        raise InvalidConfig(
            f"grpc_endpoint is {endpoint!r}; it must be http://host:port or https://host:port"
        )
    if tls and parts.scheme == "http":
        raise InvalidConfig(f"grpc_endpoint is {endpoint!r}, but tls is there: write https://")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Target(f"{host}:{port or 4317}", parts.scheme == "https")


def open_channel(
    endpoint: str, tls: ClientTlsOptions | None, compression: str, extra: Sequence[Any] = ()
) -> grpc.aio.Channel:
    """A channel as exporters have it. Reads the files of ``tls``."""
    if compression not in _COMPRESSIONS:
        raise InvalidConfig(
            f"compression_method is {compression!r}; over gRPC it can be {', '.join(_COMPRESSIONS)}"
        )
    target = grpc_target(endpoint, tls)
    options = [*_CHANNEL_OPTIONS, *extra]
    chosen = _COMPRESSIONS[compression]
    if not target.is_secure:
        return grpc.aio.insecure_channel(target.address, options, chosen)
    tls = tls or ClientTlsOptions()
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    try:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.ca_file.read_bytes() if tls.ca_file else None,
            private_key=tls.key_file.read_bytes() if tls.key_file else None,
            certificate_chain=tls.cert_file.read_bytes() if tls.cert_file else None,
        )
    except OSError as error:
        raise InvalidConfig(f"a file of tls cannot be read: {error}") from error
    return grpc.aio.secure_channel(target.address, credentials, options, chosen)


class OtlpGrpcExporter:
    """Sends items to an OTLP server."""

    def __init__(
        self, name: str, options: OtlpExporterOptions, *, metrics: Metrics | None = None
    ) -> None:
        if options.grpc_endpoint is None:
            raise InvalidConfig(f"{name}: there is no grpc_endpoint")
        grpc_target(options.grpc_endpoint, options.tls)
        if options.compression_method not in _COMPRESSIONS:
            raise InvalidConfig(
                f"{name}: compression_method is {options.compression_method!r}; over gRPC it can "
                f"be {', '.join(_COMPRESSIONS)}"
            )
        self.name = name
        self._options = options
        self._endpoint = options.grpc_endpoint
        self._metadata = tuple(checked_headers(name, options.headers).items())
        self._outcomes = Outcomes(name, metrics or Metrics())
        self._places = asyncio.Semaphore(options.max_in_flight)
        self._channel: grpc.aio.Channel | None = None
        self._calls: Mapping[Signal, Any] = {}

    async def start(self) -> None:
        """Open the channel; it connects with the first call."""
        options = self._options
        channel = open_channel(self._endpoint, options.tls, options.compression_method)
        self._calls = {signal: channel.unary_unary(path) for signal, path in _METHODS.items()}
        self._channel = channel

    async def take(self, item: Item) -> None:
        """Return when the server has taken all requests of the item."""
        requests = await otlp_requests(item)
        await send_all(item, requests, self._places, self._send, self._outcomes)

    async def _send(self, signal: Signal, request: bytes) -> None:
        if self._channel is None:
            raise TryLater(f"{self.name} is not running")
        try:
            answer = await self._calls[signal](
                request, timeout=self._options.timeout, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _refusal(error, self._endpoint) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise TryLater(f"{self._endpoint}: the call was cut short") from None
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            raise TryLater(f"{self.name} is not running") from error
        self._outcomes.rejected(signal, rejected(signal, answer))

    async def stop(self, deadline: float) -> None:
        """Let calls end until the deadline, then cut them short."""
        channel, self._channel = self._channel, None
        if channel is not None:
            grace = deadline - asyncio.get_running_loop().time()
            await channel.close(max(0.0, grace))


def _refusal(error: grpc.aio.AioRpcError, where: str) -> DeliveryError:
    trailers = [(str(key), value) for key, value in error.trailing_metadata() or ()]
    return grpc_refusal(error.code(), error.details(), trailers, where)
