"""A committer: one process that writes a manifest for many producers.

Producers that all write the manifest themselves meet each other, and the more there are, the more
of their writes are in vain. A committer takes their appends, and while one write is on its way all
further ones gather for the next: one write each time, whoever asked. It answers when the write has
landed, so an answer means durable.

It holds nothing that matters. Producers go on without it when it is gone, and two of them, or one
and producers that do not ask it, do each other no harm: everybody writes with compare-and-swap,
and looks for a location before appending it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Final, Self

from quiver.buffer.appender import Clock, wall_clock_ms
from quiver.buffer.committer_wire import Append, Done, Refused, decode, read_frame
from quiver.buffer.group_commit import MAX_APPEND, GroupCommit
from quiver.buffer.names import ulid_time_ms
from quiver.buffer.objects import Objects
from quiver.buffer.retrying import within
from quiver.config import QueueConfig
from quiver.errors import FormatError, ObjectNotFound, QueueError
from quiver.metrics import Metrics

MAX_CONNECTIONS: Final = 256
IDLE_TIMEOUT: Final = 600.0


class Committer:
    """Serves one queue. ``start`` it in an event loop, ``close`` it there."""

    def __init__(
        self,
        objects: Objects,
        config: QueueConfig,
        *,
        metrics: Metrics | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        random: Random | None = None,
        max_append: int = MAX_APPEND,
        max_connections: int = MAX_CONNECTIONS,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
        self._objects = objects
        self._config = config
        self._metrics = metrics or Metrics()
        self._max_connections = max_connections
        self._idle_timeout = idle_timeout
        self._group = GroupCommit(
            objects,
            config,
            clock=Clock(now_ms),
            random=random or Random(),  # noqa: S311 - for the pauses between attempts
            metrics=self._metrics,
            max_append=max_append,
        )
        self._server: asyncio.Server | None = None
        self._committing: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def conflict_rate(self) -> float:
        """How many of 100 writes of the manifest met another writer's."""
        return self._group.conflict_rate

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen; where, with the port that was chosen if none was named."""
        self._server = await asyncio.start_server(self._accept, host, port)
        self._committing = asyncio.create_task(self._group.run())
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    async def serve_forever(self) -> None:
        """Until it is cancelled, or closed."""
        if self._committing is not None:
            await asyncio.wait([self._committing])

    async def close(self) -> None:
        """Stop listening and hang up. Who waits for an answer does it without us."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._connections, *([self._committing] if self._committing else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            with contextlib.suppress(TimeoutError):  # somebody does not read what we wrote
                async with asyncio.timeout(self._config.attempt_timeout):
                    await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- Connections --------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        welcome = len(self._connections) < self._max_connections
        serving = self._serve(reader, writer, welcome=welcome)
        task = asyncio.get_running_loop().create_task(serving)
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, welcome: bool
    ) -> None:
        try:
            if not welcome:
                self._metrics.count("buffer.committer_connections_refused")
                writer.write(Refused(0, unclear=False, reason="too many connections").encode())
                await self._drain(writer)
                return
            await self._converse(reader, writer)
        except (OSError, FormatError):
            pass  # it went away, was silent for too long, or does not speak our language
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = f"committer client {writer.get_extra_info('peername')}"
        known = False
        while True:
            frame = await read_frame(
                reader,
                source=source,
                idle=self._idle_timeout,
                whole=self._config.attempt_timeout,
            )
            if frame is None:
                return
            message = decode(frame, source=source)
            if not isinstance(message, Append):
                return
            try:
                self._check_queue(message)
                if not known:
                    await self._check_store(message)
                    known = True
            except QueueError as error:
                answer: Done | Refused = Refused(
                    message.request_id, unclear=False, reason=str(error)
                )
            else:
                answer = await self._group.commit(message)
            writer.write(answer.encode())
            await self._drain(writer)

    async def _drain(self, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._config.attempt_timeout):
            await writer.drain()

    def _check_queue(self, asked: Append) -> None:
        if asked.manifest_path != self._config.manifest_path:
            raise QueueError(
                f"this committer writes {self._config.manifest_path}, not {asked.manifest_path}"
            )
        prefix = self._config.data_path_prefix
        for entry in asked.entries:
            if ulid_time_ms(entry.location, prefix) is None:
                raise QueueError(f"{entry.location} is not a batch below {prefix}")

    async def _check_store(self, asked: Append) -> None:
        """A producer of another store may mean another manifest by the same path."""
        location = asked.entries[0].location
        try:
            await within(
                self._config.attempt_timeout, location, self._objects.get_tail(location, 1)
            )
        except ObjectNotFound as error:
            raise QueueError(f"{location} is not in the object store of this committer") from error
