"""OTLP over HTTP: what is taken arrives as it was sent, whatever the way it was sent."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from http_clients import ENCODERS, JSON, PROTOBUF, TRACES, in_pieces, post, raw, read_answer
from receiving import Collector, eventually, http_receiver, request_of

from quiver.bundle import Signal
from quiver.otlp.json_text import to_json
from quiver.pipeline.node import Port
from quiver.pipeline.persistence import Persistence
from quiver.pipeline.settings.options import PersistenceOptions


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return uvloop.run if request.param == "uvloop" else asyncio.run


# --- what is taken ----------------------------------------------------------------------------


def test_all_signals_arrive_as_the_bytes_that_were_sent(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with http_receiver(keep_headers=("X-Tenant", "absent")) as rig:
            for signal in Signal:
                answer = await post(rig, request_of(signal), f"/v1/{signal}", x_tenant="blue")
                assert (answer.status_code, answer.content) == (200, b"")
                assert answer.headers["content-type"] == "application/x-protobuf"
            assert rig.taker.requests == [request_of(signal) for signal in Signal]
            for item, signal in zip(rig.taker.items, Signal, strict=True):
                assert (item.signal, item.count, item.received_ns) == (signal, 3, 42)
                assert item.context["header.x-tenant"] == "blue"
                assert item.context["peer"].startswith("127.0.0.1:")
                assert set(item.context) == {"peer", "header.x-tenant"}
                name = "quiver.receiver.items_total"
                assert rig.metrics.get(name, node="in", signal=signal) == 3

    run(test())


@pytest.mark.parametrize("encoder", list(ENCODERS))
def test_every_compression_is_undone(encoder: str) -> None:
    async def test() -> None:
        name, encode = ENCODERS[encoder]
        large = request_of(Signal.TRACES, 20_000)
        async with http_receiver() as rig:
            for body in (TRACES, large):
                assert (await post(rig, encode(body), content_encoding=name)).status_code == 200
            assert rig.taker.requests == [TRACES, large]

    asyncio.run(test())


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_json_becomes_protobuf_and_is_answered_in_json(encoding: str) -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            for signal in Signal:
                text = to_json(signal, request_of(signal))
                body = gzip.compress(text) if encoding == "gzip" else text
                answer = await post(
                    rig,
                    body,
                    f"/v1/{signal}",
                    content_type="application/json; charset=utf-8",
                    content_encoding=encoding,
                )
                assert (answer.status_code, answer.json()) == (200, {})
                assert answer.headers["content-type"] == "application/json"
            assert rig.taker.requests == [request_of(signal) for signal in Signal]

    asyncio.run(test())


def test_an_empty_request_is_accepted_and_nothing_is_sent_on() -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            for body, headers in (
                (b"", PROTOBUF),
                (request_of(Signal.TRACES, 0), PROTOBUF),
                (b"{}", JSON),
            ):
                answer = await post(rig, body, content_type=headers["content-type"])
                assert answer.status_code == 200
            assert rig.taker.items == []

    asyncio.run(test())


def test_chunked_bodies_are_put_together() -> None:
    async def test() -> None:
        async with (
            http_receiver() as rig,
            httpx.AsyncClient(base_url=f"http://{rig.where}") as client,
        ):
            answer = await client.post("/v1/traces", content=in_pieces(TRACES, 7), headers=PROTOBUF)
            assert answer.status_code == 200
            assert rig.taker.requests == [TRACES]

    asyncio.run(test())


def test_pipelined_requests_are_answered_in_order(run: Callable[..., None]) -> None:
    async def test() -> None:
        bodies = [request_of(Signal.TRACES, 1, f"number {index} ") for index in range(50)]
        async with http_receiver() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            for index, body in enumerate(bodies):
                path = "/v1/traces" if index % 10 else "/nowhere"
                writer.write(raw(path, body))
            for index in range(50):
                status, _, _ = await read_answer(reader)
                assert status == (200 if index % 10 else 404)
            assert rig.taker.requests == [b for i, b in enumerate(bodies) if i % 10]
            writer.close()

    run(test())


def test_requests_of_one_connection_are_not_worked_on_at_the_same_time() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(raw() * 3)
            await eventually(lambda: taker.waiting == 1)
            connection = next(iter(rig.receiver._hub._connections))
            await eventually(lambda: not connection._transport.is_reading())
            assert taker.waiting == 1
            taker.gate.set()
            assert [(await read_answer(reader))[0] for _ in range(3)] == [200] * 3
            writer.write(raw())
            assert (await read_answer(reader))[0] == 200
            writer.close()

    asyncio.run(test())


def test_expect_continue_is_answered_before_the_body(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with http_receiver(max_request_bytes=1000) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            head, body = raw(more="expect: 100-continue\r\n").split(b"\r\n\r\n", 1)
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await read_answer(reader))[0] == 200
            too_much = raw(body=b"x" * 1001, more="expect: 100-continue\r\n")
            writer.write(too_much.split(b"\r\n\r\n", 1)[0] + b"\r\n\r\n")
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"]) == (413, "close")
            assert await reader.read() == b""
            writer.close()

    run(test())


def test_connections_are_kept_or_closed_as_asked() -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            for version, more, kept in (
                ("1.1", "", True),
                ("1.1", "connection: close\r\n", False),
                ("1.0", "", False),
                ("1.0", "connection: keep-alive\r\n", True),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
                writer.write(raw(more=more, version=version))
                status, headers, _ = await read_answer(reader)
                assert status == 200
                assert (headers.get("connection") == "close") is not kept
                if kept:
                    writer.write(raw(more=more, version=version))
                    assert (await read_answer(reader))[0] == 200
                else:
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(test())


def test_a_client_that_closes_its_side_still_gets_the_answer(run: Callable[..., None]) -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(raw())
            writer.write_eof()
            await eventually(lambda: taker.waiting == 1)
            taker.gate.set()
            assert (await read_answer(reader))[0] == 200
            assert await reader.read() == b""
            writer.close()

    run(test())


def test_paths_may_have_a_query_or_a_host() -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            for path in ("/v1/traces?x=1", "http://elsewhere/v1/traces"):
                reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
                writer.write(raw(path))
                assert (await read_answer(reader))[0] == 200
                writer.close()

    asyncio.run(test())


# --- the end ----------------------------------------------------------------------------------


def test_stopping_answers_what_was_received_and_nothing_else(run: Callable[..., None]) -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker) as rig:
            idle, idle_writer = await asyncio.open_connection("127.0.0.1", rig.port)
            busy, busy_writer = await asyncio.open_connection("127.0.0.1", rig.port)
            half, half_writer = await asyncio.open_connection("127.0.0.1", rig.port)
            busy_writer.write(raw())
            half_writer.write(raw()[:-1])
            await eventually(lambda: taker.waiting == 1)
            await eventually(lambda: rig.receiver._admission.waiting_bytes == 2 * len(TRACES) - 1)
            port = rig.port
            loop = asyncio.get_running_loop()
            stopping = asyncio.create_task(rig.receiver.stop(loop.time() + 20))
            assert await idle.read() == b""
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await asyncio.open_connection("127.0.0.1", port)
            half_writer.write(raw()[-1:])
            await eventually(lambda: taker.waiting == 2)
            assert not stopping.done()
            taker.gate.set()
            for reader in (busy, half):
                status, headers, _ = await read_answer(reader)
                assert (status, headers["connection"]) == (200, "close")
                assert await reader.read() == b""
            async with asyncio.timeout(10):
                await stopping
            assert taker.requests == [TRACES, TRACES]
            for writer in (idle_writer, busy_writer, half_writer):
                writer.close()

    run(test())


def test_at_the_deadline_connections_are_cut() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker) as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(raw())
            await eventually(lambda: taker.waiting == 1)
            await rig.receiver.stop(asyncio.get_running_loop().time() + 0.1)
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await read_answer(reader)
            writer.close()
            taker.gate.set()

    asyncio.run(test())


def test_with_a_store_behind_it_the_context_arrives_with_the_request(tmp_path: Path) -> None:
    async def test() -> None:
        taker = Collector()
        store = Persistence("store", PersistenceOptions(path=tmp_path), [taker])
        await store.start()
        async with http_receiver(taker, keep_headers=("x-tenant",)) as rig:
            rig.receiver._admission._port = Port([store])
            assert (await post(rig, x_tenant="blue")).status_code == 200
            await eventually(lambda: taker.items)
            await store.stop(asyncio.get_running_loop().time() + 10)
            late = await post(rig)
            assert (late.status_code, late.headers["retry-after"]) == (429, "1")
        (item,) = taker.items
        assert item.requests == (TRACES,)
        assert (item.count, item.received_ns) == (3, 42)
        assert item.context["header.x-tenant"] == "blue"
        assert item.context["peer"].startswith("127.0.0.1:")

    asyncio.run(test())
