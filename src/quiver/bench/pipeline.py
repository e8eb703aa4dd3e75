"""What a pipeline costs: ``quiver bench pipeline``.

Requests of traces go over loopback from this process to another, which receives, persists and
confirms them; 16 connections, each with one request at a time. The same without persistence is
measured in turns with it.

=====================  =======================================================================
figure                 what is measured
=====================  =======================================================================
results                by protocol, then by spans in a request, then ``durable`` and ``plain``:
                       ``requests_s``, ``spans_s``, ``cpu_us`` (of the server, for a request),
                       ``spans_cpu_s`` (spans for a second of it), ``p50_ms`` and ``p99_ms`` of
                       an answer; best of all rounds
ratio                  by protocol and spans: ``requests_s`` durable in relation to plain
resident_mb            of the server after all that
outage_growth_mb       by how much it grows while ``outage_bytes`` come in and the destination is
                       dead, after the first quarter of them
=====================  =======================================================================

Client and server share the machine's cores: with two of them the client is a part of every figure
but ``cpu_us``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from quiver.bench.measure import Benchmark, Plan, Results, Table, Tick
from quiver.bench.rig import FlatDisk
from quiver.bundle import Signal
from quiver.disk import Disk
from quiver.testing.telemetry import Shape, Telemetry

CONNECTIONS: Final = 16
SPANS: Final = (10, 500)
PROTOCOLS: Final = ("http", "grpc")
VARIANTS: Final = ("plain", "durable")
_SEED: Final = 4
_KINDS: Final = 32  # different requests
_ROUND_SHARE: Final = 5
_ROUND_BYTES: Final = {10: 4, 500: 1}  # a small request costs more: fewer bytes of them
_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_CIRCUMSTANCES: Final = (
    "resident_mb",
    "outage_growth_mb",
    "outage_bytes",
    "python",
    "cpu_count",
    "rounds",
)


def run(disk: Disk, directory: Path, plan: Plan, tick: Tick) -> Results:
    """Measure in ``directory``, which is empty before and after."""
    return asyncio.run(_Bench(disk, directory, plan, tick).run())


def _rounds(plan: Plan) -> int:
    return max(1, plan.rounds // _ROUND_SHARE)


BENCHMARK: Final = Benchmark(
    name="pipeline",
    run=run,
    count_ticks=lambda plan: _rounds(plan) * len(PROTOCOLS) * len(SPANS) + 1,
    count_bytes=lambda plan: 20 * plan.file_size + 400_000_000,
    facts=_CIRCUMSTANCES,
)


@dataclass(slots=True)
class _Sample:
    """One round."""

    requests: int
    seconds: float
    cpu: float
    latencies: list[float] = field(repr=False)

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


_Send = Callable[[bytes], Coroutine[Any, Any, None]]


class _Server:
    """A pipeline in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, places: Mapping[str, Any]) -> None:
        self._process = process
        self._places = places

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, variant: str, path: Path) -> AsyncIterator[_Server]:
        command = (sys.executable, "-m", "quiver.bench.pipeline_server", variant, str(path))
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None  # noqa: S101 - it was asked for
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("the server of the benchmark did not start")
        try:
            yield cls(process, json.loads(line))
        finally:
            assert process.stdin is not None  # noqa: S101 - it was asked for
            process.stdin.close()
            await process.wait()

    async def facts(self) -> dict[str, float]:
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        assert self._process.stdout is not None  # noqa: S101 - likewise
        self._process.stdin.write(b"\n")
        return dict(json.loads(await self._process.stdout.readline()))

    def connect(self, protocol: str) -> contextlib.AbstractAsyncContextManager[_Send]:
        host, port = self._places[protocol][:2]
        return _http(host, port) if protocol == "http" else _grpc(host, port)


@contextlib.asynccontextmanager
async def _http(host: str, port: int) -> AsyncIterator[_Send]:
    reader, writer = await asyncio.open_connection(host, port)

    async def send(body: bytes) -> None:
        head = (
            f"POST /v1/traces HTTP/1.1\r\nhost: {host}\r\n"
            f"content-type: application/x-protobuf\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        for line in answer.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                await reader.readexactly(int(line.split(b":")[1]))
        if b" 200 " not in answer.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"the server answered {answer!r}")

    try:
        yield send
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def _grpc(host: str, port: int) -> AsyncIterator[_Send]:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with grpc.aio.insecure_channel(f"{host}:{port}", options=options) as channel:
        call = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)

        async def send(body: bytes) -> None:
            await call(body)

        yield send


