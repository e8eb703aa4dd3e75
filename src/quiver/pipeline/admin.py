"""The admin port: ``/livez``, ``/readyz`` and ``/metrics``, by HTTP.

============  ====================================================================================
``/livez``    200 as long as the process can answer
``/readyz``   200 when everything listens and every store is open; 503 with the reason while
              starting or stopping
``/metrics``  the figures, as OpenMetrics
============  ====================================================================================

One request a connection, small and soon: whoever takes longer, or sends more, is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from quiver.errors import InvalidConfig
from quiver.openmetrics import CONTENT_TYPE, Figures, render
from quiver.pipeline.settings.options import AdminOptions

logger = logging.getLogger(__name__)

_MAX_HEAD: Final = 8 * 1024
_MAX_CONNECTIONS: Final = 64
_TIMEOUT: Final = 5.0
_TEXT: Final = "text/plain; charset=utf-8"
_STATUS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Observed(Protocol):
    """What the admin port tells about."""

    def why_not_ready(self) -> str | None:
        """None when it is ready."""
        ...

    async def figures(self) -> Figures:
        """As they are now."""
        ...


class AdminServer:
    """Answers between ``start`` and ``stop``."""

    def __init__(self, options: AdminOptions, observed: Observed) -> None:
        host, colon, port = options.listening_addr.rpartition(":")
        if not colon or not port.isdecimal():
            raise InvalidConfig(
                f"admin.listening_addr is {options.listening_addr!r}; it must be host:port, as "
                "127.0.0.1:8888"
            )
        self._host, self._port = host.strip("[]"), int(port)
        self._observed = observed
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._pages: dict[str, Callable[[], Awaitable[tuple[int, str, str]]]] = {
            "/livez": self._live,
            "/readyz": self._ready,
            "/metrics": self._metrics,
        }

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        if self._server is None:
            raise RuntimeError("the admin port is not open")
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Listen."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=_MAX_HEAD
            )
        except OSError as error:
            raise InvalidConfig(
                f"admin cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "choose another admin.listening_addr"
            ) from error
        logger.info("admin listens on %s:%d", *self.address)

    async def stop(self) -> None:
        """Answer nobody any more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._talks) >= _MAX_CONNECTIONS:
            writer.close()
            return
        talk = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._talks.add(talk)
        talk.add_done_callback(self._talks.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_TIMEOUT):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(400, _TEXT, "the request is too long\n")
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):  # noqa: PLR2004 - of HTTP
            return _response(400, _TEXT, "this is not HTTP\n")
        method, target, _ = words
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return _response(404, _TEXT, f"there is {', '.join(self._pages)}\n")
        if method not in {"GET", "HEAD"}:
            return _response(405, _TEXT, "only GET is possible here\n", "allow: GET, HEAD\r\n")
        try:
            status, kind, body = await page()
        except Exception:
            logger.exception("%s failed", target)
            status, kind, body = 500, _TEXT, "something went wrong here, see our log\n"
        answer = _response(status, kind, body)
        return answer if method == "GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    async def _live(self) -> tuple[int, str, str]:
        return 200, _TEXT, "alive\n"

    async def _ready(self) -> tuple[int, str, str]:
        reason = self._observed.why_not_ready()
        return (200, _TEXT, "ready\n") if reason is None else (503, _TEXT, f"{reason}\n")

    async def _metrics(self) -> tuple[int, str, str]:
        return 200, CONTENT_TYPE, render(await self._observed.figures())


def _response(status: int, kind: str, body: str, more: str = "") -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status} {_STATUS[status]}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(data)}\r\ncache-control: no-store\r\nconnection: close\r\n{more}\r\n"
    )
    return head.encode() + data
