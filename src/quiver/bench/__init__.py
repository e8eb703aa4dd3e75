"""Benchmarks: what Quiver costs on this machine, beside the plain operation of the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quiver.bench import buffer, formats, otlp, pipeline, store
from quiver.bench.measure import Benchmark

BENCHMARKS: Final[Mapping[str, Benchmark]] = MappingProxyType(
    {
        benchmark.name: benchmark
        for benchmark in (
            formats.BENCHMARK,
            store.BENCHMARK,
            otlp.BENCHMARK,
            pipeline.BENCHMARK,
            buffer.BENCHMARK,
        )
    }
)
"""Every benchmark by the name that ``quiver bench`` takes."""
