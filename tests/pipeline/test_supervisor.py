"""The supervisor: it starts workers again, ends what cannot work, and speaks for all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from running import configuration, eventually, free_ports, is_alive

from quiver.errors import InvalidConfig
from quiver.pipeline import supervisor as supervisor_module
from quiver.pipeline.settings.options import AdminOptions, ProcessOptions
from quiver.pipeline.supervisor import WORKER, Pauses, Supervisor
from quiver.pipeline.worker import Launch

QUICK = Pauses(first=0.02, longest=0.05)

PRELUDE = """
import json, os, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
lines = channel.makefile("r")
launch = json.loads(lines.readline())
with open(os.environ["STARTS"], "a") as log:
    log.write(f"{launch['core']} {time.monotonic()}\\n")
def tell(**message):
    channel.sendall(json.dumps(message).encode() + b"\\n")
def ready(**values):
    tell(waiting_for=None, figures={"values": values, "histograms": {}})
"""


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "starts"
    file.touch()
    monkeypatch.setenv("STARTS", str(file))
    return file


def times(starts: Path, core: int = 0) -> list[float]:
    """When a worker was started."""
    lines = [line.split() for line in starts.read_text().splitlines()]
    return [float(at) for number, at in lines if int(number) == core]


def acting(script: str) -> tuple[str, ...]:
    """A worker that does what a script says."""
    return (sys.executable, "-c", PRELUDE + script)


@asynccontextmanager
async def supervising(
    command: Sequence[str],
    *,
    cores: int = 1,
    pauses: Pauses = QUICK,
    launch: Launch | None = None,
    shutdown_timeout: float = 30.0,
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    options = ProcessOptions(
        cores=cores,
        admin=AdminOptions(listening_addr="127.0.0.1:0"),
        shutdown_timeout=shutdown_timeout,
    )
    made = Supervisor(launch or Launch(cores=cores), options, command=command, pauses=pauses)
    running = asyncio.create_task(made.run())
    try:
        yield made, running
    finally:
        made.stop()
        await asyncio.gather(running, return_exceptions=True)


async def get(supervisor: Supervisor, page: str) -> httpx.Response:
    host, port = supervisor.admin.address
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://{host}:{port}{page}")


async def is_ready(supervisor: Supervisor) -> bool:
    return supervisor.why_not_ready() is None


# --- all is well --------------------------------------------------------------------------------


def test_workers_are_told_what_to_do_and_speak_through_one_port(starts: Path) -> None:
    script = """
ready(**{"a_total": launch["core"] + 1, 'b{node="x"}': len(launch["variables"]["name"])})
sys.exit(0 if json.loads(lines.readline()) == {"stop": True} else 1)
"""

    async def run() -> None:
        launch = Launch(variables={"name": "value"}, cores=2)
        async with supervising(acting(script), cores=2, launch=launch) as (supervisor, running):
            await eventually(lambda: is_ready(supervisor))
            assert (await get(supervisor, "/readyz")).status_code == 200
            text = (await get(supervisor, "/metrics")).text
            for line in (
                'a_total{core="0"} 1.0',
                'a_total{core="1"} 2.0',
                'b{core="1",node="x"} 5.0',
                "quiver_supervisor_workers 2.0",
            ):
                assert f"{line}\n" in text
            pids = supervisor.processes.values()
            assert len(set(pids)) == 2
            supervisor.stop()
            assert supervisor.why_not_ready() == "stopping"
            assert await running == 0
            assert not any(map(is_alive, pids))
        assert len(times(starts, 0)) == len(times(starts, 1)) == 1

    asyncio.run(run())


@pytest.mark.usefixtures("starts")
def test_all_must_be_ready() -> None:
    script = """
if launch["core"] == 0:
    ready()
else:
    tell(waiting_for="starting", figures={"values": {}, "histograms": {}})
lines.readline()
"""

    async def run() -> None:
        async with supervising(acting(script), cores=2) as (supervisor, _):
            await eventually(lambda: supervisor.why_not_ready() == "worker 1 is starting")
            answer = await get(supervisor, "/readyz")
            assert (answer.status_code, answer.text) == (503, "worker 1 is starting\n")

    asyncio.run(run())


@pytest.mark.usefixtures("starts")
def test_a_worker_that_says_nothing_any_more_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_SILENCE", 0.1)

    async def run() -> None:
        async with supervising(acting("ready()\nlines.readline()")) as (supervisor, _):
            await eventually(lambda: supervisor.why_not_ready() == "worker 0 does not answer")

    asyncio.run(run())


@pytest.mark.usefixtures("starts")
def test_what_nobody_knows_is_passed_over() -> None:
    script = """
