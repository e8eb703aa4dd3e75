"""One HTTP/1.1 connection: requests in, one after the other, answers out in the same order.

What a connection may cost is bounded everywhere: headers by number and bytes, a body by the limit
of its kind, the time from the first byte of a request to its last, the time between requests, and
the answers that a client does not fetch. While a request is worked on, at most one piece of what
follows is read.

A request that is refused by its headers is read to its end, without keeping it, so that the client
sees the answer and can go on with the same connection. If its body is too large for that, the
answer goes out at once, and the connection is closed after a moment (closed at once, the client
would lose the answer with the connection).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import httptools

from quiver.pipeline.receivers.answers import Reason, Refusal

logger = logging.getLogger(__name__)

MAX_HEADERS: Final = 200
_LINGER: Final = 2.0
"""Seconds that a client has to read its answer before the connection is closed."""
_SMALL_PIECE: Final = 4096
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(slots=True, eq=False)
class HttpRequest:
    """A request, as far as it was received."""

    begun: float
    method: str = ""
    target: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes | bytearray] = field(default_factory=list)
    limit: int = 0
    """Bytes that the body may have."""
    received: int = 0
    held: int = 0
    """Bytes that the hub was told about."""
    plan: object = None
    """What the hub made of the headers."""
    refusal: Refusal | None = None
    keep_alive: bool = False
    is_old: bool = False
    """HTTP/1.0."""
    header_bytes: int = 0
    has_headers: bool = False

    def append(self, data: bytes) -> None:
        """Keep a piece of the body. Small ones are put together: each costs more than its bytes."""
        if len(data) >= _SMALL_PIECE:
            self.pieces.append(data)
        elif self.pieces and isinstance(self.pieces[-1], bytearray):
            self.pieces[-1] += data
        else:
            self.pieces.append(bytearray(data) if self.pieces else data)

    def take_body(self) -> bytes:
        """The body, which is not kept here any longer."""
        pieces, self.pieces = self.pieces, []
        if len(pieces) == 1:
            return bytes(pieces[0])
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status line, headers and body; the connection adds what concerns itself."""

    head: bytes
    """Each line with its end, without the empty one."""
    body: bytes = b""


class Hub(Protocol):
    """What the connections of a receiver share."""

    max_header_bytes: int
    idle_timeout: float
    request_timeout: float
    is_stopping: bool

    def joined(self, connection: HttpConnection) -> bool:
        """A client connected; whether it may stay."""

    def left(self, connection: HttpConnection) -> None:
        """The connection is gone."""

    def became_idle(self, connection: HttpConnection) -> None:
        """It waits for the headers of a request."""

    def became_busy(self, connection: HttpConnection) -> None:
        """It has them."""

    def screen(self, request: HttpRequest) -> None:
        """Look at the headers: set ``plan`` and ``limit``; ``Refusal`` if it is not wanted."""

    def hold(self, request: HttpRequest, size: int) -> None:
        """Count bytes that are kept for it; ``Refusal`` when there are too many."""

    def let_go(self, request: HttpRequest) -> None:
        """They are not kept any more."""

    async def serve(self, request: HttpRequest, peer: str) -> HttpAnswer:
        """Work on a complete request. Does not raise."""

    def refuse(self, request: HttpRequest, refusal: Refusal) -> HttpAnswer:
        """The answer to one that is not taken."""


