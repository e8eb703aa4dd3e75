"""Figures of one or more processes as OpenMetrics text.

=============================  ==================================================================
here                           in the text
=============================  ==================================================================
``quiver.gc.evictions_total``  counter ``quiver_gc_evictions``, sample ``..._total``
any other value                a gauge
a histogram                    ``_bucket`` with ``le``, ``_count`` and ``_sum``
=============================  ==================================================================

Whatever is not allowed in a name becomes an underscore. ``Figures`` also travel between processes,
as JSON; each process gets labels of its own there, so that one that starts anew begins its counters
anew and disturbs nobody's sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quiver.metrics import Histogram, Metrics, labelled

CONTENT_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_TOTAL: Final = "_total"
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_:]")
_NOT_IN_A_LABEL: Final = re.compile(r"[^A-Za-z0-9_]")
_LABEL: Final = re.compile(r'([^=,]+)="(.*?)"(?=,[^=,]+="|$)', re.DOTALL)
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Figures:
    """Values and histograms by name; names carry labels as ``quiver.metrics`` writes them."""

    values: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Metrics, **labels: object) -> Figures:
        """What is there now, every name with these labels more."""
        return cls(metrics.values(), metrics.histograms()).labelled(**labels)

    def labelled(self, **labels: object) -> Figures:
        """The same under names with more labels."""
        if not labels:
            return self
        return Figures(
            {_with_labels(name, labels): value for name, value in self.values.items()},
            {_with_labels(name, labels): value for name, value in self.histograms.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """For another process."""
        return {
            "values": self.values,
            "histograms": {
                name: [histogram.bounds, histogram.counts, histogram.total]
                for name, histogram in self.histograms.items()
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Figures:
        """From another process; ``ValueError`` or its kin when it is something else."""
        histograms = {}
        for name, (bounds, counts, total) in document["histograms"].items():
            histogram = Histogram(tuple(map(float, bounds)))
            if len(counts) != len(histogram.counts):
                raise ValueError(f"{name} has {len(counts)} counts for {len(bounds)} bounds")
            histogram.counts = list(map(int, counts))
            histogram.count, histogram.total = sum(histogram.counts), float(total)
            histograms[str(name)] = histogram
        values = {str(name): float(value) for name, value in document["values"].items()}
        return cls(values, histograms)


def merged(parts: Iterable[Figures]) -> Figures:
    """All of them; values of the same name and labels are added."""
    whole = Figures()
    for part in parts:
        for name, value in part.values.items():
            whole.values[name] = whole.values.get(name, 0.0) + value
        for name, histogram in part.histograms.items():
            there = whole.histograms.get(name)
            if there is None or there.bounds != histogram.bounds:
                whole.histograms[name] = histogram.copy()
                continue
            there.counts = [a + b for a, b in zip(there.counts, histogram.counts, strict=True)]
            there.total += histogram.total
            there.count += histogram.count
    return whole


def render(figures: Figures) -> str:
    """The text, ending with ``# EOF``."""
    families: dict[str, tuple[str, list[str]]] = {}
    for name, histogram in sorted(figures.histograms.items()):
        base, labels = split(name)
        lines = _family(families, _plain(base), "histogram")
        lines += _histogram_lines(_plain(base), labels, histogram)
    gauges = []
    for name, value in sorted(figures.values.items()):
        base, labels = split(name)
        plain = _plain(base)
        if plain.endswith(_TOTAL):
            lines = _family(families, plain.removesuffix(_TOTAL), "counter")
            lines.append(f"{plain}{_label_text(labels)} {_number(value)}")
        else:
            gauges.append((plain, labels, value))
    taken = frozenset(families)  # one name is of one type only
    for plain, labels, value in gauges:
        gauge = f"{plain}_now" if plain in taken else plain
        lines = _family(families, gauge, "gauge")
        lines.append(f"{gauge}{_label_text(labels)} {_number(value)}")
    text = [
        line
        for family, (kind, lines) in sorted(families.items())
        for line in (f"# TYPE {family} {kind}", *lines)
    ]
    return "\n".join([*text, "# EOF", ""])


def split(name: str) -> tuple[str, dict[str, str]]:
    """A name without its labels, and these."""
    base, brace, rest = name.partition("{")
    if not brace or not rest.endswith("}"):
        return name, {}
    return base, dict(_LABEL.findall(rest.removesuffix("}")))


def _with_labels(name: str, more: Mapping[str, object]) -> str:
    base, labels = split(name)
    return labelled(base, **{**labels, **more})


def _family(families: dict[str, tuple[str, list[str]]], name: str, kind: str) -> list[str]:
    return families.setdefault(name, (kind, []))[1]


def _histogram_lines(name: str, labels: Mapping[str, str], histogram: Histogram) -> list[str]:
    lines = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        so_far += count
        le = {**labels, "le": _number(float(bound))}
        lines.append(f"{name}_bucket{_label_text(le)} {so_far}")
    text = _label_text(labels)
    lines.append(f"{name}_count{text} {so_far}")
    lines.append(f"{name}_sum{text} {_number(histogram.total)}")
    return lines


def _plain(name: str) -> str:
    plain = _NOT_IN_A_NAME.sub("_", name)
    return f"_{plain}" if plain[:1].isdigit() or not plain else plain


def _label_text(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    inside = ",".join(
        f'{_NOT_IN_A_LABEL.sub("_", key)}="{str(value).translate(_ESCAPES)}"'
        for key, value in labels.items()
    )
    return f"{{{inside}}}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
