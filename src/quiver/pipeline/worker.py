"""One process of a pipeline: it starts, runs until it is told to stop, and ends in order.

::

    async with Pipeline(settings) as pipeline:  # everything listens
        ...                                     # and ends in order here

Destinations start before those who send to them, and stop after them: receivers first take no more
and answer what they have, then stores finalise and deliver until the deadline.

As a worker of a supervisor a process is told what to do through a socket, in lines of JSON:

=========  =======================================================================================
to us      first a ``Launch``; later ``{"stop": true}``. When the socket closes, the supervisor is
           gone, and we stop as well
from us    once a second ``{"waiting_for": ..., "figures": ...}``, where nothing is waited for
           when everything listens; ``{"error": ...}`` before an end with code 2
=========  =======================================================================================
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from quiver.disk import Disk, RealDisk
from quiver.errors import InvalidConfig, QuiverError
from quiver.metrics import Metrics
from quiver.openmetrics import Figures, merged
from quiver.pipeline.admin import AdminServer
from quiver.pipeline.adoption import Adoption
from quiver.pipeline.build import Surroundings, build
from quiver.pipeline.memory import MemoryPressure, memory_limit
from quiver.pipeline.node import Node
from quiver.pipeline.persistence import Persistence
from quiver.pipeline.settings.load import Settings, default_settings, load_settings
from quiver.store.store import Store

try:
    from uvloop import new_event_loop
except ImportError:  # it is not made for every system
    from asyncio import new_event_loop  # type: ignore[assignment]  # any loop will do

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

FAILED: Final = 1
UNUSABLE: Final = 2
"""The exit code for a configuration that cannot be used: trying again does not help."""
MAX_LINE: Final = 64 * 1024 * 1024
_TELL_INTERVAL: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Pipeline:
    """All nodes of one process, between ``start`` and ``stop``."""

    def __init__(
        self,
        settings: Settings,
        core: int = 0,
        *,
        cores: int | None = None,
        metrics: Metrics | None = None,
        disk: Disk | None = None,
    ) -> None:
        cores = cores or core + 1
        self.settings = settings
        self.core = core
        self.metrics = metrics or Metrics()
        self._pressure = MemoryPressure(
            memory_limit(settings.process.max_memory, cores), metrics=self.metrics
        )
        around = Surroundings(self.metrics, core, self._pressure, disk=disk or RealDisk())
        self.graph = build(settings, around)
        self.adoption = Adoption(self.graph.spare_stores, core, cores, self.metrics)
        self._started: list[Node] = []
        self._waiting_for: str | None = "starting"
        self._stop_asked = False

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - nodes are of many types
        return next(node for node in self.graph.nodes if node.name == name)

    async def start(self) -> None:
        """Start all nodes; when one cannot, those that did are stopped again."""
        self._pressure.start()
        try:
            for node in self.graph.nodes:
                if self._stop_asked:
                    return
                self._started.append(node)
                await node.start()
                if isinstance(node, Persistence):
                    logger.info("%s stores in %s", node.name, node.directory)
        except BaseException:
            await self.stop(0.0)
            raise
        self.adoption.start()
        self._waiting_for = None

    async def stop(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the deadline of many
        """Stop in order, within ``timeout`` seconds, by default those of the settings."""
        self.stop_soon()
        self._waiting_for = "stopping"
        seconds = self.settings.process.shutdown_timeout if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + seconds
        receivers = [node for node in self._started if node in self.graph.receivers]
        takers = [node for node in reversed(self._started) if node not in self.graph.receivers]
        await asyncio.gather(*(self._stop(node, deadline) for node in receivers))
        adopted = False
        for node in takers:
            if isinstance(node, Persistence) and not adopted:
                adopted = True  # what they deliver to is stopped later, for all stores
                await asyncio.gather(self._stop(node, deadline), self.adoption.stop(deadline))
            else:
                await self._stop(node, deadline)
        self._started.clear()
        await self._pressure.stop()
        self._waiting_for = "stopped"

    async def _stop(self, node: Node, deadline: float) -> None:
        """One that fails to end does not keep the others from it."""
        try:
            await node.stop(deadline)
        except Exception:
            logger.exception("%s did not end well", node.name)

    def stop_soon(self) -> None:
        """While it starts: do not go on."""
        self._stop_asked = True

    def why_not_ready(self) -> str | None:
        """None when all receivers listen and all stores are open."""
        return self._waiting_for

    async def figures(self) -> Figures:
        """Those of the nodes, and those of every store that is open."""
        return await asyncio.to_thread(self._figures)

    def _figures(self) -> Figures:
        parts = [Figures.of(self.metrics)]
        for node in [*self.graph.stores, *self.adoption.stores]:
            with contextlib.suppress(QuiverError):  # it was closed meanwhile
                labels = {"node": node.name, "store": node.directory.name}
                parts.append(Figures.of(node.store.metrics, **labels))
                parts.append(Figures.of(_lags(node.store), **labels))
        return merged(parts)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()


def _lags(store: Store) -> Metrics:
    """How far each subscriber of a store is behind."""
    lags = Metrics()
    for info in store.subscribers():
        name = info.subscriber_id
        with contextlib.suppress(QuiverError, OSError, LookupError):  # its segment goes this moment
            lags.set("quiver.subscriber.lag_seconds", store.lag(name), subscriber=name)
    return lags


# --- a process ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a process is started with: the text of a configuration, or nothing for the defaults."""

    source: str = ""
    text: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    core: int = 0
    cores: int = 1

    def settings(self) -> Settings:
        """What the text means."""
        if self.text is None:
            return default_settings()
        return load_settings(
            self.text, source=self.source, environment=os.environ, variables=self.variables
        )

    def to_line(self) -> bytes:
        """For another process."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Launch:
        """From another process."""
        return cls(**json.loads(line))


class StopSignals:
    """The first signal asks to stop, the second ends the process at once.

    Nothing is lost by that: what was acknowledged is on disk.
    """

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        self.asked = asyncio.Event()
        self._at_once = at_once
        self._seen = False

    def listen(self) -> None:
        """Take the signals from the system."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            with contextlib.suppress(NotImplementedError):  # not every system has them
                loop.add_signal_handler(number, self.arrived, number)

    def arrived(self, number: signal.Signals) -> None:
        """One came."""
        if self._seen:
            logger.warning("%s again: ending at once", number.name)
            self._at_once()
            logging.shutdown()
            os._exit(128 + number)
        self._seen = True
        logger.info("%s: stopping; a second signal ends at once", number.name)
        self.asked.set()


