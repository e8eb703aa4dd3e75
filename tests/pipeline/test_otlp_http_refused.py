"""OTLP over HTTP: what is refused, how that is said, and where the limits are."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import httpx
import pytest
import zstandard
from google.rpc.error_details_pb2 import RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
from http_clients import (
    ENCODERS,
    JSON,
    PROTOBUF,
    TRACES,
    in_pieces,
    post,
    raw_deflate,
    zstd_without_size,
)
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from receiving import Collector, eventually, http_receiver, request_of

from quiver.bundle import Signal
from quiver.errors import (
    InvalidConfig,
    InvalidRequest,
    StorageAtCapacity,
    StoreClosed,
    TryLater,
    Undeliverable,
)
from quiver.otlp.json_text import to_json
from quiver.pipeline.receivers.admission import PartlyRefused

WRONG: list[tuple[bytes, dict[str, str], str, int]] = [
    (TRACES, {}, "/", 404),
    (TRACES, {}, "/v1/traces/", 404),
    (TRACES, {}, "/v1/profiles", 404),
    (TRACES, {"content_type": "text/plain"}, "/v1/traces", 415),
    (TRACES, {"content_encoding": "br"}, "/v1/traces", 415),
    (TRACES, {"content_encoding": "gzip, gzip"}, "/v1/traces", 415),
    (TRACES[:-1], {}, "/v1/traces", 400),
    (b"garbage, garbage", {}, "/v1/traces", 400),
    (b"garbage", {"content_encoding": "gzip"}, "/v1/traces", 400),
    (b"garbage", {"content_encoding": "deflate"}, "/v1/traces", 400),
    (b"garbage", {"content_encoding": "zstd"}, "/v1/traces", 400),
    (b"", {"content_encoding": "gzip"}, "/v1/traces", 400),
    (gzip.compress(TRACES)[:-9], {"content_encoding": "gzip"}, "/v1/traces", 400),
    (gzip.compress(TRACES) + b"x", {"content_encoding": "gzip"}, "/v1/traces", 400),
    (gzip.compress(TRACES)[:-5] + b"abcde", {"content_encoding": "gzip"}, "/v1/traces", 400),
    (raw_deflate(TRACES) + b"x", {"content_encoding": "deflate"}, "/v1/traces", 400),
    (gzip.compress(b"") * 17, {"content_encoding": "gzip"}, "/v1/traces", 400),
    (zlib.compress(TRACES) + b"x", {"content_encoding": "deflate"}, "/v1/traces", 400),
    (zstandard.compress(TRACES)[:-1], {"content_encoding": "zstd"}, "/v1/traces", 400),
    (zstandard.compress(TRACES) + b"x", {"content_encoding": "zstd"}, "/v1/traces", 400),
    (zstd_without_size(TRACES)[:-1], {"content_encoding": "zstd"}, "/v1/traces", 400),
    (zstd_without_size(TRACES) + b"x", {"content_encoding": "zstd"}, "/v1/traces", 400),
    (b"{]", {"content_type": "application/json"}, "/v1/traces", 400),
    (b"", {"content_type": "application/json"}, "/v1/traces", 400),
    (b'{"resourceSpans": 5}', {"content_type": "application/json"}, "/v1/traces", 400),
]


@pytest.mark.parametrize(
    ("body", "headers", "path", "status"), WRONG, ids=map(str, range(len(WRONG)))
)
def test_what_is_wrong_is_refused_and_the_connection_goes_on(
    body: bytes, headers: dict[str, str], path: str, status: int
) -> None:
    async def test() -> None:
        async with (
            http_receiver() as rig,
            httpx.AsyncClient(base_url=f"http://{rig.where}") as client,
        ):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await client.post(path, content=body, headers={**PROTOBUF, **named})
            assert answer.status_code == status
            if answer.headers["content-type"] == "application/x-protobuf":
                assert Status.FromString(answer.content).message
            else:
                assert answer.json()["message"]
            assert "retry-after" not in answer.headers
            again = await client.post("/v1/traces", content=TRACES, headers=PROTOBUF)
            assert again.status_code == 200
            assert rig.metrics.get("quiver.receiver.connections", node="in") == 1
            assert rig.taker.requests == [TRACES]
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


def test_a_malformed_request_is_told_the_byte() -> None:
    async def test() -> None:
        async with http_receiver() as rig:
            answer = await post(rig, TRACES[:-1])
            status = Status.FromString(answer.content)
            assert status.code == 3
            assert status.message.startswith("byte 0: ")
            answer = await post(rig, b'{"resourceSpans": 5}', content_type=JSON["content-type"])
            assert "resourceSpans" in answer.json()["message"]

    asyncio.run(test())


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_told_what_is_possible(method: str) -> None:
    async def test() -> None:
        async with (
            http_receiver() as rig,
            httpx.AsyncClient(base_url=f"http://{rig.where}") as client,
        ):
            for _ in range(2):
                answer = await client.request(method, "/v1/traces")
                assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
                assert (answer.content == b"") is (method == "HEAD")

    asyncio.run(test())


TOO_LARGE: list[tuple[bytes, dict[str, str]]] = [
    (b"x" * 10_001, {}),
    (gzip.compress(b"\0" * 10_001), {"content_encoding": "gzip"}),
    (zlib.compress(b"\0" * 10_001), {"content_encoding": "deflate"}),
    (raw_deflate(b"\0" * 10_001), {"content_encoding": "deflate"}),
    (zstandard.compress(b"\0" * 10_001), {"content_encoding": "zstd"}),
    (zstd_without_size(b"\0" * 10_001), {"content_encoding": "zstd"}),
    (gzip.compress(b"\0" * 9_000) * 2, {"content_encoding": "gzip"}),
    (zstandard.compress(b"\0" * 9_000) * 2, {"content_encoding": "zstd"}),
    (b"x" * 5_001, {"content_encoding": "gzip"}),
    (b" " * 2_001, {"content_type": "application/json"}),
    (
        gzip.compress(b" " * 2_001),
        {"content_type": "application/json", "content_encoding": "gzip"},
    ),
]


@pytest.mark.parametrize(("body", "headers"), TOO_LARGE, ids=map(str, range(len(TOO_LARGE))))
def test_too_large_is_refused_before_and_after_decompression(
    body: bytes, headers: dict[str, str]
) -> None:
    async def test() -> None:
        limits: dict[str, Any] = {"max_request_bytes": 10_000, "max_compressed_bytes": 5_000}
        async with http_receiver(**limits, max_json_bytes=2_000) as rig:
            assert (await post(rig, body, **headers)).status_code == 413

            async with httpx.AsyncClient(base_url=f"http://{rig.where}") as client:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                sent = {**PROTOBUF, **named}
                answer = await client.post("/v1/traces", content=in_pieces(body, 100), headers=sent)
                assert answer.status_code == 413
            exact = request_of(Signal.TRACES, 1, "n" * 9_900)
            exact += b"\x7a" + bytes([10_000 - len(exact) - 2]) + bytes(10_000 - len(exact) - 2)
            assert len(exact) == 10_000
            for name in ("gzip", "zstd", "zstd without size", "bare deflate", "plain"):
                encoding, encode = ENCODERS[name]
                good = await post(rig, encode(exact), content_encoding=encoding)
                assert good.status_code == 200, name
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (TryLater("downstream is away", 7.2), 429, "8"),
        (TryLater("no idea when"), 429, "3"),
        (TryLater("soon", 0.01), 429, "1"),
        (StorageAtCapacity("full"), 429, "3"),
        (StoreClosed("closed"), 503, "3"),
        (Undeliverable("never"), 400, None),
        (InvalidRequest("odd", where="byte 9"), 400, None),
        (ZeroDivisionError("a defect"), 503, "3"),
        (OSError(5, "disk"), 503, "3"),
    ],
)
def test_refusals_from_the_pipeline_become_answers(
    error: Exception, status: int, retry: str | None
) -> None:
    async def test() -> None:
        async with http_receiver(Collector(answer=lambda _: error), retry_after=2.5) as rig:
            answer = await post(rig)
            assert answer.status_code == status
            assert answer.headers.get("retry-after") == retry
            told = Status.FromString(answer.content)
            assert told.message
            if retry is None:
                assert not told.details
            else:
                info = RetryInfo()
                assert told.details[0].Unpack(info)
                assert abs(info.retry_delay.ToTimedelta().total_seconds() - float(retry)) <= 1
            text = to_json(Signal.TRACES, TRACES)
            answer = await post(rig, text, content_type="application/json")
            assert answer.status_code == status
            assert json.loads(answer.content)["code"] == told.code

    asyncio.run(test())


def test_what_was_partly_refused_is_told() -> None:
    async def test() -> None:
        taker = Collector(answer=lambda _: PartlyRefused("one is too old", 1))
        async with http_receiver(taker) as rig:
            answer = await post(rig)
            told = ExportTraceServiceResponse.FromString(answer.content).partial_success
            assert (answer.status_code, told.rejected_spans) == (200, 1)
            assert told.error_message == "one is too old"
            answer = await post(rig, request_of(Signal.LOGS), "/v1/logs")
            logs = ExportLogsServiceResponse.FromString(answer.content).partial_success
            assert logs.rejected_log_records == 1
            text = to_json(Signal.METRICS, request_of(Signal.METRICS))
            answer = await post(rig, text, "/v1/metrics", content_type="application/json")
            assert answer.json() == {
                "partialSuccess": {"rejectedDataPoints": "1", "errorMessage": "one is too old"}
            }
            name = "quiver.receiver.items_total"
            assert rig.metrics.get(name, node="in", signal="traces") == 2

    asyncio.run(test())


# --- limits -----------------------------------------------------------------------------------


def test_memory_pressure_refuses_until_it_is_over() -> None:
    async def test() -> None:
        pressed = True
        async with http_receiver(pressure=lambda: pressed) as rig:
            answer = await post(rig)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            pressed = False
            assert (await post(rig)).status_code == 200
            name = "quiver.receiver.refused_total"
            assert rig.metrics.get(name, node="in", reason="overloaded") == 1

    asyncio.run(test())


def test_only_so_many_requests_may_wait() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        async with http_receiver(taker, max_waiting_requests=2) as rig:
            first = [asyncio.create_task(post(rig)) for _ in range(2)]
            await eventually(lambda: taker.waiting == 2)
            assert rig.metrics.get("quiver.receiver.waiting_requests", node="in") == 2
            assert (await post(rig)).status_code == 429
            taker.gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
            assert (await post(rig)).status_code == 200

    asyncio.run(test())


def test_only_so_many_bytes_may_wait() -> None:
    async def test() -> None:
        taker = Collector(gate=asyncio.Event())
        body = request_of(Signal.TRACES, 1, "n" * 600)
        limits: dict[str, Any] = {"max_request_bytes": 1000, "max_compressed_bytes": 1000}
        async with http_receiver(taker, max_waiting_bytes=1000, **limits) as rig:
            first = asyncio.create_task(post(rig, body))
            await eventually(lambda: taker.waiting == 1)
            assert (await post(rig, body)).status_code == 429
            packed = gzip.compress(body)
            assert len(packed) < 200
            assert (await post(rig, packed, content_encoding="gzip")).status_code == 429
            taker.gate.set()
            assert (await first).status_code == 200
            assert (await post(rig, body)).status_code == 200
            assert rig.receiver._admission.waiting_bytes == 0

    asyncio.run(test())


def test_a_limit_that_no_request_could_meet_is_a_mistake() -> None:
    async def test() -> None:
        with pytest.raises(InvalidConfig, match="max_waiting_bytes"):
            async with http_receiver(max_waiting_bytes=1000):
                pass

    asyncio.run(test())