class HttpConnection(asyncio.Protocol):
    """Made by the server for each client."""

    def __init__(self, hub: Hub, loop: asyncio.AbstractEventLoop) -> None:
        self._hub = hub
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._is_tls = False
        self._peer = ""
        self._current: HttpRequest | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._work: asyncio.Task[None] | None = None
        self._is_deaf = False
        """What comes in is thrown away: the connection will be closed."""
        self._is_closing = False
        self._reads = True
        self._writes = True
        self._unparsed = 0
        """Bytes that were fed since the last headers were complete."""
        self.deadline: float | None = None
        """When it is given up, by the clock of the loop."""

    # --- the transport --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._is_tls = transport.get_extra_info("ssl_object") is not None
        self._peer = _peer(transport.get_extra_info("peername"))
        if not self._hub.joined(self):
            refusal = Refusal(Reason.UNAVAILABLE, "too many connections: try again later", 1.0)
            self._refuse_now(HttpRequest(self._loop.time()), refusal)
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as the library calls it
        self._transport = None
        self._is_deaf = self._is_closing = True
        for request in (*self._waiting, self._current):
            if request is not None:
                self._hub.let_go(request)
        self._waiting.clear()
        self._current = None
        self._hub.left(self)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True  # nothing else is spoken here; what was asked before is answered
            self._close_after_last()
        except httptools.HttpParserCallbackError as error:
            logger.exception("a connection failed")
            self._refuse_now(self._current, self._defect(error))
        except httptools.HttpParserError as error:
            refusal = Refusal(Reason.MALFORMED, f"it is not HTTP/1.1: {error}")
            self._refuse_now(self._current, refusal)
        if self._reads and self._is_busy and not self._is_deaf and self._transport is not None:
            self._reads = False
            self._transport.pause_reading()

    def _feed(self, data: bytes) -> None:
        """Headers that do not end are stopped before the parser has them all."""
        rest = memoryview(data)
        while rest and not self._is_deaf:
            if self._current is not None and self._current.has_headers:
                self._parser.feed_data(rest)
                return
            room = self._hub.max_header_bytes - self._unparsed
            if room <= 0:
                refusal = Refusal(Reason.HEADERS_TOO_LARGE, "the headers are too large: send fewer")
                self._refuse_now(self._current, refusal)
                return
            first, rest = rest[:room], rest[room:]
            self._unparsed += len(first)
            self._parser.feed_data(first)

    def eof_received(self) -> bool:
        """Whether the other direction stays open: there may be answers to send."""
        if self._is_deaf or not self._is_busy or self._is_tls:
            return False
        self._is_deaf = True
        self._close_after_last()
        return True

    def pause_writing(self) -> None:
        self._writes = False
        self.deadline = self._loop.time() + self._hub.request_timeout

    def resume_writing(self) -> None:
        self._writes = True
        self.deadline = None
        self._go_on()

    # --- the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_deaf:
            return
        self._current = HttpRequest(self._loop.time())
        if not self._is_busy and self._writes:
            self.deadline = self._current.begun + self._hub.request_timeout

    def on_url(self, url: bytes) -> None:
        request = self._current
        if self._is_deaf or request is None:
            return
        request.target += url
        self._count_header(request, len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._current
        if self._is_deaf or request is None:
            return
        self._count_header(request, len(name) + len(value))
        if request.has_headers or request.refusal is not None:
            return  # behind a chunked body: of no use here
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        before = request.headers.get(key)
        request.headers[key] = text if before is None else f"{before}, {text}"
        if len(request.headers) > MAX_HEADERS:
            request.refusal = Refusal(Reason.HEADERS_TOO_LARGE, "too many headers: send fewer")

    def _count_header(self, request: HttpRequest, size: int) -> None:
        request.header_bytes += size
        if request.header_bytes > self._hub.max_header_bytes and request.refusal is None:
            request.refusal = Refusal(
                Reason.HEADERS_TOO_LARGE, "the headers are too large: send fewer"
            )

    def on_headers_complete(self) -> None:
        request = self._current
        if self._is_deaf or request is None:
            return
        request.has_headers = True
        self._unparsed = 0
        self._hub.became_busy(self)
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.is_old = self._parser.get_http_version() == "1.0"
        if request.refusal is None:
            try:
                self._hub.screen(request)
            except Refusal as refusal:
                request.refusal = refusal
        length = int(request.headers.get("content-length") or 0)
        expects = request.headers.get("expect", "").lower() == "100-continue"
        if length > request.limit and request.refusal is None:
            self._refuse_now(request, _too_large(request.limit))
        elif request.refusal is not None and (expects or length > request.limit):
            self._refuse_now(request, request.refusal)
        elif expects and not self._is_busy and self._transport is not None:
            self._transport.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        request = self._current
        if self._is_deaf or request is None:
            return
        request.received += len(data)
        if request.received > request.limit:
            self._refuse_now(request, request.refusal or _too_large(request.limit))
        elif request.refusal is None:
            try:
                self._hub.hold(request, len(data))
            except Refusal as refusal:
                request.refusal = refusal
                self._forget_body(request)
                return
            request.append(data)

    def on_message_complete(self) -> None:
        request, self._current = self._current, None
        if self._is_deaf or request is None:
            return
        if self._writes:
            self.deadline = None
        self._waiting.append(request)
        self._go_on()

    # --- work and answers -----------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._work is not None or bool(self._waiting)

    @property
    def slow_request(self) -> HttpRequest | None:
        """The request whose body is being received, if there is one and nothing else to do."""
        request = self._current
        if self._is_deaf or self._is_busy or request is None or not request.has_headers:
            return None
        return request

    def _go_on(self) -> None:
        """Begin with the next request, if there is one and nothing stands in the way."""
        while self._waiting and self._work is None and self._writes and not self._is_closing:
            request = self._waiting.popleft()
            if request.refusal is None:
                self._work = self._loop.create_task(self._serve(request))
            else:
                self._answer(request, self._hub.refuse(request, request.refusal))
        if not self._is_busy and not self._is_closing:
            self._listen_again()

    async def _serve(self, request: HttpRequest) -> None:
        answer = await self._hub.serve(request, self._peer)
        self._work = None
        if self._transport is not None:
            self._answer(request, answer)
            self._go_on()

    def _answer(self, request: HttpRequest, answer: HttpAnswer) -> None:
        if self._transport is None:
            return
        closes = not request.keep_alive or self._hub.is_stopping
        connection = b""
        if closes:
            connection = b"connection: close\r\n"
        elif request.is_old:
            connection = b"connection: keep-alive\r\n"
        length = b"content-length: %d\r\n\r\n" % len(answer.body)
        body = b"" if request.method == "HEAD" else answer.body
        self._transport.write(answer.head + connection + length + body)
        if closes:
            self._end()

    def _end(self) -> None:
        """No more answers: close, or give the client a moment to stop sending."""
        self._is_closing = True
        if self._transport is None:
            return
        if not self._is_deaf:
            self.deadline = self._loop.time() + self._hub.request_timeout
            self._transport.close()
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._loop.time() + _LINGER
        self._read()

    def _listen_again(self) -> None:
        if self._is_deaf:
            self._end()
            return
        if not self._writes:
            return  # until the client has fetched its answers
        if self._current is None:
            self._wait_for_request()
        else:
            self.deadline = self._current.begun + self._hub.request_timeout
            if not self._current.has_headers:
                self._hub.became_idle(self)
        self._read()

    def _read(self) -> None:
        if not self._reads and self._transport is not None:
            self._reads = True
            self._transport.resume_reading()

    def _wait_for_request(self) -> None:
        if self._hub.is_stopping and self._transport is not None:
            self._is_closing = True
            self._transport.close()
            return
        self.deadline = self._loop.time() + self._hub.idle_timeout
        self._hub.became_idle(self)

    def _refuse_now(self, request: HttpRequest | None, refusal: Refusal) -> None:
        """Answer without waiting for the rest of the request, and close."""
        request = request or HttpRequest(self._loop.time())
        self._forget_body(request)
        request.refusal = refusal
        request.keep_alive = False
        self._is_deaf = True
        self._current = None
        if self._writes:
            self.deadline = None
        self._waiting.append(request)
        self._go_on()

    def _close_after_last(self) -> None:
        """Somebody is still waiting for an answer; after it the connection is closed."""
        if self._current is not None:
            self._forget_body(self._current)
            self._current = None
        if not self._is_busy:
            self._end()

    def _forget_body(self, request: HttpRequest) -> None:
        request.pieces.clear()
        self._hub.let_go(request)

    def _defect(self, _: Exception) -> Refusal:
        return Refusal(Reason.UNAVAILABLE, "something went wrong here: try again later", 1.0)

    # --- from outside ---------------------------------------------------------------------------

    def give_up(self) -> None:
        """The deadline has passed."""
        request = self.slow_request
        if request is not None:
            refusal = Refusal(Reason.UNAVAILABLE, "the request came too slowly: try again", 1.0)
            self._refuse_now(request, refusal)
        elif self._transport is not None:
            self._is_closing = True
            # A client that does not fetch its answers would hold up a close for ever.
            self._transport.abort()

    def stop(self, deadline: float) -> None:
        """Close when nothing is to be answered any more; ``deadline`` is for those who send."""
        if self._transport is None:
            return
        if not self._is_busy and self._current is None and not self._is_deaf:
            self._is_closing = True
            self._transport.close()
        elif not self._is_busy:
            self.deadline = min(deadline, self.deadline or deadline)

    def abort(self) -> None:
        """Now."""
        if self._transport is not None:
            self._transport.abort()


def _too_large(limit: int) -> Refusal:
    return Refusal(Reason.TOO_LARGE, f"the body has more than {limit} bytes: send smaller batches")


def _peer(name: object) -> str:
    if not isinstance(name, tuple):
        return ""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
