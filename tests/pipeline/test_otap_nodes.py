"""The OTAP exporter and receiver together, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from otap_foreign import foreign
from otap_oracle import as_otap_holds
from otap_peers import (
    SIGNALS,
    client,
    is_taken,
    meaning,
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
    Certificates,
    Collector,
    eventually,
    make_certificates,
    request_of,
)

from quiver.bundle import Signal
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.pipeline.exporters.otap import OtapExporter
from quiver.pipeline.item import Item, from_bundle, to_bundle
from quiver.pipeline.node import Port
from quiver.pipeline.otap_wire import (
    BatchStatus,
)
from quiver.pipeline.persistence import ExternalTaker, Persistence
from quiver.pipeline.receivers.admission import PartlyRefused
from quiver.pipeline.receivers.otap import OtapReceiver
from quiver.pipeline.security.keys import add_key, revoke_key
from quiver.pipeline.settings.options import (
    ArrowOptions,
    AuthOptions,
    ClientTlsOptions,
    OtapOptions,
    PersistenceOptions,
)


@SIGNALS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression_method": "gzip"},
        {"compression_method": "deflate", "arrow": ArrowOptions(payload_compression="lz4")},
        {"compression_method": "zstd"},
    ],
    ids=["none", "gzip", "lz4", "zstd"],
)
def test_what_is_sent_arrives(signal: Signal, options: dict[str, Any]) -> None:
    requests = telemetry(signal, 5)

    async def run() -> None:
        async with otap_receiver() as rig, otap_exporter(rig.port, **options) as node:
            for request in requests[:3]:
                await node.take(otlp_item(signal, request))
            tables = tables_of(signal, requests[3])
            await node.take(Item(signal=signal, tables=tables))
            encoded = foreign(tables_of(signal, requests[4]), marked=False, dictionaries=True)
            await node.take(Item(signal=signal, tables=encoded))
            items = rig.taker.items
            assert [meaning(item) for item in items] == [
                as_otap_holds(signal, [request]) for request in requests
            ]
            for slot, table in tables.items():
                assert items[3].tables[slot].equals(table, check_metadata=True)
            assert {item.count for item in items} == {30}
            assert {(item.signal, item.received_ns) for item in items} == {(signal, 42)}
            assert "127.0.0.1:" in items[0].context["peer"]
            for item in items:
                assert meaning(from_bundle(to_bundle(item))) == meaning(item)
            figures = rig.metrics.snapshot()
            assert figures[f'quiver.receiver.items_total{{node="in",signal="{signal}"}}'] == 150
            assert rig.metrics.get("quiver.receiver.streams", node="in") == 1
            assert rig.metrics.get("quiver.receiver.stream_bytes", node="in") > 500
        assert rig.metrics.get("quiver.receiver.stream_bytes", node="in") == 0

    asyncio.run(run())


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_many_at_the_same_time(loop: Callable[..., None]) -> None:
    async def run() -> None:
        metrics = Metrics()
        async with otap_receiver() as rig, otap_exporter(rig.port, metrics) as node:
            items = [
                otlp_item(signal, request)
                for signal in Signal
                for request in telemetry(signal, 8, items=90)
            ]
            async with asyncio.timeout(BOUND):
                await asyncio.gather(*map(node.take, items))
            for signal in Signal:
                sent = {as_otap_holds(signal, i.requests) for i in items if i.signal is signal}
                got = {meaning(i) for i in rig.taker.items if i.signal is signal}
                assert got == sent
            assert metrics.get("quiver.exporter.streams_total", node="out") == 3
            assert metrics.get("quiver.exporter.items_total", node="out") == 24

    loop(run())


def test_more_items_than_there_are_ids_go_out_in_several_batches() -> None:
    request = request_of(Signal.LOGS, 70_000)

    async def run() -> None:
        async with otap_receiver() as rig, otap_exporter(rig.port) as node:
            await node.take(otlp_item(Signal.LOGS, request))
            assert sorted(item.count or 0 for item in rig.taker.items) == [4_464, 65_536]

    asyncio.run(run())


def test_taken_means_that_the_next_node_has_it() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker) as rig, otap_exporter(rig.port) as node:
            taking = asyncio.create_task(node.take(small_item()))
            await eventually(lambda: taker.waiting == 1)
            assert not taking.done()
            taker.gate.set()
            async with asyncio.timeout(BOUND):
                await taking

    asyncio.run(run())


def test_what_was_acknowledged_is_in_the_store(tmp_path: Path) -> None:
    """Nobody takes it out before the receiver and the store are closed, and opened again."""
    requests = {signal: telemetry(signal, 3) for signal in Signal}
    settings = PersistenceOptions(path=tmp_path / "data")

    async def ingest() -> None:
        store = Persistence("store", settings, [ExternalTaker("lake", "lake")])
        await store.start()
        port = Port([store])
        receiver = OtapReceiver(
            "in",
            OtapOptions(listening_addr="127.0.0.1:0"),
            port,
            metrics=Metrics(),
            pressure=lambda: False,
            now_ns=lambda: 42,
        )
        await receiver.start()
        end = asyncio.get_running_loop().time() + BOUND
        async with otap_exporter(receiver.address[1], compression_method="zstd") as node:
            for signal, sent in requests.items():
                for request in sent:
                    tables = foreign(tables_of(signal, request), marked=False, dictionaries=True)
                    await node.take(Item(signal=signal, tables=tables))
        await receiver.stop(end)
        await store.stop(end)

    async def deliver() -> list[Item]:
        collector = Collector()
        store = Persistence("store", settings, [collector])
        await store.start()
        await eventually(lambda: len(collector.items) == 9)
        await store.stop(asyncio.get_running_loop().time() + BOUND)
        return collector.items

    asyncio.run(ingest())
    items = asyncio.run(deliver())
    for signal, sent in requests.items():
        got = sorted(meaning(item) for item in items if item.signal is signal)
        assert got == sorted(as_otap_holds(signal, [request]) for request in sent)


def test_refusals_travel_back_and_the_stream_goes_on() -> None:
    async def run() -> None:
        answers: list[Exception | None] = [
            TryLater("the disk is full"),
            Undeliverable("never"),
            ValueError("a defect"),
            PartlyRefused("one span was bad", 1),
            None,
        ]
        taker = Collector(answer=lambda _: answers.pop(0))
        metrics = Metrics()
        async with otap_receiver(taker) as rig, otap_exporter(rig.port, metrics) as node:
            full = await refusal(node, small_item())
            assert isinstance(full, TryLater)
            assert "the disk is full" in str(full)
            assert "RESOURCE_EXHAUSTED" in str(full)
            never = await refusal(node, small_item())
            assert isinstance(never, Undeliverable)
            assert "never" in str(never)
            defect = await refusal(node, small_item())
            assert isinstance(defect, TryLater)
            assert "UNAVAILABLE" in str(defect)
            await node.take(small_item())
            await node.take(small_item())
            figures = rig.metrics.snapshot()
            assert figures['quiver.receiver.items_total{node="in",signal="traces"}'] == 5
        assert metrics.get("quiver.exporter.streams_total", node="out") == 1
        later = metrics.get("quiver.exporter.requests_total", node="out", outcome="later")
        assert later == 2

    asyncio.run(run())


def test_a_server_that_comes_back() -> None:
    async def run() -> None:
        metrics = Metrics()
        async with otap_receiver() as rig:
            port = rig.port
            async with otap_exporter(port, metrics) as node:
                await node.take(small_item())
                await rig.receiver.stop(asyncio.get_running_loop().time() + 5)
                gone = await refusal(node, small_item())
                assert isinstance(gone, TryLater)
                async with otap_receiver(listening_addr=f"127.0.0.1:{port}") as again:
                    async with asyncio.timeout(BOUND):
                        while not await is_taken(node, small_item()):
                            pass
                    assert len(again.taker.items) == 1
                    assert meaning(again.taker.items[0]) == meaning(small_item())

    asyncio.run(run())


def test_a_stop_answers_what_was_received() -> None:
    async def run() -> None:
        taker = Collector()
        taker.gate.clear()
        async with otap_receiver(taker) as rig, client(rig) as sender:
            await sender.send(1, small())
            await eventually(lambda: taker.waiting == 1)
            end = asyncio.get_running_loop().time() + BOUND
            stopping = asyncio.create_task(rig.receiver.stop(end))
            await asyncio.sleep(0.6)  # more than the time for last answers
            taker.gate.set()
            assert await sender.status() == BatchStatus(1)
            code, details = await sender.end()
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "shutting down" in details
            async with asyncio.timeout(BOUND):
                await stopping

    asyncio.run(run())


def test_tls_and_keys(tmp_path: Path) -> None:
    certificates: Certificates = make_certificates(tmp_path)
    keys = tmp_path / "keys.json"
    key, text = add_key(RealDisk(), keys, "sender")
    auth = AuthOptions(keys_file=keys, reload_interval=0.02)

    async def run() -> None:
        async with otap_receiver(
            tls=certificates.mutual, auth=auth, keep_headers=("x-tenant",)
        ) as rig:
            options: dict[str, Any] = {
                "grpc_endpoint": f"https://localhost:{rig.port}",
                "tls": ClientTlsOptions(
                    ca_file=certificates.ca,
                    cert_file=certificates.client_cert,
                    key_file=certificates.client_key,
                ),
            }
            headers = {"x-api-key": text, "X-Tenant": "blue"}
            async with otap_exporter(0, **options) as node:
                await until_unauthenticated(node)
                assert not rig.taker.items
            async with otap_exporter(0, headers=headers, **options) as node:
                async with asyncio.timeout(BOUND):
                    while not await is_taken(node, small_item()):
                        pass
                context = rig.taker.items[0].context
                assert context["api_key_id"] == key.id
                assert context["header.x-tenant"] == "blue"
                revoke_key(RealDisk(), keys, key.id)
                await until_unauthenticated(node)

    asyncio.run(run())


async def until_unauthenticated(node: OtapExporter) -> None:
    """Whatever the library says when a call ends while it is written to, this comes at last."""
    async with asyncio.timeout(BOUND):
        while True:
            try:
                await node.take(small_item())
            except TryLater as error:
                if "UNAUTHENTICATED" in str(error):
                    return


def test_nobody_listens_to_everybody_by_accident() -> None:
    async def run() -> None:
        with pytest.raises(InvalidConfig, match="insecure_ok"):
            async with otap_receiver(listening_addr="0.0.0.0:0"):
                pass

    asyncio.run(run())
