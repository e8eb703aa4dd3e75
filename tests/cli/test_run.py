"""``quiver run``: usage, a process from its start to its end, and what signals do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from answering import Answer, Server, http_server
from receiving import request_of
from running import Quiver, configuration, eventually, is_alive, quiver_in
from typer.testing import CliRunner, Result

from quiver import Signal
from quiver.cli import run as run_module
from quiver.cli.main import reporting
from quiver.cli.run import parse_cores, run, usable_cores
from quiver.pipeline import supervisor, worker
from quiver.pipeline.settings.load import Settings, default_settings

app = typer.Typer()
app.command()(reporting(run))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


def body(number: int) -> bytes:
    return request_of(Signal.TRACES, 1, f"request {number} ")


async def send(quiver: Quiver, *bodies: bytes) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        for each in bodies:
            assert await quiver.post(client, each)


# --- usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--cores", "0"), "'0' is neither auto nor above 0"),
        (("--cores", "many"), "'many' is neither auto nor above 0"),
        (("--set", "nothing"), "'nothing' is not NAME=VALUE"),
        (("-c", "/nowhere/p.yaml"), "/nowhere/p.yaml: No such file or directory; check the path"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_all_mistakes_of_a_file_are_told(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("nodes:\n  a: {type: receiver:nothing}\n  b: {type: exporter:nothing}\n")
    result = invoke("-c", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{file}:2:" in result.stderr
    assert f"{file}:3:" in result.stderr


def test_a_node_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        configuration(tmp_path, target=1, port=0, admin=0).replace("http://", "gopher://")
    )
    result = invoke("-c", str(file))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "gopher" in result.stderr


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[object] = []

    def alone(settings: Settings) -> None:
        seen.append(settings)

    class Fake:
        def __init__(self, launch: worker.Launch, options: object) -> None:
            del options
            seen.append((launch.cores, launch.text, dict(launch.variables)))

        async def run(self) -> int:
            return 1

    monkeypatch.setattr(worker, "run_alone", alone)
    monkeypatch.setattr(worker, "start_logging", lambda *_: None)
    monkeypatch.setattr(supervisor, "Supervisor", Fake)
    monkeypatch.setattr(run_module, "usable_cores", lambda: 5)
    assert invoke().exit_code == 0
    assert seen.pop() == default_settings()
    assert invoke("--cores", "3").exit_code == 1
    assert seen.pop() == (3, None, {})
    assert invoke("--cores", "auto").exit_code == 1
    assert seen.pop() == (5, None, {})
    file = tmp_path / "p.yaml"
    text = configuration(Path("'{{where}}'"), target=1, port=1, admin=0, cores=2)
    file.write_text(text)
    given = ("-c", str(file), "--set", f"where={tmp_path}")
    assert invoke(*given).exit_code == 1
    assert seen.pop() == (2, text, {"where": str(tmp_path)})
    assert invoke(*given, "--cores", "1").exit_code == 0
    (settings,) = seen
    assert isinstance(settings, Settings)
    assert settings.source == str(file)


def test_processes_that_share_a_port_must_know_it(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(configuration(tmp_path / "data", target=1, port=0, admin=0, cores=2))
    result = invoke("-c", str(file))
    assert result.exit_code == 2
    assert "in listens on 127.0.0.1:0: 2 processes need a port that is known" in result.stderr


def test_auto_means_what_may_be_used() -> None:
    assert parse_cores("auto") == usable_cores() >= 1
    assert parse_cores("7") == 7


# --- processes ----------------------------------------------------------------------------------


def with_quiver(
    folder: Path,
    act: Callable[[Quiver, Server], Awaitable[None]],
    *arguments: str,
    server: Server | None = None,
    **more: Any,  # noqa: ANN401 - of the configuration
) -> None:
    async def running() -> None:
        async with (
            http_server(server or Server()) as target,
            quiver_in(folder, *arguments, target=target.port, **more) as quiver,
        ):
            await act(quiver, target)

    asyncio.run(running())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_from_its_start_to_its_end(tmp_path: Path, number: signal.Signals) -> None:
    async def act(quiver: Quiver, server: Server) -> None:
        await quiver.ready()
        assert await quiver.get("/livez", 200) == "alive\n"
        await send(quiver, body(1))
        await server.until(1)
        metrics = await quiver.get("/metrics", 200)
        assert metrics is not None
        assert 'quiver_receiver_requests_total{node="in",signal="traces"} 1.0' in metrics
        assert quiver.workers() == [], "one process is enough for one core"
        quiver.signal(number)
        assert await quiver.ended() == 0
        said = quiver.said()
        assert f"INFO in listens on 127.0.0.1:{quiver.port}" in said
        assert f"INFO store stores in {tmp_path / 'data' / 'core_0'}" in said
        assert f"INFO admin listens on 127.0.0.1:{quiver.admin}" in said
        assert f"INFO {number.name}: stopping" in said

    with_quiver(tmp_path, act)


def test_a_second_signal_ends_at_once_and_loses_nothing(tmp_path: Path) -> None:
    never = asyncio.Event()
    gates = [never.wait]
    server = Server()

    async def gate() -> None:
        if gates:
            await gates[0]()

    server.gate = gate

    async def act(quiver: Quiver, server: Server) -> None:
        await quiver.ready()
        await send(quiver, body(1))
        await server.until(1)
        quiver.signal()
        await eventually(lambda: quiver.get("/readyz", 503))
        quiver.signal()
        assert await quiver.ended() == 128 + signal.SIGTERM
        gates.clear()
        quiver.start()
        await server.until(2)
        assert set(server.bodies) == {body(1)}

    with_quiver(tmp_path, act, server=server)


def test_the_same_with_workers(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def act(quiver: Quiver, server: Server) -> None:
        await quiver.ready()
        workers = quiver.workers()
        assert len(workers) == 2
        await send(quiver, body(1))
        await server.until(1)
        quiver.signal(signal.SIGINT)
        await eventually(lambda: quiver.get("/readyz", 503))
        assert any(map(is_alive, workers)), "one has something to deliver"
        quiver.signal(signal.SIGINT)
        assert await quiver.ended() == 128 + signal.SIGINT
        await eventually(lambda: not any(map(is_alive, workers)))

    with_quiver(tmp_path, act, server=Server(gate=never.wait), cores=2, shutdown_timeout=600)


def test_a_signal_to_everybody_is_one_signal(tmp_path: Path) -> None:
    """Some senders signal all processes of a service: that is no second signal."""
    gate = asyncio.Event()

    async def act(quiver: Quiver, server: Server) -> None:
        await quiver.ready()
        await send(quiver, body(1))
        await server.until(1)
        for pid in [*quiver.workers(), quiver.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await eventually(lambda: quiver.get("/readyz", 503))
        gate.set()
        assert await quiver.ended() == 0
        assert server.bodies == [body(1)], "it was delivered in order, not again"

    with_quiver(tmp_path, act, server=Server(gate=gate.wait), cores=2)


def test_with_fewer_cores_nothing_is_stranded(tmp_path: Path) -> None:
    answers = [Answer(status=503)]
    server = Server(answer=lambda _: answers[0])
    bodies = [body(number) for number in range(12)]

    async def act(quiver: Quiver, server: Server) -> None:
        await quiver.ready()
        for each in bodies:
            await send(quiver, each)  # a connection each, so that both get some
        quiver.signal()
        assert await quiver.ended() == 0
        for core in (0, 1):
            assert list((tmp_path / "data" / f"core_{core}" / "segments").iterdir())
        server.got.clear()
        answers[0] = Answer()
        quiver.arguments = ("--cores", "1")
        quiver.start()
        await eventually(lambda: set(server.bodies) == set(bodies), "all of them")
        quiver.signal()
        assert await quiver.ended() == 0

    with_quiver(tmp_path, act, server=server, cores=2, shutdown_timeout=1)
