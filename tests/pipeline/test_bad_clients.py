"""Whatever others do to the sockets, the good client next to them gets its answers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import resource
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
import uvloop
import zstandard
from http_clients import PROTOBUF, TRACES, post, raw, raw_deflate, read_answer, zstd_without_size
from hypothesis import given, settings
from hypothesis import strategies as st
from receiving import Collector, Rig, eventually, grpc_receiver, http_receiver, request_of

from quiver.bundle import Signal

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PATIENCE = 20.0
"""Seconds for an answer to the good client: the machine may be busy."""
MANY = 1000
CHUNKED = (
    b"POST /v1/traces HTTP/1.1\r\ncontent-type: application/x-protobuf\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return uvloop.run if request.param == "uvloop" else asyncio.run


@asynccontextmanager
async def good_http_client(rig: Rig) -> AsyncIterator[None]:
    """Sends all the time, on one connection and on new ones; each request is answered well.

    A connection that rests between two requests may be closed by a server that has no room, in the
    moment in which the next request is sent. So a client asks once more, as all of them do.
    """

    async def send() -> None:
        async with httpx.AsyncClient(base_url=f"http://{rig.where}", timeout=PATIENCE) as client:

            async def on_one_connection() -> httpx.Response:
                return await client.post("/v1/traces", content=TRACES, headers=PROTOBUF)

            async def on_a_new_one() -> httpx.Response:
                return await post(rig)

            while True:
                for ask in (on_one_connection, on_a_new_one):
                    try:
                        answer = await ask()
                    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                        answer = await ask()
                    assert answer.status_code == 200
                await asyncio.sleep(0.01)

    async with _beside(send, rig):
        yield


@asynccontextmanager
async def good_grpc_client(rig: Rig) -> AsyncIterator[None]:
    async def send() -> None:
        async with grpc.aio.insecure_channel(rig.where) as channel:
            call: Any = channel.unary_unary(EXPORT)
            while True:
                assert await call(TRACES, timeout=PATIENCE) == b""
                await asyncio.sleep(0.01)

    async with _beside(send, rig):
        yield


@asynccontextmanager
async def _beside(send: Callable[[], Coroutine[Any, Any, None]], rig: Rig) -> AsyncIterator[None]:
    sending = asyncio.create_task(send())
    try:
        await eventually(lambda: rig.taker.items or sending.done())
        yield
        before = len(rig.taker.items)
        await eventually(lambda: len(rig.taker.items) > before + 3 or sending.done())
        assert not sending.done() or sending.result()
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


async def connect(rig: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", rig.port)


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Until the other side closes, in whatever way."""
    made = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE):
            while piece := await reader.read(65536):
                made += piece
    return made


# --- slow ones --------------------------------------------------------------------------------


