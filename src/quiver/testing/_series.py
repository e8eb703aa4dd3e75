"""What the services of the generated telemetry measure: instruments, and their series over time."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    ExponentialHistogramDataPoint,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ScopeMetrics,
    SummaryDataPoint,
)

from quiver.testing._traffic import Step
from quiver.testing._vocabulary import (
    Draws,
    Value,
    application_attributes,
    key_values,
    noun,
)


class Reading(enum.Enum):
    """What the data points of an instrument look like."""

    WHOLE_GAUGE = enum.auto()
    GAUGE = enum.auto()
    COUNTER = enum.auto()  # cumulative, whole
    DELTA_COUNTER = enum.auto()
    LEVEL = enum.auto()  # a sum that goes up and down
    HISTOGRAM = enum.auto()  # cumulative, with sum, least and greatest
    BARE_HISTOGRAM = enum.auto()  # delta, without them
    EXPONENTIAL = enum.auto()
    SUMMARY = enum.auto()


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric, and the values that its attributes take: each combination is a series."""

    name: str
    unit: str
    reading: Reading
    attributes: Mapping[str, Sequence[Value]]


def instruments(service: int) -> tuple[Instrument, ...]:
    """What a service measures, steadily."""
    name = noun(service)
    routes = (f"/api/v1/{name}", f"/api/v1/{name}/{{id}}")
    methods, topics = ("GET", "POST"), (f"{name}.events", f"{name}.retries")
    return (
        Instrument(
            "system.cpu.utilization",
            "1",
            Reading.GAUGE,
            {"cpu.logical_number": (0, 1), "cpu.mode": ("user", "system", "idle")},
        ),
        Instrument("messaging.queue.depth", "{message}", Reading.WHOLE_GAUGE, {"topic": topics}),
        Instrument(
            "system.network.io",
            "By",
            Reading.COUNTER,
            {"network.interface.name": ("eth0", "lo"), "network.io.direction": ("in", "out")},
        ),
        Instrument("shop.revenue", "EUR", Reading.DELTA_COUNTER, {"country": ("DE", "FR", "US")}),
        Instrument(
            "db.client.connection.count",
            "{connection}",
            Reading.LEVEL,
            {"db.client.connection.state": ("idle", "used"), "pool.primary": (True, False)},
        ),
        Instrument(
            "http.server.request.duration",
            "s",
            Reading.HISTOGRAM,
            {"http.route": routes, "http.request.method": methods},
        ),
        Instrument("shop.adjustment", "EUR", Reading.BARE_HISTOGRAM, {"reason": ("tax", "gift")}),
        Instrument("messaging.process.duration", "s", Reading.EXPONENTIAL, {"topic": topics}),
        Instrument("jvm.gc.duration", "s", Reading.SUMMARY, {"jvm.gc.name": ("G1", "G1 Old")}),
    )


# --- Their series ---------------------------------------------------------------------------

_Point: TypeAlias = (
    NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint | SummaryDataPoint
)
_Measured: TypeAlias = NumberDataPoint | HistogramDataPoint | ExponentialHistogramDataPoint
_CUMULATIVE: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_DELTA: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_NO_RECORDED_VALUE: Final = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_BOUNDS: Final = (0.005, 0.025, 0.1, 0.5, 2.5)
_SUM_TYPES: Final = {
    Reading.COUNTER: (_CUMULATIVE, True),
    Reading.DELTA_COUNTER: (_DELTA, True),
    Reading.LEVEL: (_CUMULATIVE, False),
}
_GAUGES: Final = frozenset({Reading.GAUGE, Reading.WHOLE_GAUGE})
_DELTAS: Final = frozenset({Reading.DELTA_COUNTER, Reading.BARE_HISTOGRAM, Reading.EXPONENTIAL})


