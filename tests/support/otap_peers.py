"""OTAP over gRPC for tests: receiver and exporter, and plain peers for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pyarrow as pa
import pytest
from receiving import (
    BOUND,
    Collector,
    Rig,
    eventually,
    request_of,
)

from quiver.bundle import Signal, Slot
from quiver.errors import DeliveryError, TryLater
from quiver.metrics import Metrics
from quiver.otlp.convert import from_otap, to_otap
from quiver.otlp.messages import REQUEST_TYPES
from quiver.pipeline.exporters.otap import OtapExporter
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.otap_streams import OtapEncoder
from quiver.pipeline.otap_wire import (
    METHODS,
    BatchArrowRecords,
    BatchStatus,
    read_records,
    read_status,
    write_records,
    write_status,
)
from quiver.pipeline.receivers.otap import OtapReceiver
from quiver.pipeline.settings.options import (
    OtapExporterOptions,
    OtapOptions,
)
from quiver.testing.telemetry import Shape, Telemetry

SIGNALS = pytest.mark.parametrize("signal", list(Signal))
Tables = dict[Slot, pa.RecordBatch]


@asynccontextmanager
async def otap_receiver(
    taker: Collector | None = None,
    *,
    pressure: Callable[[], bool] = lambda: False,
    **options: Any,  # noqa: ANN401 - those of the receiver
) -> AsyncIterator[Rig]:
    made = OtapOptions(**{"listening_addr": "127.0.0.1:0", **options})
    metrics, taker = Metrics(), taker or Collector()
    receiver = OtapReceiver(
        "in", made, Port([taker]), metrics=metrics, pressure=pressure, now_ns=lambda: 42
    )
    await receiver.start()
    try:
        yield Rig(receiver, taker, metrics)
    finally:
        await receiver.stop(asyncio.get_running_loop().time() + 5)


@asynccontextmanager
async def otap_exporter(
    port: int,
    metrics: Metrics | None = None,
    **options: Any,  # noqa: ANN401 - those of the exporter
) -> AsyncIterator[OtapExporter]:
    chosen = {"grpc_endpoint": f"http://127.0.0.1:{port}", "timeout": BOUND, **options}
    node = OtapExporter("out", OtapExporterOptions(**chosen), metrics=metrics)
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time() + 5)


class Client:
    """A sender that is told what to send."""

    def __init__(self, channel: grpc.aio.Channel, call: Any) -> None:  # noqa: ANN401 - of grpc
        self.channel = channel
        self.call = call
        self.encoder = OtapEncoder()

    async def send(self, batch_id: int, tables: Tables) -> None:
        await self.write(BatchArrowRecords(batch_id, self.encoder.encode(tables)))

    async def write(self, batch: BatchArrowRecords) -> None:
        await self.call.write(write_records(batch))

    async def status(self) -> BatchStatus:
        async with asyncio.timeout(BOUND):
            data = await self.call.read()
        assert data is not grpc.aio.EOF
        return read_status(data)

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends; nothing may come before."""
        async with asyncio.timeout(BOUND):
            return await self.call.code(), await self.call.details()


@asynccontextmanager
async def client(
    rig: Rig, signal: Signal = Signal.TRACES, metadata: Sequence[tuple[str, str]] = ()
) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(rig.where) as channel:
        yield Client(channel, channel.stream_stream(METHODS[signal])(metadata=tuple(metadata)))


@dataclass(frozen=True)
class Delayed:
    """A status that comes later, and does not hold up what comes meanwhile."""

    status: BatchStatus
    until: Callable[[], Awaitable[object]]

    async def write(self, context: Any) -> None:  # noqa: ANN401 - of grpc
        await self.until()
        await context.write(write_status(self.status))


class Server:
    """A server that answers what ``answer`` says: a status, None for no status, or an end."""

    def __init__(self) -> None:
        self.answer: Callable[[BatchArrowRecords], Any] = lambda batch: BatchStatus(batch.batch_id)
        self.got: list[BatchArrowRecords] = []
        self.streams = 0
        self.metadata: dict[str, str] = {}
        self._delayed: set[asyncio.Task[None]] = set()
        self.port = 0

    def service(self, _: object) -> Any:  # noqa: ANN401 - of grpc
        return grpc.stream_stream_rpc_method_handler(self._serve)

    async def _serve(self, _: object, context: Any) -> None:  # noqa: ANN401 - of grpc
        self.streams += 1
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        while (data := await context.read()) is not grpc.aio.EOF:
            batch = read_records(data)
            self.got.append(batch)
            answer = self.answer(batch)
            if isinstance(answer, BatchStatus):
                await context.write(write_status(answer))
            elif isinstance(answer, Delayed):
                self._delayed.add(asyncio.create_task(answer.write(context)))
            elif answer is not None:
                await context.abort(*answer)

    async def until(self, count: int) -> None:
        await eventually(lambda: len(self.got) >= count, f"{count} batches")


@asynccontextmanager
async def plain_server(server: Server | None = None, **options: int) -> AsyncIterator[Server]:
    server = server or Server()
    chosen = [(f"grpc.{key}", value) for key, value in options.items()]
    running = grpc.aio.server(options=chosen)
    handler: Any = type("Handler", (grpc.GenericRpcHandler,), {"service": server.service})
    running.add_generic_rpc_handlers((handler(),))
    server.port = running.add_insecure_port(f"127.0.0.1:{server.port}")
    await running.start()
    try:
        yield server
    finally:
        await running.stop(0)


def telemetry(signal: Signal, count: int, items: int = 30) -> list[bytes]:
    shape = Shape(items_per_request=items, llm_share=0.1, error_share=0.2)
    return Telemetry(seed=3, shape=shape).take(signal, count)


def otlp_item(signal: Signal, *requests: bytes) -> Item:
    return Item(signal=signal, requests=requests)


def tables_of(signal: Signal, request: bytes) -> Tables:
    (tables,) = to_otap(signal, [request]).batches
    return tables


def small(signal: Signal = Signal.TRACES, count: int = 3) -> Tables:
    return tables_of(signal, request_of(signal, count))


def small_item() -> Item:
    return Item(signal=Signal.TRACES, tables=small())


def meaning(item: Item) -> bytes:
    message: Any = REQUEST_TYPES[item.signal].FromString(from_otap(item.signal, item.tables))
    return bytes(message.SerializeToString(deterministic=True))


async def is_taken(node: OtapExporter, item: Item) -> bool:
    try:
        await node.take(item)
    except TryLater:
        return False
    return True


async def refusal(node: OtapExporter, item: Item) -> DeliveryError:
    with pytest.raises(DeliveryError) as caught:
        await node.take(item)
    return caught.value


def attributes(words: list[str]) -> pa.RecordBatch:
    keys = pa.array(words[:5]).dictionary_encode()
    return pa.record_batch(
        [pa.array([0] * 5, pa.uint16()), keys, pa.array([1] * 5, pa.uint8()), pa.array(["v"] * 5)],
        names=["parent_id", "key", "type", "str"],
    )
