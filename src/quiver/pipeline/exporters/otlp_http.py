"""OTLP over HTTP, to another server: protobuf, as the bytes that came in.

The endpoint is the part before ``/v1/traces``, ``/v1/logs`` and ``/v1/metrics``; it may have a path
of its own. Redirections are not followed. As over gRPC, an item is delivered when all of its
requests are.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import httpx
import zstandard
from isal import igzip

from quiver.bundle import Signal
from quiver.errors import InvalidConfig, TryLater
from quiver.metrics import Metrics
from quiver.pipeline.exporters.answers import MAX_ANSWER_BYTES, http_refusal, rejected
from quiver.pipeline.exporters.as_otlp import otlp_requests
from quiver.pipeline.exporters.sending import Outcomes, checked_headers, send_all
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import ClientTlsOptions, OtlpExporterOptions

_AT_ONCE: Final = 32 * 1024
"""Bytes that are compressed without a thread: less than a millisecond."""
_ZLIB_LEVEL: Final = 1
_PATHS: Final[Mapping[Signal, str]] = MappingProxyType(
    {Signal.TRACES: "/v1/traces", Signal.LOGS: "/v1/logs", Signal.METRICS: "/v1/metrics"}
)
_SIGNAL_PATH: Final = re.compile(r"/v1/(traces|logs|metrics)$")
_COMPRESSIONS: Final[Mapping[str, Callable[[bytes], bytes] | None]] = MappingProxyType(
    {
        "none": None,
        "gzip": igzip.compress,
        "deflate": lambda data: zlib.compress(data, _ZLIB_LEVEL),
        "zstd": zstandard.compress,
    }
)
_IDLE: Final = 30.0
"""Seconds that a connection is kept without a request."""


def http_urls(endpoint: str) -> dict[Signal, str]:
    """Where each signal goes."""
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL as error:
        raise InvalidConfig(f"http_endpoint is {endpoint!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.query or url.fragment:
        raise InvalidConfig(
            f"http_endpoint is {endpoint!r}; it must be http://host:port or https://host:port, "
            "with a path or without"
        )
    base = _SIGNAL_PATH.sub("", url.path.rstrip("/"))
    return {signal: str(url.copy_with(path=base + path)) for signal, path in _PATHS.items()}


def tls_context(tls: ClientTlsOptions | None) -> ssl.SSLContext:
    """How the server is checked, and what it is shown."""
    tls = tls or ClientTlsOptions()
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:  # also of what is in the files
        files = ", ".join(str(file) for file in (tls.ca_file, tls.cert_file, tls.key_file) if file)
        raise InvalidConfig(f"the files of tls cannot be used ({files}): {error}") from error
    return context


class OtlpHttpExporter:
    """Sends items to an OTLP server."""

    def __init__(
        self, name: str, options: OtlpExporterOptions, *, metrics: Metrics | None = None
    ) -> None:
        if options.http_endpoint is None:
            raise InvalidConfig(f"{name}: there is no http_endpoint")
        if options.compression_method not in _COMPRESSIONS:
            raise InvalidConfig(
                f"{name}: compression_method is {options.compression_method!r}; over HTTP it can "
                f"be {', '.join(_COMPRESSIONS)}"
            )
        self.name = name
        self._options = options
        self._urls = http_urls(options.http_endpoint)
        self._compress = _COMPRESSIONS[options.compression_method]
        self._headers = {
            "user-agent": "quiver",
            **checked_headers(name, options.headers),
            "content-type": "application/x-protobuf",
            "accept-encoding": "identity",  # so that no answer can swell
        }
        if self._compress:
            self._headers["content-encoding"] = options.compression_method
        server_name = options.tls.server_name if options.tls else None
        self._extensions = {"sni_hostname": server_name} if server_name else {}
        self._outcomes = Outcomes(name, metrics or Metrics())
        self._places = asyncio.Semaphore(options.max_in_flight)
        self._context: ssl.SSLContext | None = None
        self._idle: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []

    async def start(self) -> None:
        """Read the certificates; the first requests connect."""
        is_secure = next(iter(self._urls.values())).startswith("https:")
        # Without TLS the context is not used, and an empty one is made at once.
        self._context = (
            await asyncio.to_thread(tls_context, self._options.tls)
            if is_secure
            else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    def _connect(self, context: ssl.SSLContext) -> httpx.AsyncClient:
        """A client with one connection: a pool looks at all of its connections each time."""
        client = httpx.AsyncClient(
            verify=context,
            timeout=self._options.timeout,
            limits=httpx.Limits(max_connections=1, keepalive_expiry=_IDLE),
            follow_redirects=False,
        )
        self._clients.append(client)
        return client

    async def take(self, item: Item) -> None:
        """Return when the server has taken all requests of the item."""
        requests = await otlp_requests(item)
        await send_all(item, requests, self._places, self._send, self._outcomes)

    async def _send(self, signal: Signal, request: bytes) -> None:
        url = self._urls[signal]
        body = request
        if self._compress and len(request) <= _AT_ONCE:
            body = self._compress(request)
        elif self._compress:
            body = await asyncio.to_thread(self._compress, request)
        if self._context is None:
            raise TryLater(f"{self.name} is not running")
        client = self._idle.pop() if self._idle else self._connect(self._context)
        try:
            async with asyncio.timeout(self._options.timeout):
                status, headers, answer = await self._post(client, url, body)
        except TimeoutError as error:
            raise TryLater(f"{url}: no answer in {self._options.timeout:g} seconds") from error
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise TryLater(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        except RuntimeError as error:  # the client was closed meanwhile
            if not client.is_closed:
                raise
            raise TryLater(f"{self.name} is not running") from error
        finally:
            self._idle.append(client)
        refusal = http_refusal(status, headers, answer, url)
        if refusal is not None:
            raise refusal
        content_type = headers.get("content-type", "")
        self._outcomes.rejected(signal, rejected(signal, answer, content_type))

    async def _post(
        self, client: httpx.AsyncClient, url: str, body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and the first bytes of an answer."""
        async with client.stream(
            "POST", url, content=body, headers=self._headers, extensions=self._extensions
        ) as response:
            answer = bytearray()
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    break
            return response.status_code, response.headers, bytes(answer[:MAX_ANSWER_BYTES])

    async def stop(self, deadline: float) -> None:
        """Let requests end until the deadline, then close the connections."""
        self._context = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._outcomes.is_quiet()
        for client in self._clients:
            await client.aclose()
        self._clients.clear()
        self._idle.clear()
