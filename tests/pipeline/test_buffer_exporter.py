"""The exporter to a queue in object storage: what gets there, and what becomes of errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from quiver.buffer.appender import wall_clock_ms
from quiver.buffer.consumer import Consumer
from quiver.buffer.obstore_objects import open_objects
from quiver.buffer.types import Batch
from quiver.bundle import Signal, Slot
from quiver.config import BatchCompression, ConsumerConfig
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.otlp.convert import from_otap, to_otap
from quiver.pipeline.build import CLASSES
from quiver.pipeline.exporters.buffer import BufferExporter
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import BufferExporterOptions
from quiver.pipeline.settings.plugin_names import Kind
from quiver.testing.telemetry import Shape, Telemetry

CODES = {Signal.METRICS: 1, Signal.LOGS: 2, Signal.TRACES: 3}
_numbers = itertools.count()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://exporter-{next(_numbers)}"
    return tmp_path.as_uri()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


@asynccontextmanager
async def exporting(
    url: str,
    metrics: Metrics | None = None,
    **options: Any,  # noqa: ANN401 - those of the exporter
) -> AsyncIterator[BufferExporter]:
    node = BufferExporter("queue", BufferExporterOptions(url=url, **options), metrics=metrics)
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time() + 10)


async def consumed(url: str) -> list[Batch]:
    it = Consumer(
        open_objects(url),
        ConsumerConfig(),
        metrics=Metrics(),
        now_ms=wall_clock_ms,
        random=Random(),
    )
    await it.initialize()
    found = []
    while batch := await it.next_batch():
        found.append(batch)
    return found


def item(*requests: bytes, signal: Signal = Signal.TRACES) -> Item:
    return Item(signal=signal, requests=requests)


def test_the_builder_finds_it() -> None:
    assert CLASSES[Kind.EXPORTER, "buffer"] == "buffer:BufferExporter"


def test_requests_become_entries_with_their_signal(url: str) -> None:
    requests = {
        signal: Telemetry(1, Shape(items_per_request=5)).take(signal, 3) for signal in CODES
    }

    async def main() -> None:
        metrics = Metrics()
        async with exporting(url, metrics) as node:
            items = [item(*made, signal=signal) for signal, made in requests.items()]
            await asyncio.gather(*map(node.take, items))
        assert metrics.get("quiver.exporter.items_total", node="queue") == 3
        assert metrics.get("quiver.exporter.in_flight", node="queue") == 0
        assert metrics.get("buffer.entries_flushed") == 9
        found: dict[bytes | None, list[bytes]] = {}
        for batch in await consumed(url):
            assert batch.entry.facts.producer_id == "queue"
            for at, record in enumerate(batch.records):
                found.setdefault(batch.payload_of(at), []).append(record)
        assert found == {bytes([1, CODES[signal], 1, 0]): made for signal, made in requests.items()}

    run(main)


def test_an_item_is_durable_when_it_is_taken(url: str) -> None:
    async def main() -> None:
        async with exporting(url, compression=BatchCompression.NONE) as node:
            for number in range(3):
                await node.take(item(b"%d" % number))
                records = [record for batch in await consumed(url) for record in batch.records]
                assert records == [b"%d" % n for n in range(number + 1)]

    run(main)


def test_tables_are_converted(url: str) -> None:
    (request,) = Telemetry(2, Shape(items_per_request=10)).take(Signal.LOGS, 1)
    (tables,) = to_otap(Signal.LOGS, [request]).batches

    async def main() -> None:
        async with exporting(url) as node:
            await node.take(Item(signal=Signal.LOGS, tables=tables))
        ((record,),) = [batch.records for batch in await consumed(url)]
        assert record == from_otap(Signal.LOGS, tables)

    run(main)


def test_tables_that_do_not_add_up_are_refused_for_ever(url: str) -> None:
    broken = {Slot.SPANS: pa.record_batch({"nothing": pa.array([1])})}

    async def main() -> None:
        async with exporting(url) as node:
            with pytest.raises(Undeliverable):
                await node.take(Item(signal=Signal.TRACES, tables=broken))
            await node.take(item(b"ok"))

    run(main)


def test_an_item_without_requests_is_nothing(url: str) -> None:
    async def main() -> None:
        async with exporting(url) as node:
            await node.take(Item(signal=Signal.TRACES))
        assert await consumed(url) == []

    run(main)


def test_a_damaged_manifest_makes_items_come_back_until_it_is_repaired(url: str) -> None:
    async def main() -> None:
        objects = open_objects(url)
        metrics = Metrics()
        await objects.put("ingest/manifest", b"damaged")
        async with exporting(url, metrics) as node:
            for _ in range(2):
                with pytest.raises(TryLater, match="ingest/manifest"):
                    await node.take(item(b"a"))
            await objects.delete(["ingest/manifest"])
            await node.take(item(b"a"))
        name = "quiver.exporter.requests_total"
        assert metrics.get(name, node="queue", outcome="later") == 2
        assert metrics.get(name, node="queue", outcome="delivered") == 1
        assert [batch.records for batch in await consumed(url)] == [(b"a",)]

    run(main)


def test_a_manifest_that_was_replaced_is_not_written_by_the_same_process(url: str) -> None:
    async def main() -> None:
        objects = open_objects(url)
        async with exporting(url) as node:
            await node.take(item(b"a"))
            await objects.delete(["ingest/manifest"])
            for _ in range(2):
                with pytest.raises(TryLater, match="start the producers again"):
                    await node.take(item(b"b"))
        assert "ingest/manifest" not in [
            info.path for info in await objects.list_children("ingest")
        ]

    run(main)


def test_the_prefix_of_another_queue_is_the_operators_mistake_not_the_items(url: str) -> None:
    async def main() -> None:
        await open_objects(url).put("ingest/.queue", b"other/manifest")
        async with exporting(url) as node:
            with pytest.raises(TryLater, match="other/manifest"):
                await node.take(item(b"a"))

    run(main)


def test_an_item_that_no_batch_can_hold_is_refused_for_ever(url: str) -> None:
    async def main() -> None:
        async with exporting(url) as node:
            assert node._producer is not None
            queue = node._producer._line._config.queue
            object.__setattr__(queue, "max_batch_bytes", 1024)  # the default is a gigabyte
            with pytest.raises(Undeliverable, match="1024"):
                await node.take(item(b"x" * 2000))
            await node.take(item(b"y"))

    run(main)


def test_a_node_that_does_not_run_takes_nothing(url: str) -> None:
    async def main() -> None:
        node = BufferExporter("queue", BufferExporterOptions(url=url))
        with pytest.raises(TryLater, match="not running"):
            await node.take(item(b"a"))
        await node.stop(0.0)
        async with exporting(url) as other:
            pass
        with pytest.raises(TryLater, match="not running"):
            await other.take(item(b"a"))

    run(main)


def test_stopping_writes_what_waits(url: str) -> None:
    async def main() -> None:
        async with exporting(url, flush_interval=3600.0) as node:
            taking = asyncio.create_task(node.take(item(b"a")))
            await asyncio.sleep(0.05)
            assert not taking.done()
        await taking
        assert [batch.records for batch in await consumed(url)] == [(b"a",)]

    run(main)


def test_stopping_does_not_outlast_its_deadline(url: str) -> None:
    async def main() -> None:
        node = BufferExporter("queue", BufferExporterOptions(url=url, flush_interval=3600.0))
        await node.start()
        taking = asyncio.create_task(node.take(item(b"a")))
        await asyncio.sleep(0.05)
        await node.stop(asyncio.get_running_loop().time() - 1)
        with pytest.raises(TryLater):
            await taking

    run(main)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "ftp://x"}, "no object store"),
        ({"url": "memory://x", "manifest_path": "a//b"}, "manifest_path"),
        ({"url": "memory://x", "flush_size_bytes": 0}, "flush_size_bytes"),
    ],
)
def test_wrong_options_are_refused_when_it_is_made(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        BufferExporter("queue", BufferExporterOptions(**options))
