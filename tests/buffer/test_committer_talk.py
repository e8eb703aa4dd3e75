"""What producers and a committer say to each other, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from unittest import mock

import pytest
from queues import (
    MANIFEST,
    entry_of,
    pending_of,
    producer_of,
    queued,
    queued_records,
    take_out,
)

from quiver.buffer.appender import Appender, Clock, Instant, Pending, wall_clock_ms
from quiver.buffer.committer import Committer
from quiver.buffer.committer_client import CommitterFirst, parse_address
from quiver.buffer.committer_wire import MAX_FRAME, Append, Done, Refused, decode, read_frame
from quiver.buffer.handles import Durable
from quiver.buffer.types import Metadata
from quiver.config import ProducerConfig, QueueConfig
from quiver.errors import FormatError, InvalidConfig, QueueReset
from quiver.metrics import Metrics
from quiver.testing.objects import SimulatedObjects
from quiver.testing.virtual_time import now_ms, run

QUICK = QueueConfig(attempt_timeout=2.0)


def asked(*names: str, age_ms: int = 0, patience_ms: int = 10_000, request_id: int = 7) -> Append:
    entries = tuple(entry_of(name) for name in names)
    return Append(request_id, age_ms, patience_ms, MANIFEST, entries)


def writes(objects: SimulatedObjects) -> int:
    return sum(call.kind == "put_if" and call.outcome == "done" for call in objects.calls)


# --- Frames -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [asked("A", "B"), Done(2**64 - 1, (0, 2**64 - 1)), Done(1, ()), Refused(3, True, "wörd")],  # noqa: FBT003
)
def test_a_message_comes_back_from_its_frame(message: Append | Done | Refused) -> None:
    frame = message.encode()
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert decode(frame[4:], source="x") == message


def test_a_frame_that_does_not_add_up_is_refused() -> None:
    for message in (asked("A", "B"), Done(1, (2, 3))):
        frame = message.encode()[4:]
        for end in range(len(frame)):
            with pytest.raises(FormatError):
                decode(frame[:end], source="x")
        for kind in (b"\x02\x01", b"\x01\x00", b"\x01\x04"):
            with pytest.raises(FormatError):
                decode(kind + frame[2:], source="x")
    with pytest.raises(FormatError):
        decode(Refused(1, unclear=True, reason="").encode()[4:-1], source="x")
    with pytest.raises(FormatError, match="without entries"):
        decode(Append(1, 0, 0, MANIFEST, ()).encode()[4:], source="x")


def test_any_byte_of_a_frame_may_be_wrong() -> None:
    frame = asked("A", "B").encode()[4:]
    random = Random(1)
    for _ in range(3000):
        broken = bytearray(frame)
        broken[random.randrange(len(frame))] = random.randrange(256)
        with contextlib.suppress(FormatError):
            decode(bytes(broken), source="x")


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(InvalidConfig, match="host:port"):
        parse_address(address)


def test_an_address_may_be_that_of_version_six() -> None:
    assert parse_address("[::1]:4000") == ("::1", 4000)
    assert parse_address("a.b:4000") == ("a.b", 4000)


# --- Over sockets -----------------------------------------------------------------------------


def real_objects(seed: int = 0) -> SimulatedObjects:
    return SimulatedObjects(Random(seed), latency=(0.0005, 0.002), now_ms=wall_clock_ms)


def real_committer(
    objects: SimulatedObjects,
    *,
    metrics: Metrics | None = None,
    max_connections: int = 100,
    idle_timeout: float = 60,
) -> Committer:
    return Committer(
        objects,
        QUICK,
        metrics=metrics,
        random=Random(0),
        max_connections=max_connections,
        idle_timeout=idle_timeout,
    )


def asking(address: tuple[str, int]) -> ProducerConfig:
    return ProducerConfig(queue=QUICK, flush_size_bytes=1, committer=f"{address[0]}:{address[1]}")


async def talk(address: tuple[str, int], *frames: bytes) -> list[Append | Done | Refused]:
    """Send frames and hang up; the answers until then."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"".join(frames))
    answers = []
    with contextlib.suppress(ConnectionError):
        writer.write_eof()
        async with asyncio.timeout(10):
            while frame := await read_frame(reader, source="committer", idle=None, whole=None):
                answers.append(decode(frame, source="committer"))
    writer.close()
    return answers