def test_half_open_connections_are_closed(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with http_receiver(idle_timeout=0.2) as rig, good_http_client(rig):
            silent = [await connect(rig) for _ in range(20)]
            for reader, writer in silent:
                assert await read_to_end(reader) == b""
                writer.close()
            assert rig.metrics.get("quiver.receiver.timeouts_total", node="in") >= 20

    run(test())


@pytest.mark.parametrize(
    ("start", "drip", "answer"),
    [
        (b"POS", b"", b""),
        (b"", b"\r\n", b""),
        (b"POST /v1/traces HTTP/1.1\r\n", b"x: y\r\n", b""),
        (raw(body=b"x" * 1000)[:-1000], b"x", b"HTTP/1.1 503 "),
        (
            CHUNKED,
            b"1\r\nx\r\n",
            b"HTTP/1.1 503 ",
        ),
    ],
    ids=["method", "empty lines", "headers", "body", "chunks"],
)
def test_slow_senders_are_given_up(start: bytes, drip: bytes, answer: bytes) -> None:
    async def test() -> None:
        idle = 60.0 if start else 0.3
        async with (
            http_receiver(idle_timeout=idle, request_timeout=0.3) as rig,
            good_http_client(rig),
        ):
            reader, writer = await connect(rig)
            writer.write(start)

            async def keep_dripping() -> None:
                while True:
                    writer.write(drip)
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(keep_dripping())
            assert (await read_to_end(reader))[: len(answer) or None] == answer
            dripping.cancel()
            writer.close()
            await eventually(lambda: rig.receiver._admission.waiting_bytes <= len(TRACES))

    asyncio.run(test())


def test_who_does_not_fetch_answers_is_given_up(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with http_receiver(request_timeout=0.3) as rig, good_http_client(rig):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", rig.port))
            client.settimeout(0)
            loop = asyncio.get_running_loop()
            asking = b"GET / HTTP/1.1\r\n\r\n" * 1000

            async def ask_on_and_on() -> None:
                async with asyncio.timeout(PATIENCE):
                    while True:
                        await loop.sock_sendall(client, asking)

            with pytest.raises(ConnectionError):
                await ask_on_and_on()
            client.close()

    run(test())


def test_slow_bodies_do_not_keep_others_out() -> None:
    async def test() -> None:
        limits: dict[str, Any] = dict.fromkeys(
            ("max_request_bytes", "max_compressed_bytes"), 10_000
        )
        async with http_receiver(max_waiting_bytes=20_000, **limits) as rig:
            slow = []
            for _ in range(2):
                reader, writer = await connect(rig)
                writer.write(raw(body=b"x" * 10_000)[:-10])
                slow.append((reader, writer))
            await eventually(lambda: rig.receiver._admission.waiting_bytes >= 19_000)
            body = request_of(Signal.TRACES, 1, "n" * 5000)
            statuses: list[int] = []
            while not statuses or statuses[-1] != 200:
                statuses.append((await post(rig, body)).status_code)
                assert statuses[-1] in {200, 429}
                assert len(statuses) < 10_000
            (first, first_writer), (second, second_writer) = slow
            status, headers, _ = await read_answer(first)
            assert (status, headers["connection"]) == (503, "close")
            second_writer.write(b"x" * 10)
            assert (await read_answer(second))[0] == 200  # fields that nobody knows, no items
            first_writer.close()
            second_writer.close()
            assert rig.metrics.get("quiver.receiver.slow_closed_total", node="in") == 1

    asyncio.run(test())


# --- large ones -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "more", "status"),
    [
        (b"POST /v1/traces HTTP/1.1\r\nx: ", b"y" * 1000, 431),
        (b"POST /", b"y" * 1000, 431),
        (b"POST /v1/traces HTTP/1.1\r\n", b"x: y\r\n" * 100, 431),
        (raw(body=b"")[:-2] + b"x: " + b"y" * 66_000 + b"\r\n\r\n", b"", 431),
        (raw(body=b"")[:-2] + b"".join(b"x%d: y\r\n" % i for i in range(300)) + b"\r\n", b"", 431),
        (
            CHUNKED,
            b"400\r\n" + b"x" * 1024 + b"\r\n",
            413,
        ),
        (raw(body=b"x")[:-1].replace(b"length: 1", b"length: 99999999999"), b"x" * 1000, 413),
    ],
    ids=["a header", "the path", "headers", "one header", "many headers", "chunks", "a length"],
)
def test_what_does_not_end_is_stopped(start: bytes, more: bytes, status: int) -> None:
    async def test() -> None:
        async with http_receiver(max_request_bytes=100_000) as rig, good_http_client(rig):
            reader, writer = await connect(rig)
            writer.write(start)

            async def keep_sending() -> None:
                while more:
                    writer.write(more)
                    await writer.drain()

            sending = asyncio.create_task(keep_sending())
            assert (await read_answer(reader))[0] == status
            if more:
                assert await read_to_end(reader) == b""
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await sending
            writer.close()

    asyncio.run(test())


BOMB = bytes(100_000_000)
BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: gzip.compress(BOMB, 9),
    "deflate": lambda: raw_deflate(BOMB),
    "zstd": lambda: zstandard.compress(BOMB),
    "zstd without size": lambda: zstd_without_size(BOMB),
}


@pytest.mark.parametrize("kind", list(BOMBS))
def test_bombs_do_not_go_off(kind: str) -> None:
    async def test() -> None:
        bomb = BOMBS[kind]()
        encoding = kind.partition(" ")[0]
        async with http_receiver(max_request_bytes=1_000_000) as rig, good_http_client(rig):
            tracemalloc.start()
            answers = await asyncio.gather(
                *(post(rig, bomb, content_encoding=encoding) for _ in range(5))
            )
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert {answer.status_code for answer in answers} == {413}
            assert peak < 40_000_000  # not one of them was blown up to its size

    asyncio.run(test())


def test_many_small_requests_in_one_piece_are_no_large_header(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with http_receiver(max_header_bytes=1000) as rig:
            reader, writer = await connect(rig)
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 400 + raw() * 400)
            for index in range(800):
                assert (await read_answer(reader))[0] == (404 if index < 400 else 200)
            writer.close()
            assert rig.taker.requests == [TRACES] * 400

    run(test())


# --- wrong ones -------------------------------------------------------------------------------

GARBAGE = {
    "text": b"hello, is anybody there?\r\n\r\n",
    "zeros": bytes(1000),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "two lengths": b"POST /v1/traces HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    "length and chunks": b"POST /v1/traces HTTP/1.1\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /v1/traces HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    "a huge length": b"POST /v1/traces HTTP/1.1\r\ncontent-length: " + b"9" * 40 + b"\r\n\r\n",
    "a wrong chunk": CHUNKED + b"zz\r\n",
    "a header without colon": b"POST /v1/traces HTTP/1.1\r\nnonsense\r\n\r\n",
}


@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_is_answered_and_the_connection_closed(run: Callable[..., None], kind: str) -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            reader, writer = await connect(rig)
            writer.write(GARBAGE[kind] + b"\r\n\r\n")
            assert (await read_answer(reader))[0] == 400
            assert await read_to_end(reader) == b""
            writer.close()
            assert (await post(rig)).status_code == 200

    run(test())