@dataclass(slots=True, kw_only=True)
class Series:
    """One combination of attributes of one instrument of one resource."""

    resource: int
    scope: int
    reading: Reading
    name: str
    metric: bytes  # all of the metric but its points
    attributes: bytes  # of a point
    began: int
    total: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))

    def add_point(
        self, scope: ScopeMetrics, now: int, interval: int, draws: Draws, walk: Iterator[Step]
    ) -> None:
        """What the series has to say now."""
        metrics = scope.metrics
        if not metrics or metrics[-1].name != self.name:
            metrics.add().MergeFromString(self.metric)
        point = self._new_point(metrics[-1])
        point.MergeFromString(self.attributes)
        point.time_unix_nano = now
        if self.reading not in _GAUGES:
            point.start_time_unix_nano = now - interval if self.reading in _DELTAS else self.began
        if draws.chance(1 / 100):
            point.flags = _NO_RECORDED_VALUE
            return
        self._measure(point, draws)
        if not isinstance(point, SummaryDataPoint) and draws.chance(1 / 12):
            self._add_exemplar(point, now - draws.below(interval), draws, next(walk))

    def _new_point(self, metric: Metric) -> _Point:
        if self.reading in _GAUGES:
            return metric.gauge.data_points.add()
        if self.reading in _SUM_TYPES:
            return metric.sum.data_points.add()
        if self.reading is Reading.EXPONENTIAL:
            return metric.exponential_histogram.data_points.add()
        if self.reading is Reading.SUMMARY:
            return metric.summary.data_points.add()
        return metric.histogram.data_points.add()

    def _measure(self, point: _Point, draws: Draws) -> None:
        if isinstance(point, NumberDataPoint):
            self._measure_number(point, draws)
        elif isinstance(point, HistogramDataPoint):
            self._measure_histogram(point, draws)
        elif isinstance(point, ExponentialHistogramDataPoint):
            _measure_exponential(point, draws)
        else:
            self._measure_summary(point, draws)

    def _measure_number(self, point: NumberDataPoint, draws: Draws) -> None:
        if self.reading is Reading.GAUGE:
            point.as_double = draws.random()
        elif self.reading is Reading.DELTA_COUNTER:
            point.as_double = draws.below(100_000) / 100
        elif self.reading is Reading.COUNTER:
            self.total += draws.bits(16)
            point.as_int = self.total
        else:
            point.as_int = draws.bits(7)

    def _measure_histogram(self, point: HistogramDataPoint, draws: Draws) -> None:
        new = [draws.bits(3 + number % 3) for number in range(len(_BOUNDS) + 1)]
        point.explicit_bounds.extend(_BOUNDS)
        if self.reading is Reading.BARE_HISTOGRAM:
            point.count = sum(new)
            point.bucket_counts.extend(new)
            return
        self.counts = [before + more for before, more in zip(self.counts, new, strict=True)]
        self.total += sum(new) * (100 + draws.bits(10))
        point.count = sum(self.counts)
        point.bucket_counts.extend(self.counts)
        point.sum = self.total / 1000
        if point.count:
            point.min, point.max = draws.below(50) / 10_000, 1 + draws.random()

    def _measure_summary(self, point: SummaryDataPoint, draws: Draws) -> None:
        self.total += draws.bits(4)
        point.count, point.sum = self.total, self.total / 64
        value = draws.random()
        for quantile in (0.5, 0.9, 0.99):
            value += draws.random()
            point.quantile_values.add(quantile=quantile, value=value)

    def _add_exemplar(self, point: _Measured, time: int, draws: Draws, step: Step) -> None:
        added = point.exemplars.add(
            time_unix_nano=time, trace_id=step.trace_id, span_id=step.span_id
        )
        if self.reading is Reading.COUNTER:
            added.as_int = draws.bits(10)
        else:
            added.as_double = draws.random()
        if draws.chance(0.5):
            added.filtered_attributes.extend(key_values({"user.id": f"user-{draws.bits(24):06x}"}))


def _measure_exponential(point: ExponentialHistogramDataPoint, draws: Draws) -> None:
    positive = [draws.bits(4) for _ in range(8 + draws.below(9))]
    point.scale = 3
    point.zero_count = draws.bits(2)
    point.positive.offset = -12
    point.positive.bucket_counts.extend(positive)
    point.count = point.zero_count + sum(positive)
    if draws.chance(0.25):
        point.negative.offset = -4
        point.negative.bucket_counts.append(1)
        point.count += 1
        point.zero_threshold = 0.001
    point.sum = draws.random() * point.count
    if draws.chance(0.5):
        point.min, point.max = -1.0, 2.0


def all_series(
    draws: Draws, *, services: int, instances: int, attributes: int, began: int
) -> list[Series]:
    """Every series of every resource. Those of one metric stand together."""
    return [
        one
        for resource in range(services * instances)
        for scope, instrument in enumerate(instruments(resource % services))
        for one in _series(
            instrument, draws, resource=resource, scope=scope, attributes=attributes, began=began
        )
    ]


def _series(
    instrument: Instrument,
    draws: Draws,
    *,
    resource: int,
    scope: int,
    attributes: int,
    began: int,
) -> Iterator[Series]:
    metric = _metric(instrument).SerializeToString(deterministic=True)
    empty = _empty_point(instrument.reading)
    for values in itertools.product(*instrument.attributes.values()):
        own: dict[str, Value] = dict(zip(instrument.attributes, values, strict=True))
        filled = own | application_attributes(draws, max(attributes - len(own), 0))
        kept = dict(itertools.islice(filled.items(), attributes))
        point = empty(attributes=key_values(kept))
        encoded = point.SerializeToString(deterministic=True)
        yield Series(
            resource=resource,
            scope=scope,
            reading=instrument.reading,
            name=instrument.name,
            metric=metric,
            attributes=encoded,
            began=began,
        )


def _empty_point(reading: Reading) -> type[_Point]:
    if reading in _GAUGES or reading in _SUM_TYPES:
        return NumberDataPoint
    if reading is Reading.EXPONENTIAL:
        return ExponentialHistogramDataPoint
    return SummaryDataPoint if reading is Reading.SUMMARY else HistogramDataPoint


def _metric(instrument: Instrument) -> Metric:
    metric = Metric(name=instrument.name, unit=instrument.unit)
    metric.description = f"What {instrument.name} says about this process."
    if instrument.reading in _SUM_TYPES:
        metric.sum.aggregation_temporality, metric.sum.is_monotonic = _SUM_TYPES[instrument.reading]
    elif instrument.reading is Reading.HISTOGRAM:
        metric.histogram.aggregation_temporality = _CUMULATIVE
    elif instrument.reading is Reading.BARE_HISTOGRAM:
        metric.histogram.aggregation_temporality = _DELTA
    elif instrument.reading is Reading.EXPONENTIAL:
        metric.exponential_histogram.aggregation_temporality = _DELTA
    elif instrument.reading is Reading.SUMMARY:
        metric.metadata.extend(key_values({"prometheus.type": "summary"}))
    return metric
