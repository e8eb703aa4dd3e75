"""Counters, gauges and histograms, under the names that operators know from the documents.

A store writes them as it works; whoever serves them reads ``snapshot``. Names carry dots and
labels, as in ``quiver.gc.evictions_total{reason="size"}``. Adding is a dictionary update under a
lock: cheap enough for once a group, not meant for once a row.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

LATENCY_BOUNDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
SIZE_BOUNDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(slots=True)
class Histogram:
    """How many values fell at or below each bound; the last place counts those above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1

    def copy(self) -> Histogram:
        """One that nobody adds to."""
        made = Histogram(self.bounds)
        made.counts, made.total, made.count = list(self.counts), self.total, self.count
        return made


def labelled(name: str, **labels: object) -> str:
    """``name{key="value"}``, keys in order."""
    if not labels:
        return name
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}"


class Metrics:
    """The figures of one store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: defaultdict[str, float] = defaultdict(float)
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, by: float = 1, **labels: object) -> None:
        """Add to a counter."""
        with self._lock:
            self._values[labelled(name, **labels)] += by

    def set(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[labelled(name, **labels)] = value

    def observe(self, name: str, value: float, bounds: tuple[float, ...] = LATENCY_BOUNDS) -> None:
        """Count a value in a histogram."""
        with self._lock:
            histogram = self._histograms.get(name)
            if histogram is None:
                histogram = self._histograms[name] = Histogram(bounds)
            histogram.add(value)

    def get(self, name: str, **labels: object) -> float:
        """The value of a counter or gauge; 0 when nobody wrote it."""
        with self._lock:
            return self._values.get(labelled(name, **labels), 0.0)

    def values(self) -> dict[str, float]:
        """Counters and gauges."""
        with self._lock:
            return dict(self._values)

    def histograms(self) -> dict[str, Histogram]:
        """Copies, with their bounds and counts."""
        with self._lock:
            return {name: histogram.copy() for name, histogram in self._histograms.items()}

    def snapshot(self) -> dict[str, float]:
        """All values; histograms as their count and sum."""
        with self._lock:
            values = dict(self._values)
            for name, histogram in self._histograms.items():
                values[f"{name}_count"] = histogram.count
                values[f"{name}_sum"] = histogram.total
            return dict(sorted(values.items()))