channel.sendall(b'nonsense\\n[]\\n{}\\n{"figures": {"values": 1}, "waiting_for": null}\\n')
ready(a_total=1)
lines.readline()
"""

    async def run() -> None:
        async with supervising(acting(script)) as (supervisor, _):
            await eventually(lambda: is_ready(supervisor))
            assert (await supervisor.figures()).values['a_total{core="0"}'] == 1

    asyncio.run(run())


# --- workers that die ---------------------------------------------------------------------------


def test_one_that_keeps_dying_is_started_after_growing_pauses(starts: Path) -> None:
    async def run() -> None:
        pauses = Pauses(first=0.1, longest=0.4)
        async with supervising(acting("sys.exit(1)"), pauses=pauses) as (supervisor, _):
            await eventually(lambda: len(times(starts)) >= 5)
            figures = await supervisor.figures()
            assert figures.values['quiver.supervisor.restarts_total{core="0"}'] >= 4

    asyncio.run(run())
    at = times(starts)
    for number, pause in enumerate([0.1, 0.2, 0.4, 0.4]):
        assert at[number + 1] - at[number] >= pause


def test_good_health_makes_the_pauses_short_again(starts: Path) -> None:
    async def run() -> None:
        pauses = Pauses(first=0.05, longest=1000, good_health=0)  # 12 would take 100 s otherwise
        async with supervising(acting("ready()\nsys.exit(1)"), pauses=pauses):
            await eventually(lambda: len(times(starts)) >= 12)

    asyncio.run(run())


def test_others_go_on_while_one_is_killed(starts: Path) -> None:
    async def run() -> None:
        script = "ready(a_total=1)\nlines.readline()"
        async with supervising(acting(script), cores=2) as (supervisor, running):
            await eventually(lambda: is_ready(supervisor))
            before = supervisor.processes
            os.kill(before[1], signal.SIGKILL)
            await eventually(lambda: len(times(starts, 1)) == 2)
            await eventually(lambda: is_ready(supervisor))
            assert supervisor.processes[0] == before[0]
            assert supervisor.processes[1] != before[1]
            supervisor.stop()
            assert await running == 0

    asyncio.run(run())


def test_one_that_died_is_not_ready_until_it_says_so(starts: Path) -> None:
    script = """
if len(open(os.environ["STARTS"]).readlines()) == 1:
    ready(a_total=1)
lines.readline()
"""

    async def run() -> None:
        async with supervising(acting(script)) as (supervisor, _):
            await eventually(lambda: is_ready(supervisor))
            os.kill(supervisor.processes[0], signal.SIGKILL)
            await eventually(lambda: len(times(starts)) == 2)
            assert supervisor.why_not_ready() == "worker 0 is starting"
            assert 'a_total{core="0"}' not in (await supervisor.figures()).values

    asyncio.run(run())


def test_a_program_that_is_not_there_is_tried_again() -> None:
    async def run() -> None:
        async with supervising(("/nowhere/python",)) as (supervisor, running):
            name = 'quiver.supervisor.restarts_total{core="0"}'

            async def restarts() -> bool:
                return (await supervisor.figures()).values.get(name, 0) >= 2

            await eventually(restarts)
            supervisor.stop()
            await running

    asyncio.run(run())


def test_a_worker_that_does_not_stop_is_killed(
    starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_GRACE", 2.0)
    script = "ready()\nwhile True: time.sleep(60)"

    async def run() -> None:
        async with supervising(acting(script), shutdown_timeout=0.1) as (supervisor, running):
            await eventually(lambda: is_ready(supervisor))
            (pid,) = supervisor.processes.values()
            supervisor.stop()
            assert await running == 1
            assert not is_alive(pid)
        assert len(times(starts)) == 1

    asyncio.run(run())


# --- configurations that cannot be used ---------------------------------------------------------


def test_a_configuration_that_cannot_be_used_ends_everything(starts: Path) -> None:
    script = """
if launch["core"] == 1:
    tell(error="no such thing")
    sys.exit(2)
ready()
lines.readline()
"""

    async def run() -> None:
        async with supervising(acting(script), cores=2) as (supervisor, running):
            with pytest.raises(InvalidConfig, match="no such thing"):
                await running
            assert supervisor.processes == {}
        assert len(times(starts, 1)) == 1

    asyncio.run(run())


def test_one_that_worked_before_is_started_again_whatever_it_says(starts: Path) -> None:
    async def run() -> None:
        async with supervising(acting("ready()\ntell(error='odd')\nsys.exit(2)")):
            await eventually(lambda: len(times(starts)) >= 3)

    asyncio.run(run())


def test_a_real_worker_says_why_it_cannot_work(tmp_path: Path) -> None:
    async def run() -> None:
        (port,) = free_ports(1)
        text = configuration(tmp_path / "data", target=1, port=port, admin=0)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            launch = Launch(source="p.yaml", text=text, cores=2)
            async with supervising(WORKER, cores=2, launch=launch) as (_, running):
                with pytest.raises(InvalidConfig, match=f"in cannot listen on 127.0.0.1:{port}"):
                    await running

    asyncio.run(run())


def test_mistakes_of_a_file_are_told_by_a_real_worker() -> None:
    async def run() -> None:
        launch = Launch(source="p.yaml", text="nodes: {a: {type: receiver:nothing}}", cores=2)
        async with supervising(WORKER, cores=2, launch=launch) as (_, running):
            with pytest.raises(InvalidConfig, match=r"p\.yaml:1:.*there is no receiver 'nothing'"):
                await running

    asyncio.run(run())
