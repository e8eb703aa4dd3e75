"""Collectors as processes of their own, configured by a file, with a destination in the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

BOUND = 60.0
"""Seconds after which a wait fails."""
PROTOBUF = {"content-type": "application/x-protobuf"}
_QUIVER_RUN = (
    "import typer; from quiver.cli.main import reporting; from quiver.cli.run import run; "
    "typer.run(reporting(run))"
)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configuration(
    store: Path,
    *,
    target: int,
    port: int,
    admin: int,
    cores: int = 1,
    shutdown_timeout: float = 30.0,
) -> str:
    """OTLP over HTTP, stored, to an OTLP server on port ``target``."""
    return f"""
process:
  cores: {cores}
  shutdown_timeout: {shutdown_timeout}
  admin: {{listening_addr: "127.0.0.1:{admin}"}}
nodes:
  in:
    type: receiver:otlp_http
    config: {{listening_addr: "127.0.0.1:{port}"}}
    out_ports: {{out: {{destinations: [store]}}}}
  store:
    type: processor:persistence
    config:
      path: {store}
      segment: {{max_open_duration: 50ms}}
      retention: {{min_free_space: 0}}
      retry: {{initial_interval: 50ms, max_interval: 200ms}}
    out_ports: {{out: {{destinations: [out]}}}}
  out:
    type: exporter:otlp_http
    config: {{http_endpoint: "http://127.0.0.1:{target}", timeout: 20s}}
"""


@dataclass
class Quiver:
    """A ``quiver run`` that can be looked at, and killed."""

    file: Path
    port: int
    admin: int
    log: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    seen: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        command = [sys.executable, "-c", _QUIVER_RUN, "-c", str(self.file), *self.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def workers(self) -> list[int]:
        """Process ids of what it started."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        workers = [int(number) for number in listed.split()]
        self.seen.update(workers)
        return workers

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        process = self.process
        assert process is not None
        code = await asyncio.to_thread(process.wait, BOUND)
        self.process = None
        return code

    async def ready(self) -> None:
        """Wait until it says so."""
        await eventually(lambda: self.get("/readyz", 200), f"readiness, see {self.said()}")

    async def get(self, page: str, status: int | None = None) -> str | None:
        """A page of the admin port; None when there is none, or with another status."""
        try:
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://127.0.0.1:{self.admin}{page}")
        except httpx.HTTPError:
            return None
        return answer.text if status in {None, answer.status_code} else None

    def said(self) -> str:
        return self.log.read_text()

    async def post(self, client: httpx.AsyncClient, body: bytes) -> bool:
        """Send a request; whether it was acknowledged."""
        try:
            url = f"http://127.0.0.1:{self.port}/v1/traces"
            answer = await client.post(url, content=body, headers=PROTOBUF)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


@asynccontextmanager
async def quiver_in(
    folder: Path, *arguments: str, target: int, cores: int = 1, shutdown_timeout: float = 30.0
) -> AsyncIterator[Quiver]:
    """A collector that is started, and not there any more at the end."""
    port, admin = free_ports(2)
    file = folder / "pipeline.yaml"
    file.write_text(
        configuration(
            folder / "data",
            target=target,
            port=port,
            admin=admin,
            cores=cores,
            shutdown_timeout=shutdown_timeout,
        )
    )
    running = Quiver(file, port, admin, folder / "log", arguments)
    running.start()
    try:
        yield running
    finally:
        if running.process is not None:
            running.workers()
            running.process.kill()
            await asyncio.to_thread(running.process.wait)
        for pid in running.seen:
            if is_worker(pid):  # its supervisor was killed, and a test failed before it ended
                os.kill(pid, signal.SIGKILL)


async def eventually(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until it holds; it may be a coroutine."""
    end = asyncio.get_running_loop().time() + BOUND
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"it did not come in {BOUND} s: {what}")
        await asyncio.sleep(0.02)


def is_worker(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"quiver.pipeline.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_alive(pid: int) -> bool:
    """Whether a process runs, and not only waits to be asked for its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
