"""Generated telemetry: the same every time, valid, and with everything in it that OTLP has."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest
from google.protobuf.message import Message
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.otlp.messages import request_type
from quiver.testing import Shape, Telemetry
from quiver.testing.telemetry import _MAX_RETRY_DISTANCE

SEED = 11
INT64_MAX = (1 << 63) - 1
SAMPLE = 60  # requests
COMPLETE = 3 * SAMPLE // 4  # what begins in these is finished within the sample

# Changing one of these changes what everybody's benchmarks and golden files were made of.
DIGESTS = {
    Signal.TRACES: "776ab8fa9fb4f8ae707436fcedd57bfeb6bd9673c3a53f6c25041567a91b2cc9",
    Signal.LOGS: "6d1bf1a31ebcaf800fee9c028ef01a6a4b77c136b5dba2e193100c300a02fcf6",
    Signal.METRICS: "9102a9f84b3ad73aa57f7528b9cfcd1c4f9eca0b50a9d83f5e2d55b41079ace7",
}


@cache
def sample(signal: Signal) -> tuple[Message, ...]:
    messages = Telemetry(SEED).request_messages(signal)
    return tuple(itertools.islice(messages, SAMPLE))


def repeated(message: Any, number: int) -> Iterable[Any]:  # noqa: ANN401
    """The field of that number. The three signals number theirs alike."""
    field: Iterable[Any] = getattr(message, message.DESCRIPTOR.fields_by_number[number].name)
    return field


def items_of(request: Message) -> Iterator[Any]:
    """Spans, log records or metrics."""
    for resource in repeated(request, 1):
        for scope in repeated(resource, 2):
            yield from repeated(scope, 2)


def points_of(metric: Metric) -> Iterable[Any]:  # of five types, with much in common
    kind = metric.WhichOneof("data")
    assert kind is not None
    points: Iterable[Any] = getattr(metric, kind).data_points
    return points


def exemplars_of(point: Any) -> Iterable[Any]:  # noqa: ANN401 - summaries have none
    return getattr(point, "exemplars", ())


def all_items(signal: Signal) -> list[Any]:
    return [item for request in sample(signal) for item in items_of(request)]


def all_exemplars() -> list[Any]:
    points = [point for metric in all_items(Signal.METRICS) for point in points_of(metric)]
    return [exemplar for point in points for exemplar in exemplars_of(point)]


def count_items(signal: Signal, request: Message) -> int:
    items = list(items_of(request))
    if signal is not Signal.METRICS:
        return len(items)
    return sum(len(list(points_of(metric))) for metric in items)


# --- The same every time ----------------------------------------------------------------------


@pytest.mark.parametrize("signal", Signal)
def test_the_bytes_are_pinned(signal: Signal) -> None:
    shape = Shape(llm_share=0.05, retry_share=0.2)
    requests = Telemetry(SEED, shape).take(signal, 30)
    assert hashlib.sha256(b"".join(requests)).hexdigest() == DIGESTS[signal]


@pytest.mark.parametrize("signal", Signal)
def test_iterators_do_not_disturb_each_other(signal: Signal) -> None:
    telemetry = Telemetry(SEED)
    alone = telemetry.take(signal, 6)
    others = [telemetry.requests(other) for other in (*Signal, signal)]
    mixed = []
    for request in itertools.islice(telemetry.requests(signal), 6):
        mixed.append(request)
        for other in others:
            next(other)
    assert mixed == alone


@pytest.mark.parametrize("signal", Signal)
def test_messages_are_the_same_requests(signal: Signal) -> None:
    telemetry = Telemetry(SEED, Shape(retry_share=0.5))
    messages = itertools.islice(telemetry.request_messages(signal), 10)
    encoded = [message.SerializeToString(deterministic=True) for message in messages]
    assert encoded == telemetry.take(signal, 10)


@pytest.mark.parametrize("signal", Signal)
def test_another_seed_makes_other_requests(signal: Signal) -> None:
    assert not set(Telemetry(1).take(signal, 5)) & set(Telemetry(2).take(signal, 5))


@pytest.mark.parametrize("signal", Signal)
def test_requests_become_columns_and_come_back(signal: Signal) -> None:
    requests = Telemetry(SEED, Shape(llm_share=0.1)).take(signal, 5)
    converter = request_type(signal).converter
    batch = converter.list_to_record_batch(requests)
    assert converter.record_batch_to_array(batch).to_pylist() == requests


# --- The shape --------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [1, 7, 500])
@pytest.mark.parametrize("signal", Signal)
def test_a_request_has_as_many_items_as_asked_for(signal: Signal, items: int) -> None:
    telemetry = Telemetry(SEED, Shape(items_per_request=items))
    for request in itertools.islice(telemetry.request_messages(signal), 4):
        assert count_items(signal, request) == items


@pytest.mark.parametrize("count", [0, 1, 3, 12, 40])
def test_a_span_has_as_many_attributes_as_asked_for(count: int) -> None:
    shape = Shape(attributes_per_item=count, error_share=0)
    for request in itertools.islice(Telemetry(SEED, shape).request_messages(Signal.TRACES), 3):
        for span in items_of(request):
            keys = [attribute.key for attribute in span.attributes]
            assert len(keys) == len(set(keys)) == count


def test_log_records_and_data_points_have_a_third_of_the_attributes() -> None:
    telemetry = Telemetry(SEED, Shape(attributes_per_item=12, error_share=0))
    record = next(items_of(next(telemetry.request_messages(Signal.LOGS))))
    metric = next(items_of(next(telemetry.request_messages(Signal.METRICS))))
    assert len(record.attributes) == 4
    assert {len(point.attributes) for point in points_of(metric)} == {4}


@pytest.mark.parametrize(
    ("signal", "least", "greatest"),
    [(Signal.TRACES, 500, 700), (Signal.LOGS, 200, 350), (Signal.METRICS, 130, 250)],
)
def test_items_have_a_usual_size(signal: Signal, least: int, greatest: int) -> None:
    requests = Telemetry(SEED, Shape(items_per_request=500)).take(signal, 8)
    assert least <= sum(map(len, requests)) / (8 * 500) <= greatest


@pytest.mark.parametrize("signal", Signal)
def test_resources_and_scopes_are_at_most_as_many_as_asked_for(signal: Signal) -> None:
    shape = Shape(services=5, resources_per_request=3, scopes_per_resource=2)
    most = 0
    for request in itertools.islice(Telemetry(SEED, shape).request_messages(signal), 20):
        resources = list(repeated(request, 1))
        assert 1 <= len(resources) <= 3
        most = max(most, len(resources))
        for resource in resources:
            assert 1 <= len(list(repeated(resource, 2))) <= 2
    assert most == 3


@pytest.mark.parametrize("services", [1, 2, 30])
def test_services_are_as_many_as_asked_for(services: int) -> None:
    shape = Shape(services=services, items_per_request=5, resources_per_request=50)
    messages = Telemetry(SEED, shape).request_messages(Signal.TRACES)
    seen = {
        resource.resource.attributes[0].value.string_value
        for request in itertools.islice(messages, 600)
        for resource in repeated(request, 1)
    }
    assert len(seen) == services


@pytest.mark.parametrize("signal", [Signal.TRACES, Signal.LOGS])
def test_language_models_talk_much(signal: Signal) -> None:
    messages = Telemetry(SEED, Shape(llm_share=0.25)).request_messages(signal)
    items = [item for request in itertools.islice(messages, 8) for item in items_of(request)]
    prompts = [
        attribute.value.string_value
        for item in items
        for attribute in item.attributes
        if attribute.key in {"gen_ai.prompt", "gen_ai.completion"}
    ]
    assert 0.2 < len(prompts) / 2 / len(items) < 0.3
    assert 1000 < sum(map(len, prompts)) / len(prompts) < 4000


@pytest.mark.parametrize(
    "wrong",
    [
        {"services": 0},
        {"items_per_request": 0},
        {"attributes_per_item": -1},
        {"retry_share": 1.5},
        {"error_share": -0.1},
        {"start_time_unix_nano": 1 << 63},
    ],
)
def test_a_shape_outside_its_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        Shape(**wrong)


# --- Retries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("signal", Signal)
def test_retries_repeat_bytes_and_few_wait_for_it(signal: Signal, share: float) -> None:
    requests = Telemetry(SEED, Shape(items_per_request=10, retry_share=share)).take(signal, 600)
    first_time: dict[bytes, int] = {}
    repeated = 0
    for request in requests:
        if request not in first_time:
            first_time[request] = len(first_time)
        else:
            repeated += 1
            assert 1 <= len(first_time) - 1 - first_time[request] <= _MAX_RETRY_DISTANCE
    assert repeated / len(first_time) == pytest.approx(share, abs=0.07)
    assert max(Counter(requests).values()) == (2 if share else 1)


def test_a_retry_does_not_change_the_other_requests() -> None:
    shape = Shape(items_per_request=10, retry_share=0.5)
    with_retries = Telemetry(SEED, shape).take(Signal.TRACES, 200)
    first_time = list(dict.fromkeys(with_retries))
    without = Telemetry(SEED, Shape(items_per_request=10)).take(Signal.TRACES, len(first_time))
    assert first_time == without


# --- Traces -----------------------------------------------------------------------------------


def test_ids_have_their_length_and_are_unique() -> None:
    spans = all_items(Signal.TRACES)
    assert {len(span.trace_id) for span in spans} == {16}
    assert {len(span.span_id) for span in spans} == {8}
    assert {len(span.parent_span_id) for span in spans} == {0, 8}
    assert len({span.span_id for span in spans}) == len(spans)
    roots = [span.trace_id for span in spans if not span.parent_span_id]
    assert len(set(roots)) == len(roots) > 100


def test_parents_exist_and_last_as_long_as_their_children() -> None:
    by_id = {span.span_id: span for span in all_items(Signal.TRACES)}
    children = [
        span
        for request in sample(Signal.TRACES)[:COMPLETE]
        for span in items_of(request)
        if span.parent_span_id
    ]
    assert len(children) > 3000
    for child in children:
        parent = by_id[child.parent_span_id]
        assert child.trace_id == parent.trace_id
        assert parent.start_time_unix_nano <= child.start_time_unix_nano
        assert child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= parent.end_time_unix_nano <= INT64_MAX


def test_a_trace_leaves_with_several_requests_and_crosses_services() -> None:
    requests_of_trace: dict[bytes, set[int]] = {}
    service_of: dict[bytes, str] = {}
    for number, request in enumerate(sample(Signal.TRACES)):
        for resource in repeated(request, 1):
            name = resource.resource.attributes[0].value.string_value
            for span in (span for scope in repeated(resource, 2) for span in scope.spans):
                requests_of_trace.setdefault(span.trace_id, set()).add(number)
                service_of[span.span_id] = name
    assert sum(len(numbers) > 1 for numbers in requests_of_trace.values()) > 100
    pairs = {
        (service_of[span.parent_span_id], service_of[span.span_id])
        for span in all_items(Signal.TRACES)
        if span.parent_span_id in service_of
    }
    crossing = {(caller, callee) for caller, callee in pairs if caller != callee}
    assert crossing == {
        ("storefront", "checkout"),
        ("storefront", "catalog"),
        ("checkout", "payment"),
        ("checkout", "inventory"),
        ("catalog", "shipping"),
    }


def test_a_server_answers_a_client_and_a_consumer_links_to_a_producer() -> None:
    by_id = {span.span_id: span for span in all_items(Signal.TRACES)}
    kinds = Counter(span.kind for span in by_id.values())
    assert set(kinds) == {kind for kind in Span.SpanKind.values() if kind}
    for span in by_id.values():
        parent = by_id.get(span.parent_span_id)
        if parent is not None and span.kind == Span.SPAN_KIND_SERVER:
            assert parent.kind == Span.SPAN_KIND_CLIENT
        elif parent is not None:
            assert parent.kind == Span.SPAN_KIND_SERVER
        if span.kind == Span.SPAN_KIND_CONSUMER:
            sender = by_id.get(span.links[0].span_id)
            if sender is not None:
                assert sender.kind == Span.SPAN_KIND_PRODUCER
                assert sender.trace_id == span.links[0].trace_id != span.trace_id
                assert sender.end_time_unix_nano <= span.start_time_unix_nano


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_errors_are_as_many_as_asked_for_and_have_an_exception(share: float) -> None:
    shape = Shape(error_share=share)
    requests = itertools.islice(Telemetry(SEED, shape).request_messages(Signal.TRACES), 40)
    spans = [span for request in requests for span in items_of(request)]
    failed = [span for span in spans if span.status.code == Status.STATUS_CODE_ERROR]
    assert len(failed) / len(spans) == pytest.approx(share, abs=0.03)
    for span in spans:
        thrown = [event for event in span.events if event.name == "exception"]
        assert len(thrown) == (span.status.code == Status.STATUS_CODE_ERROR)
        for event in span.events:
            assert span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano


def test_spans_have_everything_that_a_span_can_have() -> None:
    spans = all_items(Signal.TRACES)
    usual = Counter(field.name for span in spans for field, _ in span.ListFields())
    assert set(usual) == {field.name for field in Span.DESCRIPTOR.fields}
    for rare in ("trace_state", "flags", "links", "status", "dropped_attributes_count"):
        assert usual[rare] < len(spans)
    for container in ("events", "links"):
        parts = [part for span in spans for part in getattr(span, container)]
        seen = {field.name for part in parts for field, _ in part.ListFields()}
        assert seen == {field.name for field in parts[0].DESCRIPTOR.fields}


# --- Values, resources and scopes -------------------------------------------------------------


@pytest.mark.parametrize("signal", [Signal.TRACES, Signal.LOGS])
def test_attributes_have_every_type_and_are_mostly_text(signal: Signal) -> None:
    items = all_items(signal)
    outer = Counter(
        attribute.value.WhichOneof("value") for item in items for attribute in item.attributes
    )
    known = {field.name for field in AnyValue.DESCRIPTOR.fields} - {"string_value_strindex"}
    assert set(outer) == known | {None}
    assert outer["string_value"] > outer.total() / 2
    assert 0 < outer[None] < outer.total() / 20
    nested = {
        inner.value.WhichOneof("value")
        for item in items
        for attribute in item.attributes
        for inner in attribute.value.kvlist_value.values
    }
    assert nested == {"string_value", "kvlist_value", "array_value"}


def test_some_attributes_have_few_values_and_some_have_many() -> None:
    seen: dict[str, set[bytes]] = {}
    for span in all_items(Signal.TRACES):
        for attribute in span.attributes:
            values = seen.setdefault(attribute.key, set())
            values.add(attribute.value.SerializeToString(deterministic=True))
    assert len(seen["http.request.method"]) == 4
    assert len(seen["db.system.name"]) == 2
    assert len(seen["http.response.status_code"]) < 10
    assert len(seen["user.id"]) > 500
    assert len(seen["db.query.text"]) > 500


@pytest.mark.parametrize("signal", Signal)
def test_resources_and_scopes_say_who_they_are(signal: Signal) -> None:
    scopes_seen: set[str] = set()
    for request in sample(signal):
        for resource in repeated(request, 1):
            keys = {attribute.key for attribute in resource.resource.attributes}
            assert {"service.name", "host.name", "k8s.pod.name", "telemetry.sdk.name"} <= keys
            assert resource.schema_url
            for scope in repeated(resource, 2):
                assert scope.scope.name
                assert scope.scope.version
                scopes_seen.update(field.name for field, _ in scope.ListFields())
                scopes_seen.update(field.name for field, _ in scope.scope.ListFields())
    assert {"schema_url", "attributes"} <= scopes_seen


# --- Logs -------------------------------------------------------------------------------------


def test_log_records_have_everything_that_a_log_record_can_have() -> None:
    records = all_items(Signal.LOGS)
    seen = Counter(field.name for record in records for field, _ in record.ListFields())
    assert set(seen) == {field.name for field in LogRecord.DESCRIPTOR.fields}
    bodies = Counter(record.body.WhichOneof("value") for record in records)
    assert bodies["string_value"] > bodies["kvlist_value"] > 0
    assert len(records) * 0.8 < seen["trace_id"] < len(records)
    for record in records:
        assert (len(record.trace_id), len(record.span_id)) in {(16, 8), (0, 0)}
        assert record.time_unix_nano <= record.observed_time_unix_nano <= INT64_MAX
        assert record.severity_number
        assert record.severity_text


def test_log_records_and_exemplars_name_spans_that_exist() -> None:
    spans = {(span.trace_id, span.span_id): span for span in all_items(Signal.TRACES)}
    records = [record for record in all_items(Signal.LOGS) if record.trace_id]
    known = [record for record in records if (record.trace_id, record.span_id) in spans]
    assert len(known) > len(records) / 2  # the others are later than the last span looked at
    for record in known:
        span = spans[record.trace_id, record.span_id]
        assert span.start_time_unix_nano <= record.time_unix_nano <= span.end_time_unix_nano
    exemplars = all_exemplars()
    assert len(exemplars) > 300
    assert all((exemplar.trace_id, exemplar.span_id) in spans for exemplar in exemplars)


# --- Metrics ----------------------------------------------------------------------------------


def test_metrics_have_every_type_and_its_variants() -> None:
    metrics = all_items(Signal.METRICS)
    assert {metric.WhichOneof("data") for metric in metrics} == {
        oneof.name for oneof in Metric.DESCRIPTOR.oneofs_by_name["data"].fields
    }
    sums = {
        (metric.sum.aggregation_temporality, metric.sum.is_monotonic)
        for metric in metrics
        if metric.HasField("sum")
    }
    assert sums == {(2, True), (1, True), (2, False)}
    numbers = {
        (metric.WhichOneof("data"), point.WhichOneof("value"))
        for metric in metrics
        for point in points_of(metric)
        if metric.WhichOneof("data") in {"gauge", "sum"} and not point.flags
    }
    assert numbers == set(itertools.product(("gauge", "sum"), ("as_int", "as_double")))
    histograms = {
        (point.HasField("sum"), point.HasField("min"), point.HasField("max"))
        for metric in metrics
        for point in metric.histogram.data_points
        if not point.flags
    }
    assert histograms == {(True, True, True), (False, False, False)}
    assert any(metric.metadata for metric in metrics)


def test_data_points_have_everything_that_their_types_can_have() -> None:
    for kind in ("gauge", "sum", "histogram", "exponential_histogram", "summary"):
        points = [
            point for m in all_items(Signal.METRICS) if m.HasField(kind) for point in points_of(m)
        ]
        seen = {field.name for point in points for field, _ in point.ListFields()}
        missing = {field.name for field in points[0].DESCRIPTOR.fields} - seen
        assert missing == ({"start_time_unix_nano"} if kind == "gauge" else set())
        empty = [point for point in points if point.flags]
        assert 0 < len(empty) < len(points) / 10
        assert all(not exemplars_of(point) for point in empty)
    exemplars = all_exemplars()
    assert {e.WhichOneof("value") for e in exemplars} == {"as_int", "as_double"}
    assert any(exemplar.filtered_attributes for exemplar in exemplars)


def test_counts_agree() -> None:
    for metric in all_items(Signal.METRICS):
        for point in metric.histogram.data_points:
            assert point.count == sum(point.bucket_counts)
            assert point.flags or len(point.bucket_counts) == len(point.explicit_bounds) + 1
        for other in metric.exponential_histogram.data_points:
            buckets = sum(other.positive.bucket_counts) + sum(other.negative.bucket_counts)
            assert other.count == other.zero_count + buckets


@pytest.mark.parametrize("start", [0, 1_700_000_000_000_000_000])
def test_a_series_goes_on_with_the_same_attributes(start: int) -> None:
    shape = Shape(services=1, instances_per_service=1, start_time_unix_nano=start)
    series: dict[str, list[Any]] = {}
    for request in itertools.islice(Telemetry(SEED, shape).request_messages(Signal.METRICS), 10):
        for metric in items_of(request):
            if metric.name == "system.network.io":
                for point in metric.sum.data_points:
                    series.setdefault(str(point.attributes), []).append(point)
    assert len(series) == 2 * 2
    for points in series.values():
        times = [point.time_unix_nano for point in points]
        values = [point.as_int for point in points if not point.flags]
        assert {point.start_time_unix_nano for point in points} == {start}
        assert times == list(range(start + 10**10, times[-1] + 1, 10**10))
        assert values == sorted(values)
        assert len(values) > 20