def test_many_producers_share_the_writes_of_one_committer() -> None:
    async def main() -> None:
        objects, metrics = real_objects(), Metrics()
        async with real_committer(objects) as committer:
            config = asking(await committer.start())

            async def produce(number: int) -> list[int]:
                producer = producer_of(
                    objects, config, metrics=metrics, seed=number, clock=wall_clock_ms
                )
                handles = [await producer.produce([b"%d %d" % (number, n)]) for n in range(20)]
                sequences = [(await handle.watcher.durable()).sequence for handle in handles]
                await producer.close()
                assert producer.conflict_rate == 0
                return sequences

            written = await asyncio.gather(*(produce(number) for number in range(10)))
            assert committer.conflict_rate == 0
        assert all(sequences == sorted(sequences) for sequences in written)
        batches = [record.decode() for (record,) in queued_records(objects)]
        for number, sequences in enumerate(written):
            assert [batches[n] for n in sequences] == [f"{number} {n}" for n in range(20)]
        assert len(batches) == 200
        assert metrics.get("buffer.committer_failures") == 0
        assert metrics.get("buffer.manifest_writes", role="producer") == 0
        assert writes(objects) < 120

    asyncio.run(main())


def test_producers_go_on_without_a_committer_that_was_killed_and_find_a_new_one() -> None:
    async def main() -> None:
        objects, metrics = real_objects(), Metrics()
        committer = real_committer(objects)
        address = await committer.start()
        producers = [
            producer_of(objects, asking(address), metrics=metrics, seed=n, clock=wall_clock_ms)
            for n in range(4)
        ]

        async def produce(names: str) -> None:
            async def one(number: int) -> None:
                handles = [
                    await producers[number].produce([f"{number}{name}".encode()]) for name in names
                ]
                for handle in handles:
                    assert isinstance(await handle.watcher.durable(), Durable)

            await asyncio.gather(*map(one, range(4)))

        await produce("abc")
        assert metrics.get("buffer.manifest_writes", role="producer") == 0
        producing = asyncio.create_task(produce("defghijk"))
        await asyncio.sleep(0.004)
        await committer.close()
        await producing
        assert metrics.get("buffer.manifest_writes", role="producer") > 0
        asked_before = metrics.get("buffer.committer_appends")
        async with real_committer(objects) as successor:
            await successor.start(*address)
            for producer in producers:
                producer._committer._rests_until = 0  # type: ignore[union-attr] # the rest is over
            await produce("lmn")
        assert metrics.get("buffer.committer_appends") > asked_before
        for producer in producers:
            await producer.close()
        names = [record.decode() for (record,) in queued_records(objects)]
        for number in range(4):
            own = [name[1] for name in names if name[0] == str(number)]
            assert own == list("abcdefghijklmn")

    asyncio.run(main())


def test_a_committer_that_does_not_answer_is_done_without() -> None:
    async def main() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        objects, metrics = real_objects(), Metrics()
        config = ProducerConfig(
            queue=QueueConfig(attempt_timeout=0.2),
            committer=f"127.0.0.1:{server.sockets[0].getsockname()[1]}",
        )
        producer = producer_of(objects, config, metrics=metrics, clock=wall_clock_ms)
        for name in (b"a", b"b"):
            await (await producer.produce([name])).watcher.durable()
        assert metrics.get("buffer.committer_failures") == 1  # and then left alone
        await producer.close()
        server.close()
        assert queued_records(objects) == [(b"a",), (b"b",)]

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x05\x00\x00\x00hello",
        Done(99, (0,)).encode(),
        Done(1, (0, 1)).encode(),
        asked("A").encode(),
        Refused(1, unclear=True, reason="no").encode(),
    ],
)
def test_an_answer_that_makes_no_sense_is_none(answer: bytes) -> None:
    async def main() -> None:
        async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_frame(reader, source="producer", idle=None, whole=None)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(strange, "127.0.0.1", 0)
        objects = real_objects()
        config = asking(server.sockets[0].getsockname()[:2])
        producer = producer_of(objects, config, clock=wall_clock_ms)
        assert (await (await producer.produce([b"a"])).watcher.durable()).sequence == 0
        await producer.close()
        server.close()
        assert queued_records(objects) == [(b"a",)]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (asked("A")._replace(manifest_path="other/manifest"), "this committer writes"),
        (asked("A")._replace(entries=(entry_of("A")._replace(location="x/y"),)), "not a batch"),
        (asked("A"), "not in the object store"),
    ],
)
def test_a_request_for_another_queue_is_refused(frame: Append, reason: str) -> None:
    async def main() -> None:
        objects = real_objects()
        async with real_committer(objects) as committer:
            (answer,) = await talk(await committer.start(), frame.encode())
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        assert not answer.unclear
        assert queued(objects) == ()

    asyncio.run(main())


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME + 1).to_bytes(4, "little"),
        b"\x01",
        b"\x05\x00\x00\x00hello",
        Done(1, ()).encode(),
        asked("A").encode()[:-1],
    ],
)
def test_who_does_not_speak_the_language_is_hung_up_on(frame: bytes) -> None:
    async def main() -> None:
        objects = real_objects()
        objects.plant(entry_of("A").location, b"x")
        async with real_committer(objects) as committer:
            address = await committer.start()
            assert await talk(address, frame) == []
            assert await talk(address, asked("A").encode()) == [Done(7, (0,))]

    asyncio.run(main())