def run_alone(settings: Settings) -> None:
    """Be the only process, with an admin port, until a signal comes."""
    run_loop(_serve_alone(settings))


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine, with uvloop where that is."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def _serve_alone(settings: Settings) -> None:
    signals = StopSignals()
    signals.listen()
    pipeline = Pipeline(settings, cores=1)
    admin = AdminServer(settings.process.admin, pipeline)
    await admin.start()
    try:
        await _serve(pipeline, signals)
    finally:
        await admin.stop()


async def _serve(pipeline: Pipeline, signals: StopSignals) -> None:
    starting = asyncio.create_task(pipeline.start())
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        pipeline.stop_soon()
    try:
        await starting
        if pipeline.why_not_ready() is None:
            logger.info("ready")
        await asked
    finally:
        asked.cancel()
    await pipeline.stop()
    logger.info("stopped")


# --- a worker of a supervisor ---------------------------------------------------------------------


def start_logging(who: str = "") -> None:
    """To standard error: time, level, which process, and what happened."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {who and who + ': '}%(message)s",
        stream=sys.stderr,
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise


async def _work(channel: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=MAX_LINE)
    line = await reader.readline()
    if not line:
        return 0  # whoever started us is gone already
    launch = Launch.from_line(line)
    start_logging(f"worker {launch.core}")
    signals = StopSignals()
    signals.listen()
    try:
        pipeline = Pipeline(launch.settings(), launch.core, cores=launch.cores)
        helpers = [
            asyncio.create_task(_tell(pipeline, writer)),
            asyncio.create_task(_obey(reader, signals)),
        ]
        try:
            await _serve(pipeline, signals)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
    except InvalidConfig as error:
        with contextlib.suppress(OSError):
            writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
            await writer.drain()
        return UNUSABLE
    except (QuiverError, OSError) as error:
        logger.error("cannot go on: %s", error)  # noqa: TRY400 - it says all
        return FAILED
    finally:
        writer.close()
    return 0


async def _tell(pipeline: Pipeline, writer: asyncio.StreamWriter) -> None:
    """How we are, once a second, and sooner when that changes."""
    told: str | None = None
    due = 0.0
    loop = asyncio.get_running_loop()
    while True:
        waiting_for = pipeline.why_not_ready()
        is_slow = writer.transport.get_write_buffer_size() > 0  # nobody reads at the moment
        if not is_slow and (waiting_for != told or loop.time() >= due):
            told, due = waiting_for, loop.time() + _TELL_INTERVAL
            try:
                figures = await pipeline.figures()
            except Exception:  # being ready does not depend on it
                logger.exception("there are no figures at the moment")
                figures = Figures()
            message = {"waiting_for": waiting_for, "figures": figures.to_json()}
            writer.write(json.dumps(message).encode() + b"\n")
        await asyncio.sleep(_TELL_INTERVAL / 10)


async def _obey(reader: asyncio.StreamReader, signals: StopSignals) -> None:
    line = b""
    with contextlib.suppress(OSError, ValueError):
        line = await reader.readline()
    if not signals.asked.is_set():
        logger.info("stopping" if line else "the supervisor is gone: stopping")
        signals.asked.set()


def main(arguments: Sequence[str]) -> int:
    """Be a worker: the argument is the number of the open socket to the supervisor."""
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    return run_loop(_work(channel))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
