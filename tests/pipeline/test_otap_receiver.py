"""The OTAP receiver, against a sender that is told what to send."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from otap_peers import (
    attributes,
    client,
    is_taken,
    otap_exporter,
    otap_receiver,
    otlp_item,
    refusal,
    small,
    small_item,
    tables_of,
    telemetry,
)
from receiving import (
    BOUND,
    Collector,
    eventually,
    request_of,
)

from quiver.bundle import Signal, Slot
from quiver.errors import TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.item import Item
from quiver.pipeline.otap_streams import OtapDecoder
from quiver.pipeline.otap_wire import (
    ArrowPayload,
    BatchArrowRecords,
    BatchCode,
    BatchStatus,
)


def test_statuses_come_as_batches_are_taken_and_so_many_at_once() -> None:
    async def run() -> None:
        gates = [asyncio.Event() for _ in range(3)]
        taker = Collector()
        order: list[int] = []

        async def take(item: Item) -> None:
            number = item.tables[Slot.SPANS].num_rows - 1
            order.append(number)
            await gates[number].wait()

        taker.take = take  # type: ignore[method-assign]
        async with (
            otap_receiver(taker, response_stream_channel_size=2) as rig,
            client(rig) as sender,
        ):
            for number in range(3):
                await sender.send(100 + number, small(count=number + 1))
            await eventually(lambda: order == [0, 1])
            health = health_pb2_grpc.HealthStub(sender.channel)
            for _ in range(5):  # the third batch came in before these, and had its chance
                await health.Check(health_pb2.HealthCheckRequest())
            assert order == [0, 1]
            gates[1].set()
            assert await sender.status() == BatchStatus(101)
            await eventually(lambda: order == [0, 1, 2])
            gates[2].set()
            assert await sender.status() == BatchStatus(102)
            await sender.call.done_writing()
            for _ in range(5):  # so that the end of the stream is seen before the batch is taken
                await health.Check(health_pb2.HealthCheckRequest())
            gates[0].set()
            assert await sender.status() == BatchStatus(100)
            assert await sender.end() == (grpc.StatusCode.OK, "")

    asyncio.run(run())


def test_many_statuses_at_the_same_time() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker) as rig, client(rig) as sender:
            for number in range(60):
                await sender.send(number, small())
            await eventually(lambda: taker.waiting == 60)
            taker.gate.set()
            got = {(await sender.status()).batch_id for _ in range(60)}
            assert got == set(range(60))
            assert rig.metrics.get("quiver.receiver.answers_lost_total", node="in") == 0

    asyncio.run(run())


def test_a_batch_without_rows_is_taken_and_goes_nowhere() -> None:
    async def run() -> None:
        async with otap_receiver() as rig, client(rig) as sender:
            await sender.send(1, {Slot.SPANS: small()[Slot.SPANS].slice(0, 0)})
            assert await sender.status() == BatchStatus(1)
            assert not rig.taker.items

    asyncio.run(run())


def test_a_batch_that_is_no_otap_is_refused_alone() -> None:
    async def run() -> None:
        async with otap_receiver() as rig, client(rig) as sender:
            await sender.send(1, small(Signal.LOGS))
            wrong = await sender.status()
            assert (wrong.batch_id, wrong.code) == (1, BatchCode.INVALID_ARGUMENT)
            assert "LOGS" in wrong.message
            await sender.send(2, small())
            assert await sender.status() == BatchStatus(2)
            refused = rig.metrics.get(
                "quiver.receiver.refused_total", node="in", reason="malformed"
            )
            assert refused == 1

    asyncio.run(run())


def test_a_poisoned_stream_ends_after_the_batches_before() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker) as rig, client(rig) as sender:
            await sender.send(1, small())
            good = sender.encoder.encode(small())
            bad = [ArrowPayload(p.schema_id, p.type, p.record[:-8]) for p in good]
            await sender.write(BatchArrowRecords(2, bad))
            poisoned = await sender.status()
            assert (poisoned.batch_id, poisoned.code) == (2, BatchCode.INVALID_ARGUMENT)
            taker.gate.set()
            assert await sender.status() == BatchStatus(1)
            code, details = await sender.end()
            assert code is grpc.StatusCode.ABORTED
            assert "batch 2: SPANS" in details
            assert len(taker.items) == 1
            broken = rig.metrics.get("quiver.receiver.streams_broken_total", node="in")
            assert broken == 1

    asyncio.run(run())


def test_a_defect_while_a_batch_is_read_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(_: OtapDecoder, __: BatchArrowRecords) -> None:
        raise RuntimeError("a defect")

    async def run() -> None:
        async with otap_receiver() as rig, client(rig) as sender:
            monkeypatch.setattr(OtapDecoder, "decode", decode)
            await sender.send(1, small())
            status = await sender.status()
            assert (status.batch_id, status.code) == (1, BatchCode.UNAVAILABLE)
            assert (await sender.end())[0] is grpc.StatusCode.ABORTED

    asyncio.run(run())


def test_what_is_no_message_ends_the_stream() -> None:
    async def run() -> None:
        async with otap_receiver() as rig, client(rig) as sender:
            await sender.call.write(b"\xff\xff")
            code, details = await sender.end()
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "BatchArrowRecords" in details

    asyncio.run(run())


def test_a_stream_that_remembers_too_much_begins_anew() -> None:
    """Dictionaries are large here, and the exporter sends the batch again in a new stream."""
    words = [f"{number:04d}" * 300 for number in range(200)]

    def item(start: int) -> Item:
        spans = small()[Slot.SPANS]
        at = spans.schema.get_field_index("name")
        values = pa.array(words[start : start + 3]).dictionary_encode()
        return Item(
            signal=Signal.TRACES,
            tables={Slot.SPANS: spans.set_column(at, "name", values)},
        )

    async def run() -> None:
        metrics = Metrics()
        async with (
            otap_receiver(max_stream_bytes=8_000) as rig,
            otap_exporter(rig.port, metrics) as node,
        ):
            await node.take(item(0))
            big = await refusal(
                node,
                Item(
                    signal=Signal.TRACES,
                    tables={**item(3).tables, Slot.SPAN_ATTRS: attributes(words)},
                ),
            )
            assert isinstance(big, TryLater)
            assert "max_stream_bytes" in str(big)
            async with asyncio.timeout(BOUND):
                while not await is_taken(node, item(6)):
                    pass  # the old stream has not ended yet
            assert metrics.get("quiver.exporter.streams_total", node="out") == 2
            assert len(rig.taker.items) == 2

    asyncio.run(run())


def test_who_remembers_too_much_is_told_so() -> None:
    words = [f"{number:04d}" * 500 for number in range(5)]

    async def run() -> None:
        async with otap_receiver(max_stream_bytes=8_000) as rig, client(rig) as sender:
            await sender.send(1, small())
            assert await sender.status() == BatchStatus(1)
            await sender.send(2, {**small(), Slot.SPAN_ATTRS: attributes(words)})
            status = await sender.status()
            assert (status.batch_id, status.code) == (2, BatchCode.RESOURCE_EXHAUSTED)
            assert (await sender.end())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with otap_receiver(max_stream_bytes=8_000) as rig, client(rig) as sender:
            await sender.send(1, {**small(), Slot.SPAN_ATTRS: attributes(words)})
            status = await sender.status()
            assert (status.batch_id, status.code) == (1, BatchCode.INVALID_ARGUMENT)
            assert (await sender.end())[0] is grpc.StatusCode.ABORTED

    asyncio.run(run())


def test_there_are_only_so_many_streams() -> None:
    async def run() -> None:
        async with otap_receiver(max_streams=1) as rig, client(rig) as first:
            await first.send(1, small())
            assert await first.status() == BatchStatus(1)
            async with client(rig) as second:
                code, details = await second.end()
                assert code is grpc.StatusCode.UNAVAILABLE
                assert "too many streams" in details
            refused = rig.metrics.get("quiver.receiver.streams_refused_total", node="in")
            assert refused == 1
            await first.call.done_writing()
            assert (await first.end())[0] is grpc.StatusCode.OK
            await eventually(lambda: rig.metrics.get("quiver.receiver.streams", node="in") == 0)
            async with client(rig) as third:
                await third.send(1, small())
                assert await third.status() == BatchStatus(1)

    asyncio.run(run())


def test_what_waits_is_limited() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker, max_waiting_requests=1) as rig, client(rig) as sender:
            await sender.send(1, small())
            await sender.send(2, small())
            busy = await sender.status()
            assert (busy.batch_id, busy.code) == (2, BatchCode.RESOURCE_EXHAUSTED)
            assert "try again later" in busy.message
            taker.gate.set()
            assert await sender.status() == BatchStatus(1)
            await sender.send(3, small())
            assert await sender.status() == BatchStatus(3)
            assert rig.metrics.get("quiver.receiver.waiting_bytes", node="in") == 0

    asyncio.run(run())


def test_under_pressure_batches_are_refused_and_the_stream_still_understands() -> None:
    async def run() -> None:
        short = False
        async with otap_receiver(pressure=lambda: short) as rig, client(rig) as sender:
            await sender.send(1, small())
            assert await sender.status() == BatchStatus(1)
            short = True
            await sender.send(2, tables_of(Signal.TRACES, telemetry(Signal.TRACES, 1)[0]))
            refused = await sender.status()
            assert (refused.batch_id, refused.code) == (2, BatchCode.RESOURCE_EXHAUSTED)
            async with client(rig) as other:
                assert (await other.end())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            short = False
            await sender.send(3, tables_of(Signal.TRACES, telemetry(Signal.TRACES, 1)[0]))
            assert await sender.status() == BatchStatus(3)

    asyncio.run(run())


def test_under_pressure_a_stream_that_remembers_much_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quiver.pipeline.receivers.otap._WORTH_FREEING", 1)

    async def run() -> None:
        short = False
        async with otap_receiver(pressure=lambda: short) as rig, client(rig) as sender:
            await sender.send(1, small())
            assert await sender.status() == BatchStatus(1)
            short = True
            await sender.send(2, small())
            assert (await sender.status()).code == BatchCode.RESOURCE_EXHAUSTED
            code, details = await sender.end()
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "begin a new stream" in details
            await eventually(
                lambda: rig.metrics.get("quiver.receiver.stream_bytes", node="in") == 0
            )

    asyncio.run(run())


def test_bytes_that_wait_are_limited() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        limit: dict[str, Any] = {
            f"max_{what}_bytes": 40_000 for what in ("request", "compressed", "waiting")
        }
        large = tables_of(Signal.TRACES, request_of(Signal.TRACES, 500))
        size = Item(signal=Signal.TRACES, tables=large).size
        assert 20_000 < size < 40_000
        async with otap_receiver(taker, **limit) as rig, client(rig) as sender:
            await sender.send(1, large)
            await sender.send(2, large)
            busy = await sender.status()
            assert (busy.batch_id, busy.code) == (2, BatchCode.RESOURCE_EXHAUSTED)
            assert "too many bytes" in busy.message
            taker.gate.set()
            assert await sender.status() == BatchStatus(1)
            await sender.send(3, large)
            assert await sender.status() == BatchStatus(3)

    asyncio.run(run())


def test_a_message_that_is_too_large_ends_the_stream_and_is_found() -> None:
    async def run() -> None:
        async with otap_receiver(max_request_bytes=20_000) as rig, otap_exporter(rig.port) as node:
            await node.take(small_item())
            large = otlp_item(Signal.TRACES, *telemetry(Signal.TRACES, 1, items=200))
            error = await refusal(node, large)
            assert isinstance(error, Undeliverable)
            assert "larger than max" in str(error)
            await node.take(small_item())
            assert len(rig.taker.items) == 2

    asyncio.run(run())


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker) as rig:
            async with client(rig) as sender:
                await sender.send(1, small())
                await eventually(lambda: taker.waiting == 1)
                sender.call.cancel()
            await eventually(lambda: rig.metrics.get("quiver.receiver.streams", node="in") == 0)
            await eventually(
                lambda: rig.metrics.get("quiver.receiver.waiting_requests", node="in") == 0
            )
            taker.gate.set()

    asyncio.run(run())


def test_health() -> None:
    async def run() -> None:
        async with otap_receiver() as rig, grpc.aio.insecure_channel(rig.where) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            service = "opentelemetry.proto.experimental.arrow.v1.ArrowLogsService"
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            unknown: Any = channel.stream_stream("/opentelemetry.other/Method")()
            assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())


def test_dictionaries_grow_in_a_stream() -> None:
    """Each batch sends only the keys that are new, and is stored with those that it uses."""
    plain = attributes(["k"] * 5)
    words = [f"key {number:05d}" * 5 for number in range(1_500)]

    def batch(known: int, used: int) -> pa.RecordBatch:
        indices = pa.array([used] * 5, pa.int32())
        keys = pa.DictionaryArray.from_arrays(indices, pa.array(words[:known]))
        columns: list[Any] = [plain.column(0), keys, plain.column(2), plain.column(3)]
        return pa.RecordBatch.from_arrays(columns, schema=plain.schema)

    async def run() -> None:
        file = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression="zstd")
        writer = pa.ipc.new_stream(pa.PythonFile(file, mode="w"), plain.schema, options=options)
        async with otap_receiver() as rig, client(rig) as sender:
            for number, (known, used) in enumerate([(500, 3), (1_000, 700), (1_500, 1_499)]):
                start = file.tell() if number else 0
                writer.write_batch(batch(known, used))
                grown = ArrowPayload("attrs", Slot.SPAN_ATTRS, file.getvalue()[start:])
                root = sender.encoder.encode(small())
                await sender.write(BatchArrowRecords(number, [*root, grown]))
                assert await sender.status() == BatchStatus(number)
                stored: Any = rig.taker.items[number].tables[Slot.SPAN_ATTRS]
                assert stored.column(1).to_pylist() == [words[used]] * 5
                assert stored.nbytes < 500
            assert writer.stats.num_dictionary_deltas == 2

    asyncio.run(run())