def test_a_frame_that_is_too_large_is_not_waited_for() -> None:
    async def main() -> None:
        async with real_committer(real_objects()) as committer:
            reader, writer = await asyncio.open_connection(*await committer.start())
            writer.write((MAX_FRAME + 1).to_bytes(4, "little"))
            async with asyncio.timeout(1):  # less than a frame may take
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_a_frame_that_does_not_end_is_not_waited_for() -> None:
    async def main() -> None:
        objects = real_objects()
        config = QueueConfig(attempt_timeout=0.1)
        async with Committer(objects, config, random=Random(0)) as committer:
            reader, writer = await asyncio.open_connection(*await committer.start())
            writer.write(asked("A").encode()[:-1])
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_one_connection_too_many_is_refused_and_a_silent_one_is_closed() -> None:
    async def main() -> None:
        objects = real_objects()
        objects.plant(entry_of("A").location, b"x")
        async with real_committer(objects, max_connections=1, idle_timeout=0.2) as committer:
            address = await committer.start()
            reader, writer = await asyncio.open_connection(*address)
            (answer,) = await talk(address)
            assert isinstance(answer, Refused)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
            assert await talk(address, asked("A").encode()) == [Done(7, (0,))]

    asyncio.run(main())


def test_a_request_too_large_for_a_frame_is_done_directly() -> None:
    async def main() -> None:
        objects, metrics = real_objects(), Metrics()
        async with real_committer(objects) as committer:
            config = asking(await committer.start())
            producer = producer_of(objects, config, metrics=metrics, clock=wall_clock_ms)
            await (await producer.produce([b"a"])).watcher.durable()
            assert metrics.get("buffer.committer_appends") == 1
            now = Instant(asyncio.get_running_loop().time(), wall_clock_ms())
            large = (Metadata(0, 1, bytes(1024 * 1024)),)
            pending = [Pending(entry_of(name)._replace(metadata=large), now) for name in "ABCDE"]
            assert producer._committer is not None
            assert await producer._committer.append(pending) == [1, 2, 3, 4, 5]
            await (await producer.produce([b"b"])).watcher.durable()
            await producer.close()
        assert len(queued(objects)) == 7
        assert metrics.get("buffer.committer_appends") == 2
        assert metrics.get("buffer.committer_failures") == 0

    asyncio.run(main())


def test_a_full_queue_is_full_through_a_committer_too() -> None:
    async def main() -> None:
        objects = real_objects()
        config = QueueConfig(max_manifest_bytes=1024, attempt_timeout=2)
        async with Committer(objects, config, random=Random(0)) as committer:
            host, port = await committer.start()
            producer = producer_of(
                objects,
                ProducerConfig(queue=config, flush_size_bytes=1, committer=f"{host}:{port}"),
                clock=wall_clock_ms,
            )
            handles = [await producer.produce([b"a"]) for _ in range(20)]
            outcomes = [await handle.watcher._settling.wait() for handle in handles]
            assert {type(outcome).__name__ for outcome in outcomes} == {"Durable", "QueueFull"}
            take_out(objects, 3)
            await (await producer.produce([b"b"])).watcher.durable()
            await producer.close()

    asyncio.run(main())


def test_closing_hangs_up_on_everybody() -> None:
    async def main() -> None:
        committer = real_committer(real_objects())
        address = await committer.start()
        serving = asyncio.create_task(committer.serve_forever())
        reader, writer = await asyncio.open_connection(*address)
        await asyncio.sleep(0.01)
        await committer.close()
        await serving
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError, match=r"refused|failed|Connect"):
            await asyncio.open_connection(*address)

    asyncio.run(main())


def test_what_the_committer_said_is_known_when_it_is_gone() -> None:
    async def script() -> None:
        objects = SimulatedObjects(Random(1))
        clock, random, metrics = Clock(now_ms), Random(1), Metrics()
        direct = Appender(
            objects, QueueConfig(), clock=clock, random=random, metrics=metrics, role="producer"
        )
        client = CommitterFirst("c:1", direct, QueueConfig(), clock, random, metrics)
        with mock.patch.object(client, "_ask", mock.AsyncMock(return_value=[41])):
            assert await client.append([pending_of("A")]) == [41]
        with (
            mock.patch.object(client, "_ask", mock.AsyncMock(side_effect=ConnectionRefusedError)),
            pytest.raises(QueueReset),
        ):
            await client.append([pending_of("B")])  # to a manifest that begins again at 0

    run(script())
