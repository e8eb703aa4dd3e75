"""One process for each core, and one that looks after them.

Every worker listens on the same addresses (the system spreads connections among them) and has a
store of its own. One that dies is started again, after a pause that grows while it keeps dying. A
configuration that cannot be used ends everything, with the reason.

Workers are asked to stop through their socket rather than by a signal, because whoever sends the
signal may have sent it to them as well, and a second one means something else. When the supervisor
itself is killed the sockets close, and the workers stop by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.openmetrics import Figures, merged
from quiver.pipeline.admin import AdminServer
from quiver.pipeline.settings.options import ProcessOptions
from quiver.pipeline.worker import FAILED, MAX_LINE, UNUSABLE, Launch, StopSignals

logger = logging.getLogger(__name__)

WORKER: Final = (sys.executable, "-m", "quiver.pipeline.worker")
STOP: Final = b'{"stop": true}\n'
_GRACE: Final = 5.0
"""Seconds beyond ``shutdown_timeout`` before a worker is killed."""
_SILENCE: Final = 10.0
"""Seconds without a word after which a worker does not count as ready."""
_LAST_WORDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds before a worker is started again: doubled each time, anew after good health."""

    first: float = 1.0
    longest: float = 30.0
    good_health: float = 60.0


@dataclass(slots=True)
class _Worker:
    core: int
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    waiting_for: str | None = "starting"
    ready_since: float | None = None
    was_ready: bool = False
    heard: float = 0.0
    figures: Figures = field(default_factory=Figures)
    error: str | None = None
    exit_code: int = 0


class Supervisor:
    """Runs workers until a signal comes."""

    def __init__(
        self,
        launch: Launch,
        process: ProcessOptions,
        *,
        command: Sequence[str] = WORKER,
        pauses: Pauses = Pauses(),  # noqa: B008 - it is immutable
    ) -> None:
        self._launch = launch
        self._options = process
        self._command = command
        self._pauses = pauses
        self._workers = [_Worker(core) for core in range(launch.cores)]
        self._metrics = Metrics()
        self._failure: str | None = None
        self._signals = StopSignals(self._kill_all)
        self.admin = AdminServer(process.admin, self)

    @property
    def processes(self) -> dict[int, int]:
        """Process ids of the workers that run, by core."""
        return {w.core: w.process.pid for w in self._workers if w.process is not None}

    def stop(self) -> None:
        """Ask everything to end."""
        self._signals.asked.set()

    async def run(self) -> int:
        """Run until a signal comes, or ``stop``; the exit code.

        ``InvalidConfig`` when a worker cannot use the configuration.
        """
        if not hasattr(socket, "SO_REUSEPORT"):
            raise InvalidConfig("this system cannot share a port: cores must be 1")
        self._signals.listen()
        await self.admin.start()
        keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        try:
            await self._signals.asked.wait()
            await self._stop_all(keepers)
        finally:
            self._kill_all()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self.admin.stop()
        if self._failure is not None:
            raise InvalidConfig(self._failure)
        codes = [worker.exit_code for worker in self._workers]
        logger.info("stopped")
        return FAILED if any(codes) else 0

    # --- one worker -----------------------------------------------------------------------------

    async def _keep(self, worker: _Worker) -> None:
        """Start it, and again whenever it dies."""
        loop = asyncio.get_running_loop()
        pause = self._pauses.first
        while not self._signals.asked.is_set():
            code = await self._run_once(worker)
            worker.exit_code = code
            if self._signals.asked.is_set():
                return
            if code == UNUSABLE and not worker.was_ready:
                self._failure = worker.error or "a worker cannot use the configuration, see the log"
                self.stop()
                return
            since, worker.ready_since = worker.ready_since, None
            if since is not None and loop.time() - since >= self._pauses.good_health:
                pause = self._pauses.first
            reason = f": {worker.error}" if worker.error else ""
            logger.error(
                "worker %d ended with %s%s; again in %.0f s",
                worker.core,
                _described(code),
                reason,
                pause,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._signals.asked.wait()
            pause = min(2 * pause, self._pauses.longest)
            self._metrics.count("quiver.supervisor.restarts_total", core=worker.core)
        worker.exit_code = 0

    async def _run_once(self, worker: _Worker) -> int:
        """Start it and wait for its end; its exit code."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                worker.error = None
                worker.process = process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # what is typed at a terminal is for us alone
                )
        except OSError as error:
            ours.close()
            worker.error = str(error)
            return FAILED
        logger.info("worker %d is process %d", worker.core, process.pid)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
        worker.writer = writer
        listening = asyncio.create_task(self._listen(worker, reader))
        try:
            writer.write(replace(self._launch, core=worker.core).to_line())
            if self._signals.asked.is_set():
                writer.write(STOP)
            code = await process.wait()
            await asyncio.wait({listening}, timeout=_LAST_WORDS)
        finally:
            listening.cancel()
            worker.process, worker.writer = None, None
            worker.waiting_for, worker.figures = "starting", Figures()
            writer.close()
        return code

    async def _listen(self, worker: _Worker, reader: asyncio.StreamReader) -> None:
        """Take in what a worker tells, until it says no more."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                try:
                    message = json.loads(line)
                    if "error" in message:
                        worker.error = str(message["error"])
                        continue
                    worker.figures = Figures.from_json(message["figures"])
                    worker.waiting_for = message["waiting_for"]
                except (ValueError, TypeError, KeyError) as error:
                    logger.warning("worker %d says what nobody knows: %r", worker.core, error)
                    continue
                worker.heard = loop.time()
                if worker.waiting_for is None and worker.ready_since is None:
                    worker.was_ready, worker.ready_since = True, loop.time()
                    if self.why_not_ready() is None:
                        logger.info("ready: all %d workers listen", len(self._workers))

    # --- all of them ----------------------------------------------------------------------------

    async def _stop_all(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        for worker in self._workers:
            if worker.writer is not None:
                with contextlib.suppress(OSError):
                    worker.writer.write(STOP)
        patience = self._options.shutdown_timeout + _GRACE
        _, late = await asyncio.wait(keepers, timeout=patience)
        if late:
            logger.error("%d workers did not end in %.0f s: they are killed", len(late), patience)
            self._kill_all()
            await asyncio.wait(late, timeout=_GRACE)

    def _kill_all(self) -> None:
        for pid in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def why_not_ready(self) -> str | None:
        """None when all workers are ready."""
        if self._signals.asked.is_set():
            return "stopping"
        now = asyncio.get_running_loop().time()
        for worker in self._workers:
            if worker.waiting_for is not None:
                return f"worker {worker.core} is {worker.waiting_for}"
            if now - worker.heard > _SILENCE:
                return f"worker {worker.core} does not answer"
        return None

    async def figures(self) -> Figures:
        """Of all workers, by core, and our own."""
        self._metrics.set("quiver.supervisor.workers", len(self.processes))
        theirs = [worker.figures.labelled(core=worker.core) for worker in self._workers]
        return merged([Figures.of(self._metrics), *theirs])


def _described(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
