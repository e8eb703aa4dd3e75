"""OTLP over gRPC: what is taken, what is refused, and how that is said."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc
import pytest
import uvloop
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from receiving import (
    Certificates,
    Collector,
    Rig,
    eventually,
    grpc_receiver,
    make_certificates,
    request_of,
)

from quiver.bundle import Signal
from quiver.errors import InvalidConfig, StorageAtCapacity, StoreClosed, TryLater, Undeliverable
from quiver.pipeline.receivers.admission import PartlyRefused
from quiver.pipeline.receivers.otlp_grpc import SERVICES

Code = grpc.StatusCode
TRACES = request_of(Signal.TRACES)
METHODS = {signal: f"/{service}/Export" for service, signal in SERVICES.items()}


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    return uvloop.run if request.param == "uvloop" else asyncio.run


class Refused(Exception):
    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.details = error.details() or ""
        trailers = dict(error.trailing_metadata())
        self.status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
        super().__init__(f"{self.code}: {self.details}")


async def export(
    rig: Rig,
    request: bytes = TRACES,
    signal: Signal = Signal.TRACES,
    *,
    metadata: Sequence[tuple[str, str]] = (),
    compression: grpc.Compression | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> bytes:
    where = f"localhost:{rig.port}" if credentials else rig.where
    channel = (
        grpc.aio.secure_channel(where, credentials)
        if credentials
        else grpc.aio.insecure_channel(where)
    )
    async with channel:
        call: Any = channel.unary_unary(METHODS[signal])
        try:
            answer: bytes = await call(
                request, metadata=tuple(metadata), compression=compression, timeout=30
            )
        except grpc.aio.AioRpcError as error:
            raise Refused(error) from error
        return answer


def test_all_signals_arrive_as_the_bytes_that_were_sent(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with grpc_receiver(keep_headers=("X-Tenant",)) as rig:
            for signal in Signal:
                sent = export(rig, request_of(signal), signal, metadata=[("x-tenant", "blue")])
                assert await sent == b""
            assert rig.taker.requests == [request_of(signal) for signal in Signal]
            for item, signal in zip(rig.taker.items, Signal, strict=True):
                assert (item.signal, item.count, item.received_ns) == (signal, 3, 42)
                assert item.context["header.x-tenant"] == "blue"
                assert item.context["peer"].startswith("127.0.0.1:")

    run(test())


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compression_of_the_library_is_undone(compression: grpc.Compression) -> None:
    async def test() -> None:
        async with grpc_receiver() as rig:
            large = request_of(Signal.TRACES, 20_000)
            await export(rig, large, compression=compression)
            assert rig.taker.requests == [large]

    asyncio.run(test())


def test_an_empty_request_is_accepted_and_nothing_is_sent_on() -> None:
    async def test() -> None:
        async with grpc_receiver() as rig:
            assert await export(rig, b"") == b""
            assert await export(rig, request_of(Signal.TRACES, 0)) == b""
            assert rig.taker.items == []

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "code", "pause"),
    [
        (TryLater("downstream is away", 7.25), Code.RESOURCE_EXHAUSTED, 7.25),
        (TryLater("no idea when"), Code.RESOURCE_EXHAUSTED, 2.5),
        (StorageAtCapacity("full"), Code.RESOURCE_EXHAUSTED, 2.5),
        (StoreClosed("closed"), Code.UNAVAILABLE, 2.5),
        (Undeliverable("never"), Code.INVALID_ARGUMENT, None),
        (ZeroDivisionError("a defect"), Code.UNAVAILABLE, 2.5),
        (OSError(5, "disk"), Code.UNAVAILABLE, 2.5),
    ],
)
def test_refusals_from_the_pipeline_become_answers(
    error: Exception, code: grpc.StatusCode, pause: float | None
) -> None:
    async def test() -> None:
        async with grpc_receiver(Collector(answer=lambda _: error), retry_after=2.5) as rig:
            with pytest.raises(Refused) as refused:
                await export(rig)
            assert refused.value.code is code
            assert refused.value.status.code == code.value[0]
            assert refused.value.status.message == refused.value.details != ""
            assert ("shutting down" in refused.value.details) is isinstance(error, StoreClosed)
            if pause is None:
                assert not refused.value.status.details
            else:
                info = RetryInfo()
                assert refused.value.status.details[0].Unpack(info)
                assert info.retry_delay.ToTimedelta().total_seconds() == pause
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


def test_a_malformed_request_is_told_the_byte() -> None:
    async def test() -> None:
        async with grpc_receiver() as rig:
            with pytest.raises(Refused) as refused:
                await export(rig, TRACES[:-1])
            assert refused.value.code is Code.INVALID_ARGUMENT
            assert refused.value.details.startswith("byte 0: ")

    asyncio.run(test())


def test_what_was_partly_refused_is_told() -> None:
    async def test() -> None:
        taker = Collector(answer=lambda _: PartlyRefused("one is too old", 1))
        async with grpc_receiver(taker) as rig:
            told = ExportTraceServiceResponse.FromString(await export(rig)).partial_success
            assert (told.rejected_spans, told.error_message) == (1, "one is too old")

    asyncio.run(test())


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_too_large_is_refused(compression: grpc.Compression | None) -> None:
    async def test() -> None:
        async with grpc_receiver(max_request_bytes=100_000) as rig:
            with pytest.raises(Refused) as refused:
                await export(rig, bytes(100_001), compression=compression)
            assert refused.value.code is Code.RESOURCE_EXHAUSTED
            assert "larger than max" in refused.value.details
            assert await export(rig) == b""

    asyncio.run(test())


def test_limits_refuse_with_advice_until_they_are_met() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        pressed = True
        async with grpc_receiver(
            taker,
            max_waiting_requests=2,
            max_request_bytes=1000,
            max_compressed_bytes=1000,
            max_waiting_bytes=1000,
            pressure=lambda: pressed,
        ) as rig:
            with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*memory"):
                await export(rig)
            pressed = False
            first = asyncio.create_task(export(rig))
            await eventually(lambda: taker.waiting == 1)
            with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*bytes"):
                await export(rig, request_of(Signal.TRACES, 1, "n" * 900))
            second = asyncio.create_task(export(rig))
            await eventually(lambda: taker.waiting == 2)
            with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*requests"):
                await export(rig)
            taker.gate.set()
            assert list(await asyncio.gather(first, second)) == [b"", b""]
            assert await export(rig) == b""
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with grpc_receiver(taker) as rig:
            sending = asyncio.create_task(export(rig))
            await eventually(lambda: taker.waiting == 1)
            sending.cancel()
            await eventually(lambda: rig.receiver._admission.waiting_requests == 0)
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


def test_health_is_told_to_those_who_ask(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with grpc_receiver() as rig, grpc.aio.insecure_channel(rig.where) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", *SERVICES):
                asked = health_pb2.HealthCheckRequest(service=service)
                answer = await stub.Check(asked)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            loop = asyncio.get_running_loop()
            began = loop.time()
            await rig.receiver.stop(began + 60)
            assert loop.time() - began < 30  # those who watch do not hold it up
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(test())


def test_stopping_answers_what_was_received_and_nothing_else(run: Callable[..., None]) -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with grpc_receiver(taker) as rig:
            sending = asyncio.create_task(export(rig))
            await eventually(lambda: taker.waiting == 1)
            stopping = asyncio.create_task(
                rig.receiver.stop(asyncio.get_running_loop().time() + 60)
            )
            await eventually(lambda: rig.receiver._admission.is_stopping)
            with pytest.raises(Refused, match=r"UNAVAILABLE.*shutting down"):
                await export(rig)
            assert not stopping.done()
            taker.gate.set()
            assert await sending == b""
            async with asyncio.timeout(30):
                await stopping
            assert taker.requests == [TRACES]

    run(test())


def test_at_the_deadline_calls_are_cut() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with grpc_receiver(taker) as rig:
            sending = asyncio.create_task(export(rig))
            await eventually(lambda: taker.waiting == 1)
            await rig.receiver.stop(asyncio.get_running_loop().time() + 0.1)
            with pytest.raises(Refused, match=r"UNAVAILABLE|CANCELLED"):
                await sending

    asyncio.run(test())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def test_tls_and_mutual_tls(run: Callable[..., None], certificates: Certificates) -> None:
    ca = certificates.ca.read_bytes()
    anonymous = grpc.ssl_channel_credentials(ca)
    known = grpc.ssl_channel_credentials(
        ca, certificates.client_key.read_bytes(), certificates.client_cert.read_bytes()
    )

    async def test() -> None:
        async with grpc_receiver(tls=certificates.server) as rig:
            assert await export(rig, credentials=anonymous) == b""
            with pytest.raises(Refused, match="UNAVAILABLE"):
                await export(rig)
        async with grpc_receiver(tls=certificates.mutual) as rig:
            assert await export(rig, credentials=known) == b""
            with pytest.raises(Refused, match="UNAVAILABLE"):
                await export(rig, credentials=anonymous)

    run(test())


def test_mistakes_in_the_configuration_are_told(certificates: Certificates) -> None:
    async def start(**options: Any) -> None:  # noqa: ANN401 - those of the receiver
        async with grpc_receiver(**options):
            pass

    with pytest.raises(InvalidConfig, match="insecure_ok"):
        asyncio.run(start(listening_addr="0.0.0.0:0"))
    with pytest.raises(InvalidConfig, match="cannot listen"):
        asyncio.run(start(listening_addr="192.0.2.1:0", insecure_ok=True))
    wrong = type(certificates.server)(
        cert_file=certificates.server.cert_file, key_file=certificates.client_key
    )
    with pytest.raises(InvalidConfig, match="tls"):
        asyncio.run(start(tls=wrong))


# --- gRPC-level zstd: held by the decision in docs/adr -----------------------------------------


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def test_zstd_of_grpc_is_refused_by_the_library() -> None:
    async def test() -> None:
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHODS[Signal.TRACES],
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
            "grpc-encoding": "zstd",
        }
        block = b"".join(
            bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in headers.items()
        )
        async with grpc_receiver() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
            writer.write(frame(1, 4, 1, block) + frame(0, 1, 1, b"\x01\0\0\0\x04\x28\xb5\x2f\xfd"))
            async with asyncio.timeout(30):
                answer = await reader.readuntil(b"metadata")
            assert b"grpc-status\x0213" in answer  # INTERNAL: a client gives the request up
            assert b"Error parsing 'grpc-encoding' metadata" in answer
            writer.close()
            assert rig.taker.items == []
            assert await export(rig) == b""

    asyncio.run(test())