class _Bench:
    def __init__(self, disk: Disk, directory: Path, plan: Plan, tick: Tick) -> None:
        self._disk = disk
        self._directory = directory
        self._plan = plan
        self._tick = tick
        self._rounds = _rounds(plan)
        self._requests = {
            spans: Telemetry(_SEED, Shape(items_per_request=spans)).take(Signal.TRACES, _KINDS)
            for spans in SPANS
        }

    async def run(self) -> Results:
        results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
        resident = 0.0
        for protocol in PROTOCOLS:
            for spans in SPANS:
                samples: dict[str, list[_Sample]] = {variant: [] for variant in VARIANTS}
                for _ in range(self._rounds):
                    self._tick(f"{protocol}, {spans} spans")
                    for variant in VARIANTS:
                        sample, resident = await self._round(variant, protocol, spans)
                        samples[variant].append(sample)
                rows = {variant: _row(found, spans) for variant, found in samples.items()}
                results.setdefault(protocol, {})[str(spans)] = rows
        self._tick("outage")
        outage = await self._outage()
        figures = {
            "benchmark": BENCHMARK.name,
            "results": results,
            "ratio": _ratios(results),
            "resident_mb": round(resident / 1e6, 1),
            **outage,
            "python": platform.python_version(),
            "cpu_count": os.cpu_count(),
            "rounds": self._rounds,
        }
        return Results(figures, _table(results))

    async def _round(self, variant: str, protocol: str, spans: int) -> tuple[_Sample, float]:
        requests = self._requests[spans]
        size = sum(map(len, requests)) // len(requests)
        count = max(CONNECTIONS, self._plan.file_size // _ROUND_BYTES[spans] // size)
        async with _Server.started(variant, self._directory / "store") as server:
            await self._load(server, protocol, requests, CONNECTIONS)  # both are warm now
            before = await server.facts()
            start = time.perf_counter()
            latencies = await self._load(server, protocol, requests, count)
            seconds = time.perf_counter() - start
            after = await server.facts()
        self._clear()
        cpu = after["cpu"] - before["cpu"]
        return _Sample(len(latencies), seconds, cpu, latencies), after["resident"]

    async def _load(
        self, server: _Server, protocol: str, requests: list[bytes], count: int
    ) -> list[float]:
        latencies: list[float] = []
        left = iter(range(count))

        async def produce() -> None:
            async with server.connect(protocol) as send:
                for number in left:
                    begun = time.perf_counter()
                    await send(requests[number % len(requests)])
                    latencies.append(time.perf_counter() - begun)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(produce())
        return latencies

    async def _outage(self) -> dict[str, float]:
        """Memory while everything is stored and nothing can be delivered."""
        requests = self._requests[SPANS[-1]]
        size = sum(map(len, requests)) // len(requests)
        parts = 8
        count = max(CONNECTIONS, 8 * self._plan.file_size // size // parts)
        resident = []
        async with _Server.started("outage", self._directory / "store") as server:
            for _ in range(parts):
                await self._load(server, "http", requests, count)
                resident.append((await server.facts())["resident"])
        self._clear()
        first = max(resident[: parts // 4])
        return {
            "outage_growth_mb": round((max(resident) - first) / 1e6, 1),
            "outage_bytes": parts * count * size,
        }

    def _clear(self) -> None:
        """Remove the files of the store; the server put all of them into one directory."""
        FlatDisk(self._disk, self._directory).remove_all()


def _row(samples: list[_Sample], spans: int) -> dict[str, float]:
    best = max(samples, key=lambda sample: sample.requests / sample.seconds)
    cpu = min(sample.cpu / sample.requests for sample in samples)
    return {
        "requests_s": round(best.requests / best.seconds, 1),
        "spans_s": round(best.requests * spans / best.seconds),
        "cpu_us": round(cpu * 1e6, 1),
        "spans_cpu_s": round(spans / cpu),
        "p50_ms": round(min(sample.percentile_ms(0.5) for sample in samples), 2),
        "p99_ms": round(min(sample.percentile_ms(0.99) for sample in samples), 2),
    }


def _ratios(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> object:
    return {
        protocol: {
            spans: round(rows["durable"]["requests_s"] / rows["plain"]["requests_s"], 3)
            for spans, rows in by_spans.items()
        }
        for protocol, by_spans in results.items()
    }


def _table(results: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> Table:
    columns = {
        "requests/s": ("requests_s", ",.0f"),
        "spans/s": ("spans_s", ",.0f"),
        "CPU, us": ("cpu_us", ",.0f"),
        "spans/CPU s": ("spans_cpu_s", ",.0f"),
        "p50, ms": ("p50_ms", ".2f"),
        "p99, ms": ("p99_ms", ".2f"),
    }
    return Table(
        "Best rounds",
        ("", *columns),
        tuple(
            (
                f"{protocol}, {spans} spans, {variant}",
                *(format(row[key], form) for key, form in columns.values()),
            )
            for protocol, by_spans in results.items()
            for spans, rows in by_spans.items()
            for variant, row in rows.items()
        ),
    )
