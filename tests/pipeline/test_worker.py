"""One process of a pipeline: it starts and stops in order, and adopts what was left over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import Answer, Server, http_server
from configurations import graph, load
from receiving import request_of
from running import PROTOBUF, configuration, eventually, free_ports

from quiver import Signal
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig, StoreLocked
from quiver.metrics import Metrics
from quiver.openmetrics import render
from quiver.pipeline.adoption import left_over
from quiver.pipeline.dead_letters import DeadLetters
from quiver.pipeline.node import Node
from quiver.pipeline.settings.load import Settings, default_settings
from quiver.pipeline.worker import Launch, Pipeline


def settings_in(folder: Path, target: int, *, shutdown_timeout: float = 30.0) -> Settings:
    return load(
        configuration(
            folder / "data", target=target, port=0, admin=0, shutdown_timeout=shutdown_timeout
        )
    )


def body(number: int) -> bytes:
    return request_of(Signal.TRACES, 1, f"request {number} ")


async def send(pipeline: Pipeline, *bodies: bytes) -> list[int]:
    host, port = pipeline["in"].address
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"http://{host}:{port}/v1/traces"
        return [
            (await client.post(url, content=each, headers=PROTOBUF)).status_code for each in bodies
        ]


@asynccontextmanager
async def pipeline_in(folder: Path, target: int, **more: Any) -> AsyncIterator[Pipeline]:  # noqa: ANN401 - of a pipeline
    pipeline = Pipeline(settings_in(folder, target), **more)
    pipeline.adoption.interval = 0.02
    async with pipeline:
        yield pipeline


# --- from beginning to end ----------------------------------------------------------------------


def test_what_is_received_arrives(tmp_path: Path) -> None:
    async def run() -> None:
        bodies = [body(number) for number in range(10)]
        async with http_server(Server()) as server:
            pipeline = Pipeline(settings_in(tmp_path, server.port))
            assert pipeline.why_not_ready() == "starting"
            async with pipeline:
                assert pipeline.why_not_ready() is None
                assert await send(pipeline, *bodies) == [200] * 10
                await server.until(10)
            assert pipeline.why_not_ready() == "stopped"
            assert sorted(server.bodies) == sorted(bodies)

    asyncio.run(run())


def test_stopping_delivers_what_was_received(tmp_path: Path) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        async with http_server(Server(gate=gate.wait)) as server:
            async with pipeline_in(tmp_path, server.port) as pipeline:
                assert await send(pipeline, body(1), body(2)) == [200, 200]
                stopping = asyncio.create_task(pipeline.stop())
                await eventually(lambda: pipeline.why_not_ready() == "stopping")
                await server.until(1)
                assert not stopping.done(), "it waits for the destination"
                gate.set()
                await stopping
            assert sorted(set(server.bodies)) == [body(1), body(2)]

    asyncio.run(run())


def test_at_the_deadline_the_rest_is_left_for_the_next_time(tmp_path: Path) -> None:
    async def run() -> None:
        never = asyncio.Event()
        server = Server(gate=never.wait)
        async with http_server(server):
            pipeline = Pipeline(settings_in(tmp_path, server.port, shutdown_timeout=0.2))
            async with pipeline:
                assert await send(pipeline, body(1)) == [200]
        async with http_server(Server()) as later, pipeline_in(tmp_path, later.port):
            await later.until(1)
            assert later.bodies == [body(1)]

    asyncio.run(run())


@pytest.mark.parametrize("way", ["store -> b, b -> out", "b -> store, store -> out", "b -> out"])
def test_a_store_may_stand_anywhere_or_nowhere(tmp_path: Path, way: str) -> None:
    ways = {"in": way.partition(" ")[0], **dict(edge.split(" -> ") for edge in way.split(", "))}

    async def run() -> None:
        async with http_server(Server()) as server:
            kinds = {
                "in": "receiver:otlp_http -> {} | listening_addr: 127.0.0.1:0",
                "b": "processor:batch -> {} | timeout: 10ms",
                "store": f"processor:persistence -> {{}} | path: {tmp_path}",
            }
            text = graph(
                **{name: kinds[name].format(towards) for name, towards in ways.items()},
                out=f"exporter:otlp_http | endpoint: 'http://127.0.0.1:{server.port}'",
            )
            async with Pipeline(load(text)) as pipeline:
                assert await send(pipeline, body(1)) == [200]
            assert server.bodies == [body(1)]

    asyncio.run(run())


def test_without_a_store_the_answer_is_that_of_the_destination() -> None:
    async def run() -> None:
        answers = [Answer(status=503), Answer(status=400), Answer()]
        async with http_server(Server(answer=lambda _: answers.pop(0))) as server:
            text = graph(
                **{"in": "receiver:otlp_http -> out | listening_addr: 127.0.0.1:0"},
                out=f"exporter:otlp_http | endpoint: 'http://127.0.0.1:{server.port}'",
            )
            async with Pipeline(load(text)) as pipeline:
                assert await send(pipeline, body(1), body(2), body(3)) == [429, 400, 200]

    asyncio.run(run())


def test_nobody_listens_after_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        async with pipeline_in(tmp_path, 1) as pipeline:
            address = pipeline["in"].address
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(run())


def test_nodes_start_and_stop_in_order(tmp_path: Path) -> None:
    calls: list[str] = []

    def spy(node: Node) -> None:
        start, stop = node.start, node.stop

        async def started() -> None:
            calls.append(f"start {node.name}")
            await start()

        async def stopped(deadline: float) -> None:
            calls.append(f"stop {node.name}")
            await stop(deadline)

        node.start, node.stop = started, stopped  # type: ignore[method-assign]  # to see the calls

    async def run() -> None:
        pipeline = Pipeline(settings_in(tmp_path, 1))
        for node in pipeline.graph.nodes:
            spy(node)
        async with pipeline:
            pass

    asyncio.run(run())
    order = ["out", "store", "in"]
    assert calls == [f"start {n}" for n in order] + [f"stop {n}" for n in reversed(order)]


def test_a_node_that_does_not_end_well_keeps_nobody_from_it(tmp_path: Path) -> None:
    async def broken(deadline: float) -> None:
        del deadline
        raise RuntimeError("no")

    async def run() -> None:
        pipeline = Pipeline(settings_in(tmp_path, 1))
        async with pipeline:
            stop = pipeline["in"].stop
            pipeline["in"].stop = broken
        await stop(0)
        async with pipeline_in(tmp_path, 1):
            pass  # the store was closed

    asyncio.run(run())


# --- starting in vain ---------------------------------------------------------------------------


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        (port,) = free_ports(1)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            text = configuration(tmp_path / "data", target=1, port=port, admin=0)
            pipeline = Pipeline(load(text))
            with pytest.raises(InvalidConfig, match=f"in cannot listen on 127.0.0.1:{port}"):
                await pipeline.start()
            assert pipeline.why_not_ready() == "stopped"
        async with pipeline_in(tmp_path, 1):
            pass  # the store is free

    asyncio.run(run())


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    async def run() -> None:
        async with pipeline_in(tmp_path, 1):
            with pytest.raises(StoreLocked):
                await Pipeline(settings_in(tmp_path, 1)).start()

    asyncio.run(run())


def test_asked_to_stop_while_starting_it_does_not_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        pipeline = Pipeline(settings_in(tmp_path, 1))
        pipeline.stop_soon()
        await pipeline.start()
        assert pipeline.why_not_ready() == "starting"
        with pytest.raises(RuntimeError, match="not listening"):
            _ = pipeline["in"].address
        await pipeline.stop()

    asyncio.run(run())


# --- figures ------------------------------------------------------------------------------------


def test_the_figures_are_those_of_nodes_and_stores(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            http_server(Server()) as server,
            pipeline_in(tmp_path, server.port) as pipeline,
        ):
            await send(pipeline, body(1))
            await server.until(1)
            text = render(await pipeline.figures())
        assert 'quiver_receiver_requests_total{node="in",signal="traces"} 1.0' in text
        assert 'quiver_ingest_bundles_total{node="store",store="core_0"} 1.0' in text
        lag = 'quiver_subscriber_lag_seconds{node="store",store="core_0",subscriber="out"}'
        assert lag in text
        assert "quiver_process_resident_bytes" in text
        # After the end the stores are closed, and there are figures all the same.
        assert "quiver_receiver_requests_total" in render(await pipeline.figures())

    asyncio.run(run())


def test_memory_that_is_short_refuses(tmp_path: Path) -> None:
    async def run() -> None:
        settings = settings_in(tmp_path, 1)
        tight = replace(settings, process=replace(settings.process, max_memory=1))
        async with Pipeline(tight) as pipeline:
            assert await send(pipeline, body(1)) == [429]

    asyncio.run(run())


# --- adoption -----------------------------------------------------------------------------------


async def fill(folder: Path, core: int, *bodies: bytes) -> None:
    """Have a core store what it cannot deliver."""
    async with http_server(Server(answer=lambda _: Answer(status=503))) as server:
        settings = settings_in(folder, server.port, shutdown_timeout=0.1)
        async with Pipeline(settings, core, cores=core + 1) as pipeline:
            assert await send(pipeline, *bodies) == [200] * len(bodies)


def test_stores_of_cores_that_are_gone_are_emptied(tmp_path: Path) -> None:
    async def run() -> None:
        for core in range(4):
            await fill(tmp_path, core, body(core))
        async with (
            http_server(Server()) as server,
            pipeline_in(tmp_path, server.port, core=0, cores=2) as pipeline,
        ):
            await eventually(lambda: pipeline.adoption.drained == 1)
            assert pipeline.adoption.stores == []
            await server.until(2)
            assert sorted(server.bodies) == [body(0), body(2)], "core 1 is another process"
            # A store that is closed can be opened by whoever wants it.
            other = pipeline.graph.spare_stores["store"].make(2)
            await other.start()
            assert other.store.all_drained()
            await other.stop(0)

    asyncio.run(run())


def test_a_store_that_somebody_has_is_left_alone_until_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        await fill(tmp_path, 1, body(1))
        holder = Pipeline(settings_in(tmp_path, 1), 1, cores=2)
        (held,) = holder.graph.stores
        await held.start()
        async with (
            http_server(Server()) as server,
            pipeline_in(tmp_path, server.port) as pipeline,
        ):
            metrics = pipeline.metrics
            looks = [0]
            real = metrics.set

            def counting(name: str, *args: Any, **labels: Any) -> None:  # noqa: ANN401 - of the real one
                looks[0] += name == "quiver.adoption.open_stores"
                real(name, *args, **labels)

            metrics.set = counting  # type: ignore[method-assign]  # to see the rounds
            await eventually(lambda: looks[0] >= 3)
            assert pipeline.adoption.stores == []
            assert "cannot be adopted" not in caplog.text, "nothing is wrong with it"
            assert server.bodies == []
            await held.stop(0)
            await server.until(1)
            await eventually(lambda: pipeline.adoption.drained == 1)

    asyncio.run(run())


def test_a_store_that_cannot_be_emptied_stays_open_and_is_closed_at_the_end(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        await fill(tmp_path, 1, body(1))
        settings = settings_in(tmp_path, 1, shutdown_timeout=0.1)
        pipeline = Pipeline(settings)
        pipeline.adoption.interval = 0.02
        async with pipeline:
            await eventually(lambda: len(pipeline.adoption.stores) == 1)
        async with http_server(Server()) as server, pipeline_in(tmp_path, server.port):
            await server.until(1)

    asyncio.run(run())


def test_a_dead_letter_of_an_empty_store_can_be_tried_again(tmp_path: Path) -> None:
    async def run() -> None:
        await fill(tmp_path, 1, body(1))
        refusing = [True]
        server = Server(answer=lambda _: Answer(status=400 if refusing[0] else 200))
        async with http_server(server), pipeline_in(tmp_path, server.port) as pipeline:
            await eventually(
                lambda: pipeline.adoption.drained == 1 and not pipeline.adoption.stores
            )
            refusing[0] = False
            letters = DeadLetters(RealDisk(), tmp_path / "data" / "core_1", 0)
            (letter,) = letters.list()
            letters.ask_again(letter)
            await eventually(lambda: not letters.list())
            assert server.bodies == [body(1)] * 2
            await eventually(lambda: not pipeline.adoption.stores)

    asyncio.run(run())


def test_which_directories_are_left_over(tmp_path: Path) -> None:
    disk = RealDisk()
    assert left_over(disk, tmp_path / "nothing", 0, 1) == []
    for name in ("core_0", "core_1", "core_2", "core_3", "core_10", "core_x", "core_01", "other"):
        (tmp_path / name).mkdir()
    assert left_over(disk, tmp_path, 0, 1) == [1, 2, 3, 10]
    assert left_over(disk, tmp_path, 0, 2) == [2, 10]
    assert left_over(disk, tmp_path, 1, 2) == [3]
    assert left_over(disk, tmp_path, 0, 11) == []


# --- what a process is started with -------------------------------------------------------------


def test_a_launch_travels_as_a_line() -> None:
    text = configuration(Path("'{{where}}'"), target=1, port=0, admin=0)
    sent = Launch(source="p.yaml", text=text, variables={"where": "/x"}, core=1, cores=2)
    got = Launch.from_line(sent.to_line())
    assert got == sent
    assert got.settings().nodes["store"].options.path == Path("/x")  # type: ignore[attr-defined]
    assert Launch().settings() == default_settings()


def test_metrics_may_be_those_of_somebody_else(tmp_path: Path) -> None:
    metrics = Metrics()
    assert Pipeline(settings_in(tmp_path, 1), metrics=metrics).metrics is metrics