def test_an_upgrade_is_not_taken_up() -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            reader, writer = await connect(rig)
            writer.write(raw(more="connection: upgrade\r\nupgrade: h2c\r\n"))
            assert (await read_answer(reader))[0] == 200
            assert await read_to_end(reader) == b""
            writer.close()
            reader, writer = await connect(rig)
            writer.write(b"CONNECT somewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n\x16\x03\x01")
            assert (await read_answer(reader))[0] in {400, 404, 405}
            assert await read_to_end(reader) == b""
            writer.close()
            assert (await post(rig)).status_code == 200

    asyncio.run(test())


def test_who_leaves_in_the_middle_leaves_nothing_behind(run: Callable[..., None]) -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker) as rig:
            for part in (raw()[:30], raw()[:-1], raw() * 3, raw() + raw()[:-1]):
                _, writer = await connect(rig)
                writer.write(part)
                await writer.drain()
                writer.transport.abort()
            await eventually(lambda: taker.waiting)
            taker.gate.set()
            await eventually(lambda: rig.metrics.get("quiver.receiver.connections", node="in") == 0)
            await eventually(lambda: rig.receiver._admission.waiting_requests == 0)
            assert rig.receiver._admission.waiting_bytes == 0
            assert (await post(rig)).status_code == 200

    run(test())


@settings(max_examples=30)
@given(
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=3)), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=4),
)
def test_damaged_requests_in_pieces_are_answered_or_closed(
    edits: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = bytearray(raw() * 3)
    for place, value in edits:
        start = place % len(data)
        data[start : start + 2] = value
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})

    async def test() -> None:
        async with http_receiver(request_timeout=0.05, idle_timeout=0.05) as rig:
            reader, writer = await connect(rig)
            for start, end in itertools.pairwise(places):
                writer.write(bytes(data[start:end]))
                await asyncio.sleep(0)
            answers = await read_to_end(reader)
            assert answers == b"" or answers.startswith(b"HTTP/1.1 ")
            writer.close()
            assert (await post(rig)).status_code == 200
            await eventually(lambda: rig.receiver._admission.waiting_bytes == 0)

    asyncio.run(test())


# --- many -------------------------------------------------------------------------------------


@pytest.fixture
def many() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MANY
    if soft < wanted and (hard >= wanted or hard == resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return min(MANY, soft // 4)


@pytest.mark.parametrize("room", [2.0, 0.1])
def test_many_idle_connections(run: Callable[..., None], many: int, room: float) -> None:
    async def test() -> None:
        limit = int(many * room)
        async with http_receiver(max_connections=limit) as rig, good_http_client(rig):
            idle = [await connect(rig) for _ in range(many)]
            try:
                for index, (_, writer) in enumerate(idle):
                    if index % 2 and not writer.is_closing():
                        writer.write(b"POST /v1/traces HTTP/1.1\r\n")
                before = len(rig.taker.items)
                await eventually(lambda: len(rig.taker.items) > before + 20)
                assert rig.metrics.get("quiver.receiver.connections", node="in") <= limit + 2
            finally:
                for _, writer in idle:
                    writer.transport.abort()

    run(test())


def test_busy_connections_are_not_closed_for_others() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker, max_connections=2) as rig:
            busy = [asyncio.create_task(post(rig)) for _ in range(2)]
            await eventually(lambda: taker.waiting == 2)
            reader, writer = await connect(rig)
            status, headers, _ = await read_answer(reader)
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
            writer.close()
            taker.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*busy)] == [200, 200]

    asyncio.run(test())


# --- gRPC -------------------------------------------------------------------------------------


def test_grpc_survives_the_same(run: Callable[..., None], many: int) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"

    async def test() -> None:
        async with grpc_receiver(max_request_bytes=1_000_000) as rig, good_grpc_client(rig):
            idle = [await connect(rig) for _ in range(many // 2)]
            for index, (_, writer) in enumerate(idle):
                writer.write((b"", preface, preface + b"\0\0\x10\x01\x04\0\0\0\x01")[index % 3])
            for garbage in (*GARBAGE.values(), raw(), preface + b"\xff" * 200):
                reader, writer = await connect(rig)
                writer.write(garbage + bytes(100))
                writer.write_eof()
                await read_to_end(reader)
                writer.close()
            async with grpc.aio.insecure_channel(rig.where) as channel:
                call: Any = channel.unary_unary(EXPORT)
                for body, compression in (
                    (bytes(1_000_001), grpc.Compression.NoCompression),
                    (bytes(50_000_000), grpc.Compression.Gzip),
                    (b"garbage", grpc.Compression.NoCompression),
                ):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call(body, compression=compression, timeout=PATIENCE)
            for _, writer in idle:
                writer.transport.abort()

    run(test())
