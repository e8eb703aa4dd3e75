"""The OTAP exporter, against a server that answers as it is told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest
from otap_peers import (
    Delayed,
    attributes,
    is_taken,
    otap_exporter,
    otlp_item,
    plain_server,
    refusal,
    small,
    small_item,
    tables_of,
    telemetry,
)
from receiving import (
    BOUND,
    request_of,
)

from quiver.bundle import Signal, Slot
from quiver.errors import DeliveryError, InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.exporters import otap
from quiver.pipeline.exporters.otap import OtapExporter
from quiver.pipeline.item import Item
from quiver.pipeline.otap_wire import (
    BatchArrowRecords,
    BatchCode,
    BatchStatus,
)
from quiver.pipeline.settings.options import (
    ArrowOptions,
    OtapExporterOptions,
)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (BatchCode.INVALID_ARGUMENT, Undeliverable),
        (BatchCode.UNAVAILABLE, TryLater),
        (BatchCode.RESOURCE_EXHAUSTED, TryLater),
        (BatchCode.CANCELED, TryLater),
        (BatchCode.PERMISSION_DENIED, TryLater),
        (BatchCode.INTERNAL, TryLater),
        (12345, TryLater),
    ],
)
def test_what_a_status_means(code: int, kind: type[DeliveryError]) -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            server.answer = lambda batch: BatchStatus(batch.batch_id, code, "so it is")
            error = await refusal(node, small_item())
            assert type(error) is kind
            assert "so it is" in str(error)
            assert server.streams == 1

    asyncio.run(run())


def test_when_a_stream_ends_those_who_wait_try_later() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            server.answer = lambda _: None
            first = asyncio.create_task(node.take(small_item()))
            await server.until(1)
            server.answer = lambda _: (grpc.StatusCode.ABORTED, "begin anew")
            for error in (
                await refusal(node, small_item()),
                *await asyncio.gather(first, return_exceptions=True),
            ):
                assert isinstance(error, TryLater)
                assert "begin anew" in str(error)
            server.answer = lambda batch: BatchStatus(batch.batch_id)
            await node.take(small_item())
            assert server.streams == 2
            assert server.got[-1].batch_id == 0

    asyncio.run(run())


def test_the_batch_that_ends_streams_is_found() -> None:
    """Several are in flight when a server ends the stream for one of them; nobody says which."""

    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:

            def answer(batch: BatchArrowRecords) -> object:
                if any(payload.type == Slot.SPAN_ATTRS for payload in batch.payloads):
                    return grpc.StatusCode.INVALID_ARGUMENT, "bad batch"
                return Delayed(BatchStatus(batch.batch_id), lambda: asyncio.sleep(0.5))

            server.answer = answer
            tables = {**small(), Slot.SPAN_ATTRS: attributes(["k"] * 5)}
            bad = Item(signal=Signal.TRACES, tables=tables)

            async def until_final(item: Item) -> Undeliverable | None:
                try:
                    while not await is_taken(node, item):
                        pass
                except Undeliverable as error:
                    return error
                return None

            good = asyncio.create_task(until_final(small_item()))
            await server.until(1)
            async with asyncio.timeout(BOUND):
                error = await until_final(bad)
                assert await good is None
            assert "bad batch" in str(error)
            await node.take(small_item())
            server.answer = lambda _: None
            before = len(server.got)
            taking = [asyncio.create_task(node.take(small_item())) for _ in range(2)]
            await server.until(before + 2)  # both at the same time again
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)

    asyncio.run(run())


def test_a_stream_that_ends_while_a_batch_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    written = otap._message

    def slowly(*arguments: Any) -> bytes:  # noqa: ANN401 - those of the other
        begun.set()
        may_go_on.wait(BOUND)
        return written(*arguments)

    async def run() -> None:
        (request,) = telemetry(Signal.TRACES, 1, items=200)
        large = Item(signal=Signal.TRACES, tables=tables_of(Signal.TRACES, request))
        async with plain_server() as server:
            exporter = otap_exporter(server.port)
            node = await exporter.__aenter__()
            await node.take(small_item())
            monkeypatch.setattr(otap, "_message", slowly)
            taking = asyncio.create_task(node.take(large))
            await asyncio.to_thread(begun.wait, BOUND)
        await asyncio.sleep(0.3)  # time to see that the server is gone
        may_go_on.set()
        async with asyncio.timeout(BOUND / 2):
            (error,) = await asyncio.gather(taking, return_exceptions=True)
        assert isinstance(error, TryLater)
        assert "no answer" not in str(error)
        await exporter.__aexit__(None, None, None)

    asyncio.run(run())


def test_no_answer_in_time_ends_the_stream_unless_others_came() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port, timeout=1.0) as node:
            server.answer = lambda _: None
            error = await refusal(node, small_item())
            assert isinstance(error, TryLater)
            assert "no answer in 1.0 s" in str(error)
            server.answer = lambda b: BatchStatus(b.batch_id) if len(server.got) > 2 else None
            slow = asyncio.create_task(node.take(small_item()))
            await server.until(2)
            assert server.streams == 2
            await node.take(small_item())
            (late,) = await asyncio.gather(slow, return_exceptions=True)
            assert isinstance(late, TryLater)
            await node.take(small_item())
            assert server.streams == 2

    asyncio.run(run())


def test_a_take_that_is_given_up_does_not_spoil_the_stream() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            server.answer = lambda _: None
            taking = asyncio.create_task(node.take(small_item()))
            await server.until(1)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            server.answer = lambda batch: BatchStatus(batch.batch_id)
            await node.take(small_item())
            assert [batch.batch_id for batch in server.got] == [0, 1]

    asyncio.run(run())


def test_an_endpoint_that_is_no_otap_server() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            server.answer = lambda _: (grpc.StatusCode.UNIMPLEMENTED, "what?")
            error = await refusal(node, small_item())
            assert isinstance(error, TryLater)
            assert "UNIMPLEMENTED" in str(error)
        async with otap_exporter(server.port) as node:
            assert isinstance(await refusal(node, small_item()), TryLater)
        assert isinstance(await refusal(node, small_item()), TryLater)

    asyncio.run(run())


def test_requests_that_cannot_be_converted() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            good = request_of(Signal.TRACES)
            error = await refusal(node, otlp_item(Signal.TRACES, good, b"\xff no protobuf"))
            assert isinstance(error, Undeliverable)
            assert "1 of 2 requests" in str(error)
            assert len(server.got) == 1
            await node.take(otlp_item(Signal.TRACES))
            await node.take(otlp_item(Signal.TRACES, b""))
            assert len(server.got) == 1

    asyncio.run(run())


def test_at_most_max_in_flight() -> None:
    async def run() -> None:
        metrics = Metrics()
        async with (
            plain_server() as server,
            otap_exporter(server.port, metrics, max_in_flight=2) as node,
        ):
            server.answer = lambda _: None
            taking = [asyncio.create_task(node.take(small_item())) for _ in range(5)]
            await server.until(2)
            assert metrics.get("quiver.exporter.in_flight", node="out") == 2
            assert metrics.get("quiver.exporter.waiting", node="out") == 3
            server.answer = lambda _: (grpc.StatusCode.ABORTED, "")
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)
            assert metrics.get("quiver.exporter.in_flight", node="out") == 0

    asyncio.run(run())


def test_a_stop_waits_for_answers_until_the_deadline() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            server.answer = lambda _: None
            taking = asyncio.create_task(node.take(small_item()))
            await server.until(1)
            await node.stop(asyncio.get_running_loop().time() + 0.05)
            (error,) = await asyncio.gather(taking, return_exceptions=True)
            assert isinstance(error, TryLater)
            assert "shutting down" in str(error)

    asyncio.run(run())


def test_a_stop_lets_batches_be_answered() -> None:
    async def run() -> None:
        async with plain_server() as server, otap_exporter(server.port) as node:
            gate = asyncio.Event()
            server.answer = lambda batch: Delayed(BatchStatus(batch.batch_id), gate.wait)
            taking = asyncio.create_task(node.take(small_item()))
            await server.until(1)
            stopping = asyncio.create_task(node.stop(asyncio.get_running_loop().time() + BOUND))
            await asyncio.sleep(0.05)
            gate.set()
            async with asyncio.timeout(BOUND):
                await taking
                await stopping

    asyncio.run(run())


def test_headers_go_along() -> None:
    async def run() -> None:
        headers = {"X-Api-Key": "secret"}
        async with plain_server() as server, otap_exporter(server.port, headers=headers) as node:
            await node.take(small_item())
            assert server.metadata["x-api-key"] == "secret"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression_method": "br"}, "compression_method is 'br'"),
        ({"arrow": ArrowOptions(payload_compression="gzip")}, "payload_compression is 'gzip'"),
        (
            {"compression_method": "zstd", "arrow": ArrowOptions(payload_compression="lz4")},
            "choose one",
        ),
        ({"grpc_endpoint": "ftp://x"}, "grpc_endpoint"),
        ({"max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        OtapExporter("out", OtapExporterOptions(**{"grpc_endpoint": "http://x:1", **options}))
