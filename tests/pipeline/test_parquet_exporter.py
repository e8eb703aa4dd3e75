"""The Parquet exporter: what it has taken is in files that others can read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import S3Store
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quiver import Signal
from quiver.bundle import Slot
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.otlp.convert import decode, to_otap
from quiver.otlp.flat import lake_schema
from quiver.pipeline.exporters import parquet
from quiver.pipeline.exporters.files import DirectoryFiles, Files, open_files
from quiver.pipeline.exporters.parquet import ParquetExporter
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import ParquetOptions
from quiver.testing import SimulatedDisk
from quiver.testing.telemetry import Shape, Telemetry

if TYPE_CHECKING:
    from s3 import S3Server

pytest_plugins = ["s3"]
BOUND = 60.0
LONG = 1000.0
DAY = 86_400 * 10**9
ODD_TABLE = pa.record_batch({"parent_id": pa.array([1], pa.uint16())})
NONSENSE = b"\xff not protobuf"


@dataclass
class Kept:
    """Files in memory; fails, or waits, when it is told to."""

    fails: Callable[[str], bool] = lambda _: False
    files: dict[str, pa.Table] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def write(self, path: str, data: pa.Buffer) -> None:
        await self.gate.wait()
        if self.fails(path):
            raise OSError(28, "no space", path)
        self.files[path] = pq.read_table(pa.BufferReader(data))

    @property
    def names(self) -> list[Any]:
        return [name for table in self.files.values() for name in table["name"].to_pylist()]


@asynccontextmanager
async def running(
    files: Files | None, metrics: Metrics | None = None, **changes: object
) -> AsyncIterator[ParquetExporter]:
    options = replace(ParquetOptions(url="memory://x", max_delay=LONG), **changes)  # type: ignore[arg-type]
    node = ParquetExporter("parquet", options, metrics=metrics, files=files)
    await node.start()
    try:
        yield node
    finally:
        await node.stop(asyncio.get_running_loop().time() + BOUND)


def spans(*names: str, day: int = 20_000, count: int = 1) -> Item:
    request = ExportTraceServiceRequest()
    home = request.resource_spans.add().scope_spans.add().spans
    for name in names:
        for number in range(count):
            home.add(
                name=name,
                trace_id=b"t" * 16,
                span_id=b"s" * 8,
                start_time_unix_nano=day * DAY + number,
            )
    return Item(signal=Signal.TRACES, requests=(request.SerializeToString(),))


def merged(*items: Item) -> Item:
    requests = tuple(request for item in items for request in item.requests)
    return Item(signal=items[0].signal, requests=requests)


async def outcomes(node: ParquetExporter, *items: Item) -> list[BaseException | None]:
    async with asyncio.timeout(BOUND):
        return await asyncio.gather(*(node.take(each) for each in items), return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("signal", [Signal.TRACES, Signal.LOGS, Signal.METRICS])
def test_files_hold_the_rows_of_the_lake(signal: Signal, tmp_path: Path) -> None:
    requests = Telemetry(3, Shape(items_per_request=50)).take(signal, 4)
    url = (tmp_path / "a lake").as_uri()
    items = [Item(signal=signal, requests=(request,)) for request in requests[:3]]
    (tables,) = to_otap(signal, requests[3:]).batches

    async def run() -> None:
        expected: Any = decode(signal, requests).table
        async with running(None, url=url, max_rows=expected.num_rows) as node:
            everything = [*items, Item(signal=signal, tables=tables)]
            assert await outcomes(node, *everything) == [None] * 4

    asyncio.run(run())
    expected: Any = decode(signal, requests).table
    (file,) = (tmp_path / "a lake").rglob("*.*")
    written = pq.read_table(file, partitioning=None)
    assert written.schema.equals(lake_schema(signal))
    assert written.num_rows == expected.num_rows
    columns = ["source_resource", "service_name", "scope_name"]
    rows = [Counter(map(str, table.select(columns).to_pylist())) for table in (written, expected)]
    assert rows[0] == rows[1]
    assert written.slice(0, 150) == pa.table(expected.slice(0, 150))
    assert file.parent.name.startswith("date=2025-10-0")
    assert file.parents[1] == tmp_path / "a lake" / str(signal)
    metadata = pq.read_metadata(file)
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    query = f"select count(*), count(distinct date) from '{tmp_path}/a lake/*/*/*.parquet'"  # noqa: S608
    assert duckdb.execute(query).fetchall() == [(written.num_rows, 1)]


def test_one_file_a_date() -> None:
    async def run() -> None:
        kept, metrics = Kept(), Metrics()
        async with running(kept, metrics, max_rows=4) as node:
            items = (
                spans("a", day=0),
                merged(spans("b", day=20_000), spans("c", day=20_001)),
                spans("d", day=20_000),
            )
            assert await outcomes(node, *items) == [None] * 3
        found = {
            path.rpartition("/")[0]: table["name"].to_pylist() for path, table in kept.files.items()
        }
        assert found == {
            "traces/date=1970-01-01": ["a"],
            "traces/date=2024-10-04": ["b", "d"],
            "traces/date=2024-10-05": ["c"],
        }
        labels = {"node": "parquet", "signal": "traces"}
        assert metrics.get("quiver.parquet.files_total", **labels) == 3
        assert metrics.get("quiver.parquet.rows_total", **labels) == 4

    asyncio.run(run())


def test_records_without_a_time_have_the_date_when_they_were_seen() -> None:
    request = ExportLogsServiceRequest()
    home = request.resource_logs.add().scope_logs.add().log_records
    home.add(time_unix_nano=20_000 * DAY, observed_time_unix_nano=20_001 * DAY)
    home.add(observed_time_unix_nano=20_001 * DAY)
    home.add()

    async def run() -> None:
        kept = Kept()
        async with running(kept, max_rows=3) as node:
            await node.take(Item(signal=Signal.LOGS, requests=(request.SerializeToString(),)))
        assert [path.split("/")[1] for path in kept.files] == [
            "date=1970-01-01",
            "date=2024-10-04",
            "date=2024-10-05",
        ]

    asyncio.run(run())


def test_taken_means_durable() -> None:
    async def run() -> None:
        kept = Kept()
        kept.gate.clear()
        async with running(kept, max_rows=2) as node:
            taking = [asyncio.create_task(node.take(spans(name))) for name in "ab"]
            await asyncio.wait(taking, timeout=0.05)
            assert not any(task.done() for task in taking)
            kept.gate.set()
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*taking)
            assert kept.names == ["a", "b"]

    asyncio.run(run())


def test_a_power_cut_after_the_answer_loses_nothing() -> None:
    async def run(disk: SimulatedDisk) -> None:
        files = DirectoryFiles(Path("/lake"), disk)
        async with running(files, max_rows=1) as node:
            await node.take(spans("a"))

    disk = SimulatedDisk()
    asyncio.run(run(disk))
    folder = Path("/lake/traces/date=2024-10-04")
    for after in disk.crash_states():
        (name,) = after.list_directory(folder)
        data = after.read(folder / name)
        assert pq.read_table(pa.BufferReader(data))["name"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"max_rows": 10}, "rows"), ({"max_bytes": 2000}, "bytes"), ({"max_delay": 0.02}, "delay")],
)
def test_what_ends_a_round(changes: dict[str, float], reason: str) -> None:
    async def run() -> None:
        kept, metrics = Kept(), Metrics()
        async with running(kept, metrics, **changes) as node:
            assert await outcomes(node, spans("a", count=5), spans("b", count=5)) == [None] * 2
            assert metrics.get("quiver.parquet.flushes_total", node="parquet", reason=reason)
        assert sorted(kept.names) == ["a"] * 5 + ["b"] * 5

    asyncio.run(run())


def test_many_share_a_file() -> None:
    async def run() -> None:
        kept = Kept()
        async with running(kept, max_rows=200) as node:
            await outcomes(node, *(spans(str(n)) for n in range(200)))
        assert len(kept.files) == 1
        assert sorted(kept.names) == sorted(map(str, range(200)))

    asyncio.run(run())


def test_a_sender_that_may_not_send_more_is_not_kept_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "_SILENCE", 0.05)

    async def run() -> None:
        kept, metrics = Kept(), Metrics()
        async with running(kept, metrics) as node:
            few = [asyncio.create_task(node.take(spans(str(n)))) for n in range(15)]
            await asyncio.wait(few, timeout=0.3)
            assert not any(task.done() for task in few)
            assert await outcomes(node, spans("last")) == [None]
            await asyncio.gather(*few)
        assert len(kept.files) == 1
        assert metrics.get("quiver.parquet.flushes_total", node="parquet", reason="silence") == 1

    asyncio.run(run())


def test_signals_have_rounds_of_their_own() -> None:
    records = Telemetry(1, Shape(items_per_request=3)).take(Signal.LOGS, 1)

    async def run() -> None:
        kept = Kept()
        async with running(kept, max_rows=3) as node:
            waiting = asyncio.create_task(node.take(spans("a")))
            assert await outcomes(node, Item(signal=Signal.LOGS, requests=tuple(records))) == [None]
            assert not waiting.done()
            assert await outcomes(node, spans("b", "c")) == [None]
            await waiting

    asyncio.run(run())


def test_what_cannot_be_read_is_refused_alone() -> None:
    (tables,) = to_otap(Signal.TRACES, spans("x").requests).batches
    del tables[Slot.SPANS]

    async def run() -> None:
        kept = Kept()
        async with running(kept, max_rows=2) as node:
            heard = await outcomes(
                node,
                spans("a"),
                merged(spans("not written"), replace(spans(), requests=(NONSENSE,))),
                spans("b"),
                Item(signal=Signal.TRACES, requests=(NONSENSE,)),
                Item(signal=Signal.TRACES, tables={**tables, Slot.SPAN_ATTRS: ODD_TABLE}),
            )
            assert [type(each) for each in heard] == [
                type(None),
                Undeliverable,
                type(None),
                Undeliverable,
                Undeliverable,
            ]
        assert sorted(kept.names) == ["a", "b"]

    asyncio.run(run())


def test_items_of_too_many_days_are_refused() -> None:
    many = merged(*(spans("x", day=day) for day in range(401)))

    async def run() -> None:
        kept = Kept()
        async with running(kept, max_rows=1) as node:
            heard = await outcomes(node, many, spans("a"))
            assert [type(each) for each in heard] == [Undeliverable, type(None)]
        assert kept.names == ["a"]

    asyncio.run(run())


def test_a_file_that_fails_brings_back_only_its_own() -> None:
    async def run() -> None:
        kept, metrics = Kept(lambda path: "2024-10-05" in path), Metrics()
        async with running(kept, metrics, max_rows=4) as node:
            heard = await outcomes(
                node,
                spans("a", day=20_000),
                spans("b", day=20_001),
                merged(spans("c", day=20_000), spans("d", day=20_001)),
            )
            assert [type(each) for each in heard] == [type(None), TryLater, TryLater]
            assert "no space" in str(heard[1])
            assert metrics.get("quiver.parquet.failures_total", node="parquet") == 1
            kept.fails = lambda _: False
            assert await outcomes(node, spans("b", "x", "y", "z", day=20_001)) == [None]

    asyncio.run(run())


def test_empty_requests_are_taken() -> None:
    async def run() -> None:
        kept = Kept()
        async with running(kept, max_delay=0.01) as node:
            empty = Item(signal=Signal.TRACES, requests=(b"",))
            assert await outcomes(node, empty) == [None]
        assert not kept.files

    asyncio.run(run())


def test_more_than_fits_is_refused() -> None:
    async def run() -> None:
        kept, metrics = Kept(), Metrics()
        kept.gate.clear()
        size = spans("a").size
        async with running(kept, metrics, max_bytes=size, max_rows=1) as node:
            taking = [asyncio.create_task(node.take(spans("a"))) for _ in range(4)]
            await until(
                lambda: metrics.get("quiver.parquet.waiting_bytes", node="parquet") == 4 * size
            )
            (heard,) = await outcomes(node, spans("b"))
            assert isinstance(heard, TryLater)
            assert heard.retry_after
            assert metrics.get("quiver.parquet.refused_total", node="parquet") == 1
            kept.gate.set()
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*taking)
        assert metrics.get("quiver.parquet.waiting_bytes", node="parquet") == 0

    asyncio.run(run())


def test_stopping_writes_what_is_there() -> None:
    async def run() -> None:
        kept = Kept()
        async with running(kept) as node:
            taking = [asyncio.create_task(node.take(spans(name))) for name in "ab"]
            await asyncio.sleep(0)
            await node.stop(asyncio.get_running_loop().time() + BOUND)
            await asyncio.gather(*taking)
            assert sorted(kept.names) == ["a", "b"]
            assert isinstance((await outcomes(node, spans("c")))[0], TryLater)

    asyncio.run(run())


def test_stopping_does_not_wait_for_ever() -> None:
    async def run() -> None:
        kept = Kept()
        kept.gate.clear()
        async with running(kept, max_rows=1) as node:
            taking = [asyncio.create_task(node.take(spans(name))) for name in "ab"]
            await asyncio.sleep(0)
            await node.stop(asyncio.get_running_loop().time() + 0.05)
            heard = await asyncio.gather(*taking, return_exceptions=True)
            assert [type(each) for each in heard] == [TryLater, TryLater]

    asyncio.run(run())


@pytest.mark.xdist_group("s3")
def test_an_object_store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)

    async def run() -> None:
        async with running(None, url=s3_server.url("parquet/lake"), max_rows=1) as node:
            assert await outcomes(node, spans("a")) == [None]
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        async with running(None, url=s3_server.url("parquet/lake"), max_rows=1) as node:
            assert isinstance((await outcomes(node, spans("a")))[0], TryLater)

    asyncio.run(run())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    store = S3Store(
        s3_server.bucket,
        prefix="parquet/lake",
        endpoint=s3_server.endpoint,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    (found,) = obstore.list(store).collect()
    assert found["path"].startswith("traces/date=2024-10-04/")
    data = obstore.get(store, found["path"]).bytes()
    assert pq.read_table(pa.BufferReader(bytes(data)))["name"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    "url", ["http://x/y", "file://host/x", "s3://", "s3://key:word@bucket/x", "s3://b?secret=x"]
)
def test_urls_that_cannot_be(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_files(url)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"max_rows": 0}, {"max_delay": 0}, {"compression": "rar"}])
def test_options_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        ParquetExporter("p", replace(ParquetOptions(url="/x"), **changes))
