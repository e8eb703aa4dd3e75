"""OTLP/JSON for tests: documents like those of the specification, and trees around one value."""

from __future__ import annotations

from typing import Any

from quiver.bundle import Signal
from quiver.otlp.messages import REQUEST_TYPES

TRACE_ID = "5b8efff798038103d269b633813fc60c"
SPAN_ID = "eee19b7ec3c1b174"

TRACES_TEXT = """
{"resourceSpans": [{
  "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "my.service"}}]},
  "scopeSpans": [{
    "scope": {"name": "my.library", "version": "1.0.0",
              "attributes": [{"key": "my.scope.attribute", "value": {"stringValue": "some"}}]},
    "spans": [{
      "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174",
      "parentSpanId": "EEE19B7EC3C1B173", "name": "I'm a server span",
      "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": 1544712661000000000,
      "kind": 2, "attributes": [{"key": "my.span.attr", "value": {"intValue": "-7"}}],
      "links": [{"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174"}],
      "status": {"code": "STATUS_CODE_ERROR", "message": "no"}
    }]
  }]
}]}
"""
LOGS_TEXT = """
{"resourceLogs": [{
  "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "my.service"}}]},
  "scopeLogs": [{
    "logRecords": [{
      "timeUnixNano": "1544712660300000000", "observedTimeUnixNano": "1544712660300000000",
      "severityNumber": 10, "severityText": "Information",
      "traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "EEE19B7EC3C1B174",
      "body": {"kvlistValue": {"values": [
        {"key": "traceId", "value": {"stringValue": "not an id"}},
        {"key": "list", "value": {"arrayValue": {"values": [{"boolValue": true}, {}]}}},
        {"key": "raw", "value": {"bytesValue": "3q0="}}
      ]}}
    }]
  }]
}]}
"""
METRICS_TEXT = """
{"resourceMetrics": [{
  "scopeMetrics": [{
    "metrics": [
      {"name": "my.counter", "unit": "1", "sum": {
        "aggregationTemporality": 1, "isMonotonic": true,
        "dataPoints": [{"asDouble": 5, "timeUnixNano": "1544712660300000000",
          "exemplars": [{"asInt": "3", "spanId": "EEE19B7EC3C1B174",
                         "traceId": "5B8EFFF798038103D269B633813FC60C"}]}]}},
      {"name": "my.exponential", "exponentialHistogram": {
        "aggregationTemporality": "AGGREGATION_TEMPORALITY_CUMULATIVE",
        "dataPoints": [{"count": 3, "sum": 10.5, "scale": -1, "zeroCount": "1",
          "positive": {"offset": 1, "bucketCounts": [0, "2"]}, "min": 0, "max": "Infinity"}]}},
      {"name": "my.summary", "summary": {
        "dataPoints": [{"quantileValues": [{"quantile": 0.5, "value": "NaN"}]}]}}
    ]
  }]
}]}
"""


def request_of(signal: Signal, **fields: Any) -> bytes:  # noqa: ANN401
    return REQUEST_TYPES[signal](**fields).SerializeToString(deterministic=True)


def parsed(signal: Signal, request: bytes) -> Any:  # noqa: ANN401
    return REQUEST_TYPES[signal].FromString(request)


def span_tree(**members: object) -> dict[str, object]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": [members]}]}]}


def value_tree(value: object) -> dict[str, object]:
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": value}]}]}]}


def nested_lists(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"intValue": 1}
    for _ in range(depth):
        value = {"arrayValue": {"values": [value]}}
    return value


def nested_maps(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"intValue": 1}
    for _ in range(depth):
        value = {"kvlistValue": {"values": [{"key": "k", "value": value}]}}
    return value
