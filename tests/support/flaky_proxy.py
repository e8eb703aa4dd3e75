"""An HTTP proxy that makes an object store behave badly, from a seed.

It sits in front of one server and passes on what it gets, except when it does not:

===============  ==================================================================
``Fate``         what becomes of a request
===============  ==================================================================
``PASS``         it is passed on, and so is the answer
``DELAY``        the same, after a while
``DROP``         the connection ends, nothing is passed on
``DROP_ANSWER``  it is passed on; then the connection ends, without the answer
``TWICE``        it is passed on twice; the second answer is given
``REFUSE``       it is answered with an error, and not passed on
``LIE``          it is passed on, and then answered with an error
===============  ==================================================================

Now and then the same happens to all requests for a second or two: that outlasts the attempts of the
client library, and shows its errors to those above it.

The errors are 429, 500 and 503; for writes also 409, and for conditional ones 412.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import urllib.parse
from collections import Counter
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Final, Self

HOST: Final = "127.0.0.1"
_LINE_LIMIT: Final = 2**20
_NO_BODY: Final = (204, 304)


class Fate(enum.StrEnum):
    """What becomes of a request; see the table above."""

    PASS = "pass"  # noqa: S105 - not a word to pass by
    DELAY = "delay"
    DROP = "drop"
    DROP_ANSWER = "drop_answer"
    TWICE = "twice"
    REFUSE = "refuse"
    LIE = "lie"


WEIGHTS: Final = {
    Fate.PASS: 66,
    Fate.DELAY: 10,
    Fate.DROP: 4,
    Fate.DROP_ANSWER: 5,
    Fate.TWICE: 5,
    Fate.REFUSE: 4,
    Fate.LIE: 6,
}

QUIET_SECONDS: Final = 4.0
"""Between two spells in which the same happens to all requests."""


@dataclass(slots=True)
class _Message:
    """A request or an answer, whole."""

    first: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def encode(self) -> bytes:
        lines = [self.first, *(b"%s: %s" % header for header in self.headers), b"", b""]
        return b"\r\n".join(lines) + self.body


class FlakyProxy:
    """A proxy in front of ``server`` (``http://host:port``). ``async with`` starts and ends it."""

    def __init__(self, server: str, random: Random) -> None:
        place = urllib.parse.urlsplit(server)
        self._host, self._port = str(place.hostname), int(place.port or 80)
        self._random = random
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._spell = Fate.PASS
        self._spell_ends = self._next_spell = 0.0
        self.calm = False
        """Pass everything on, as it should be."""
        self.fates: Counter[Fate] = Counter()

    @property
    def endpoint(self) -> str:
        """Its own address."""
        if self._server is None:
            raise RuntimeError("the proxy has not started")
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=_LINE_LIMIT)
        self._next_spell = asyncio.get_running_loop().time() + 1.0
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                answer = await self._answer(request)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (OSError, EOFError):
            pass  # one side went away, as a killed process does
        finally:
            writer.close()

    async def _answer(self, request: _Message) -> bytes | None:
        """What to say; None: hang up."""
        fate = Fate.PASS if self.calm else self._draw()
        self.fates[fate] += 1
        if fate is Fate.DROP:
            return None
        if fate is Fate.REFUSE:
            return self._error(request)
        if fate is Fate.DELAY:
            await asyncio.sleep(self._random.expovariate(5))
        if fate is Fate.TWICE:
            await self._forward(request)
        answer = await self._forward(request)
        if fate is Fate.DROP_ANSWER:
            return None
        return self._error(request) if fate is Fate.LIE else answer.encode()

    def _draw(self) -> Fate:
        now = asyncio.get_running_loop().time()
        if now >= self._next_spell:
            self._spell = self._random.choice([Fate.DROP, Fate.DROP_ANSWER, Fate.REFUSE, Fate.LIE])
            self._spell_ends = now + self._random.uniform(0.5, 2.0)
            self._next_spell = self._spell_ends + self._random.expovariate(1 / QUIET_SECONDS)
        if now < self._spell_ends:
            return self._spell
        return self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]

    def _error(self, request: _Message) -> bytes:
        statuses = [b"429 Too Many Requests", b"500 Internal Server Error", b"503 Slow Down"]
        if request.first.startswith(b"PUT "):
            statuses.append(b"409 Conflict")
            if request.header(b"if-match") or request.header(b"if-none-match"):
                statuses.append(b"412 Precondition Failed")
        status = self._random.choice(statuses)
        return b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status

    async def _forward(self, request: _Message) -> _Message:
        """One connection for each request: nothing of one can get into another."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LINE_LIMIT)
        try:
            writer.write(request.encode())
            await writer.drain()
            answer = await _read(reader, to=request.first)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if answer is None:
            raise EOFError("the server hung up")
        return answer


async def _read(reader: asyncio.StreamReader, to: bytes | None = None) -> _Message | None:
    """A request, or the answer ``to`` one; None at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head[:-4].split(b"\r\n")
    pairs = [line.partition(b":") for line in lines]
    message = _Message(first, [(key.strip(), value.strip()) for key, _, value in pairs], b"")
    if to is not None and (to.startswith(b"HEAD ") or int(first.split()[1]) in _NO_BODY):
        return message
    if message.header(b"transfer-encoding") is not None:
        message.body = await _read_chunks(reader)
        message.headers = [
            pair for pair in message.headers if pair[0].lower() != b"transfer-encoding"
        ]
        message.headers.append((b"content-length", b"%d" % len(message.body)))
    elif length := message.header(b"content-length"):
        message.body = await reader.readexactly(int(length))
    return message


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return b"".join(chunks)
