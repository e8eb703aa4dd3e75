"""The OTLP exporters, against real servers that answer as they are told: what both have."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pyarrow as pa
import pytest
from answering import BOUND, GRPC, HTTP, Answer, Protocol, Server, item, refusal
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsPartialSuccess,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from quiver import Signal
from quiver.bundle import Slot
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.otlp.convert import to_otap
from quiver.pipeline.dead_letters import DeadLetters
from quiver.pipeline.item import Item, from_bundle
from quiver.pipeline.persistence import Persistence
from quiver.pipeline.settings.options import (
    PersistenceOptions,
    RetentionOptions,
    RetryOptions,
    SegmentOptions,
)
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = [Signal.TRACES, Signal.LOGS, Signal.METRICS]
both = pytest.mark.parametrize("protocol", [GRPC, HTTP], ids=str)


@both
@pytest.mark.parametrize("signal", SIGNALS)
def test_requests_go_out_unchanged(protocol: Protocol, signal: Signal) -> None:
    requests = Telemetry(1, Shape(items_per_request=20)).take(signal, 3)

    async def run() -> None:
        async with protocol.server(Server()) as server, protocol.exporter(server) as node:
            await node.take(item(*requests, b"\xff not even protobuf", signal=signal))
            assert sorted(server.bodies) == sorted([*requests, b"\xff not even protobuf"])
            assert all(str(signal)[:5] in path for path, _, _ in server.got)

    asyncio.run(run())


@both
def test_otap_tables_arrive_as_a_request(protocol: Protocol) -> None:
    (request,) = Telemetry(2, Shape(items_per_request=400)).take(Signal.TRACES, 1)
    (tables,) = to_otap(Signal.TRACES, [request]).batches

    def spans(data: bytes) -> list[bytes]:
        return sorted(
            span.SerializeToString(deterministic=True)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        )

    async def run() -> None:
        async with protocol.server(Server()) as server, protocol.exporter(server) as node:
            await node.take(Item(signal=Signal.TRACES, tables=tables))
            assert spans(server.bodies[0]) == spans(request)
            without: dict[Slot, pa.RecordBatch] = {
                slot: table for slot, table in tables.items() if slot != Slot.SPANS
            }
            broken = await refusal(node, Item(signal=Signal.TRACES, tables=without))
            assert isinstance(broken, Undeliverable)

    asyncio.run(run())


@both
def test_taken_means_answered(protocol: Protocol) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        server = Server(gate=gate.wait)
        async with protocol.server(server), protocol.exporter(server) as node:
            taking = asyncio.create_task(node.take(item(b"")))
            await server.until(1)
            assert not taking.done()
            gate.set()
            async with asyncio.timeout(BOUND):
                await taking

    asyncio.run(run())


@both
def test_at_most_max_in_flight_at_the_same_time(protocol: Protocol) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        server, metrics = Server(gate=gate.wait), Metrics()
        options = {"metrics": metrics, "max_in_flight": 3}
        async with protocol.server(server), protocol.exporter(server, **options) as node:
            taking = [
                asyncio.create_task(node.take(item(*(b"%d" % n for n in range(4)))))
                for _ in range(3)
            ]
            await server.until(3)
            assert metrics.get("quiver.exporter.in_flight", node="out") == 3
            assert metrics.get("quiver.exporter.waiting", node="out") == 9
            gate.set()
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*taking)
        assert (len(server.got), server.most_at_once) == (12, 3)
        assert metrics.get("quiver.exporter.items_total", node="out") == 3

    asyncio.run(run())


@both
@pytest.mark.parametrize(
    "headers", [{"a b": "x"}, {"": "x"}, {"key-bin": "x"}, {"key": "hush\n"}, {"key": "hush\u20ac"}]
)
def test_headers_that_cannot_be_sent(protocol: Protocol, headers: dict[str, str]) -> None:
    async def run() -> None:
        with pytest.raises(InvalidConfig, match="header") as caught:
            await protocol.exporter(Server(), headers=headers).__aenter__()
        assert "hush" not in str(caught.value)

    asyncio.run(run())


@both
def test_an_item_is_refused_when_one_request_is(protocol: Protocol) -> None:
    answers = {b"good": Answer(), b"later": protocol.later, b"never": protocol.never}

    async def run() -> None:
        server = Server(answers.__getitem__)
        async with protocol.server(server), protocol.exporter(server) as node:
            await node.take(item(b"good", b"good"))
            never = await refusal(node, item(b"good", b"never", b"good"))
            assert isinstance(never, Undeliverable)
            assert "1 of 3 requests" in str(never)
            assert "bad span" in str(never)
            later = await refusal(node, item(b"never", b"later"))
            assert isinstance(later, TryLater)
            assert "busy" in str(later)

    asyncio.run(run())


@both
def test_a_server_that_is_away_is_found_again(protocol: Protocol) -> None:
    async def run() -> None:
        server = Server()
        async with protocol.server(server):
            pass
        async with protocol.exporter(server) as node:
            assert isinstance(await refusal(node, item(b"1")), TryLater)
            async with protocol.server(server):
                async with asyncio.timeout(BOUND):
                    while not server.got:
                        try:
                            await node.take(item(b"2"))
                        except TryLater:
                            await asyncio.sleep(0.05)
            assert isinstance(await refusal(node, item(b"3")), TryLater)

    asyncio.run(run())


@both
def test_no_answer_in_time(protocol: Protocol) -> None:
    async def run() -> None:
        server = Server(gate=asyncio.Event().wait)
        async with protocol.server(server), protocol.exporter(server, timeout=0.2) as node:
            assert isinstance(await refusal(node, item(b"")), TryLater)

    asyncio.run(run())


@both
def test_stopping_cuts_short_what_has_no_answer(protocol: Protocol) -> None:
    async def run() -> None:
        server = Server(gate=asyncio.Event().wait)
        async with protocol.server(server), protocol.exporter(server) as node:
            taking = asyncio.create_task(refusal(node, item(b"")))
            await server.until(1)
            await node.stop(asyncio.get_running_loop().time() + 0.05)
            async with asyncio.timeout(BOUND):
                assert isinstance(await taking, TryLater)
            assert isinstance(await refusal(node, item(b"")), TryLater)

    asyncio.run(run())


@both
def test_who_cancels_is_cancelled(protocol: Protocol) -> None:
    async def run() -> None:
        server = Server(gate=asyncio.Event().wait)
        async with protocol.server(server), protocol.exporter(server) as node:
            taking = asyncio.create_task(node.take(item(b"")))
            await server.until(1)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking

    asyncio.run(run())


@both
@pytest.mark.parametrize(
    ("signal", "body"),
    [
        (
            Signal.TRACES,
            ExportTraceServiceResponse(
                partial_success=ExportTracePartialSuccess(rejected_spans=3, error_message="too old")
            ),
        ),
        (
            Signal.LOGS,
            ExportLogsServiceResponse(
                partial_success=ExportLogsPartialSuccess(
                    rejected_log_records=3, error_message="too old"
                )
            ),
        ),
        (
            Signal.METRICS,
            ExportMetricsServiceResponse(
                partial_success=ExportMetricsPartialSuccess(
                    rejected_data_points=3, error_message="too old"
                )
            ),
        ),
    ],
)
def test_rejected_items_are_counted_and_not_sent_again(
    protocol: Protocol, signal: Signal, body: Message, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        metrics = Metrics()
        server = Server(lambda _: Answer(body=body.SerializeToString()))
        async with protocol.server(server), protocol.exporter(server, metrics=metrics) as node:
            await node.take(item(b"1", signal=signal))
            await node.take(item(b"2", signal=signal))
        assert len(server.got) == 2
        name = "quiver.exporter.rejected_items_total"
        assert metrics.get(name, node="out", signal=signal) == 6

    asyncio.run(run())
    assert caplog.text.count("too old") == 1


@both
def test_behind_a_store_everything_arrives_and_only_bad_requests_do_not(
    protocol: Protocol, tmp_path: Path
) -> None:
    chance = random.Random(7)
    good = {b"good %d" % n for n in range(60)}
    bad = {b"bad %d" % n for n in range(5)}
    arrived: set[bytes] = set()

    def answer(body: bytes) -> Answer:
        if chance.random() < 0.5:
            return protocol.later
        if body in bad:
            return protocol.never
        arrived.add(body)
        return Answer()

    async def run() -> None:
        server = Server(answer)
        options = PersistenceOptions(
            path=tmp_path,
            retry=RetryOptions(initial_interval=0.01, max_interval=0.02),
            segment=SegmentOptions(max_open_duration=0.02),
            retention=RetentionOptions(min_free_space=0),
        )
        async with protocol.server(server), protocol.exporter(server) as node:
            store = Persistence("store", options, [node], chance=random.Random(1))
            await store.start()
            await asyncio.gather(*(store.take(item(body)) for body in sorted(good | bad)))
            letters = DeadLetters(RealDisk(), store.directory, 2**30)
            async with asyncio.timeout(BOUND):
                while arrived != good or len(letters.list()) < len(bad):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.02)
            await store.stop(asyncio.get_running_loop().time() + BOUND)
        assert {from_bundle(letters.bundle(each)).requests[0] for each in letters.list()} == bad
        assert all("bad span" in each.reason for each in letters.list())

    asyncio.run(run())
