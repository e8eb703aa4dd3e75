"""A producer's side of the committer: ask it first, and do without it when it does not answer.

Appending is idempotent by location, so a request that got no answer is simply done again, here,
with compare-and-swap. Both may happen, in any order: whoever is second finds the location in the
manifest, or appends it once more under the same location, which the consumer drops.

A committer that failed is left alone for a while that doubles up to half a minute, then tried
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from quiver.buffer.appender import Appender, Clock, Pending
from quiver.buffer.committer_wire import MAX_FRAME, Append, Done, Refused, decode, read_frame
from quiver.config import QueueConfig
from quiver.errors import FormatError, InvalidConfig, QueueError
from quiver.metrics import Metrics

CONNECT_TIMEOUT: Final = 5.0
FIRST_REST: Final = 1.0
MAX_REST: Final = 30.0


class _NotDone(QueueError):
    """The committer did not do it, or did not say so."""


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6 address]:port``."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InvalidConfig(f"producer.committer is {address!r}; it must be host:port")
    return host, int(port)


class CommitterFirst:
    """Appends through a committer, or else directly."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        address: str,
        direct: Appender,
        config: QueueConfig,
        clock: Clock,
        random: Random,
        metrics: Metrics,
    ) -> None:
        self._address = address
        self._host, self._port = parse_address(address)
        self._direct = direct
        self._config = config
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._request_id = 0
        self._failures = 0
        self._rests_until = 0.0

    async def append(
        self, pending: Sequence[Pending], more: Callable[[], Sequence[Pending]] = tuple
    ) -> list[int]:
        """As ``Appender.append``."""
        self._direct.check_fresh(pending)
        loop = asyncio.get_running_loop()
        request = self._request(pending) if loop.time() >= self._rests_until else b""
        if len(request) > MAX_FRAME:
            self._direct.expect_others()
        elif request:
            try:
                sequences = await self._ask(request, pending)
            except (_NotDone, FormatError, OSError):  # a TimeoutError is an OSError
                self._metrics.count("buffer.committer_failures")
                self._failures += 1
                rest = min(MAX_REST, FIRST_REST * 2 ** min(self._failures - 1, 30))
                self._rests_until = loop.time() + rest * self._random.uniform(0.5, 1)
                self._direct.expect_others()
                self.hang_up()
            except BaseException:
                self.hang_up()  # an answer may be on its way, and must not meet another request
                raise
            else:
                self._failures = 0
                self._metrics.count("buffer.committer_appends")
                self._direct.expect_at_least(max(sequences, default=-1) + 1)
                return sequences
        return await self._direct.append(pending, more)

    async def close(self) -> None:
        """Hang up, and wait until that is done."""
        if self._connection is not None:
            _, writer = self._connection
            self.hang_up()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await writer.wait_closed()
            except OSError:
                pass  # it is gone either way

    def _request(self, pending: Sequence[Pending]) -> bytes:
        self._request_id += 1
        return Append(
            self._request_id,
            int(1000 * max(self._clock.since(one.uploaded) for one in pending)),
            int(1000 * self._config.attempt_timeout),
            self._config.manifest_path,
            tuple(one.entry for one in pending),
        ).encode()

    async def _ask(self, request: bytes, pending: Sequence[Pending]) -> list[int]:
        reader, writer = await self._connect()
        before = [one.shared for one in pending]
        for one in pending:
            one.shared = True
        async with asyncio.timeout(self._config.attempt_timeout):
            writer.write(request)
            await writer.drain()
            answer = await read_frame(reader, source=self._address, idle=None, whole=None)
        if answer is None:
            raise _NotDone(f"{self._address} hung up")
        return self._understand(answer, pending, before)

    def _understand(
        self, answer: bytes, pending: Sequence[Pending], before: Sequence[bool]
    ) -> list[int]:
        message = decode(answer, source=self._address)
        if isinstance(message, Refused):
            if not message.unclear:
                for one, shared in zip(pending, before, strict=True):
                    one.shared = shared
            raise _NotDone(message.reason)
        if not isinstance(message, Done) or message.request_id != self._request_id:
            raise _NotDone(f"{self._address} answered something else")
        if len(message.sequences) != len(pending):
            raise _NotDone(f"{self._address} answered for {len(message.sequences)} entries")
        return list(message.sequences)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._connection is not None:
            reader, writer = self._connection
            if not reader.at_eof() and not writer.is_closing():
                return self._connection
            self.hang_up()
        async with asyncio.timeout(min(CONNECT_TIMEOUT, self._config.attempt_timeout)):
            self._connection = await asyncio.open_connection(self._host, self._port)
        return self._connection

    def hang_up(self) -> None:
        """End the connection, if there is one."""
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None
