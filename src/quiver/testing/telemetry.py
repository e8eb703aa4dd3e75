"""Telemetry that looks like that of a real system, as much as is asked for, the same every time.

    telemetry = Telemetry(seed=7, shape=Shape(items_per_request=500))
    requests = telemetry.take(Signal.TRACES, 20)

A small shop: services that call one another, with databases, caches and a message queue. The three
signals of one seed tell of the same traffic: log records and exemplars name spans of the traces.
Requests are endless, and what is kept to make them does not grow with their number.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import Message
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ScopeLogs, SeverityNumber
from opentelemetry.proto.metrics.v1.metrics_pb2 import ScopeMetrics
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.otlp.messages import REQUEST_TYPES
from quiver.testing._series import all_series
from quiver.testing._traffic import Agents, Step, Walk
from quiver.testing._vocabulary import (
    Draws,
    Operation,
    Value,
    any_value,
    application_attributes,
    exceptions,
    key_values,
    noun,
    sentences,
)

_MAX_RETRY_DISTANCE: Final = 8
_TAILS: Final = 64  # ways to fill up the attributes of an item
_EXPORT_INTERVAL: Final = 10_000_000_000
_LATEST_START: Final = 1 << 62
_REMOTE: Final = 0x301  # sampled; whether the parent is remote is known; it is
_LOCAL: Final = 0x101
_SCOPE_OF_KIND: Final = {
    Span.SPAN_KIND_SERVER: 0,
    Span.SPAN_KIND_CONSUMER: 0,
    Span.SPAN_KIND_CLIENT: 1,
    Span.SPAN_KIND_PRODUCER: 1,
    Span.SPAN_KIND_INTERNAL: 2,
}
_ENTRY_KINDS: Final = frozenset({Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CONSUMER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the traffic looks like.

    ``attributes_per_item`` is for spans. Log records and data points have a third as many.
    Attributes of errors and of language models come on top.
    """

    services: int = 6
    instances_per_service: int = 2
    resources_per_request: int = 2
    scopes_per_resource: int = 3
    items_per_request: int = 100  # spans, log records or data points
    attributes_per_item: int = 12
    error_share: float = 0.02
    llm_share: float = 0.0  # of spans and log records: they carry a prompt and its completion
    retry_share: float = 0.0  # of requests: they are sent once more, soon after
    start_time_unix_nano: int = 1_760_000_000_000_000_000

    def __post_init__(self) -> None:
        for name in (
            *("services", "instances_per_service", "resources_per_request"),
            *("scopes_per_resource", "items_per_request"),
        ):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.attributes_per_item < 0:
            raise InvalidConfig("attributes_per_item must not be negative")
        for name in ("error_share", "llm_share", "retry_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        if not 0 <= self.start_time_unix_nano <= _LATEST_START:
            raise InvalidConfig("start_time_unix_nano must be between 0 and 2**62")


class Telemetry:
    """OTLP requests, made up. The same seed and shape make the same bytes, everywhere."""

    def __init__(self, seed: int, shape: Shape = Shape()) -> None:  # noqa: B008 - it is immutable
        self._seed: Final = seed
        self._shape: Final = shape

    def requests(self, signal: Signal) -> Iterator[bytes]:
        """Serialised requests, without end. Every call begins again with the first."""
        made = (
            message.SerializeToString(deterministic=True)
            for message in _SOURCES[signal](self._seed, self._shape)
        )
        draws = Draws(self._seed, signal, "retries")
        return _with_retries(made, draws, self._shape.retry_share)

    def request_messages(self, signal: Signal) -> Iterator[Message]:
        """The same requests, as objects; each is the caller's to change."""
        return map(REQUEST_TYPES[signal].FromString, self.requests(signal))

    def take(self, signal: Signal, count: int) -> list[bytes]:
        """The first requests."""
        return list(itertools.islice(self.requests(signal), count))


def _with_retries(requests: Iterable[bytes], draws: Draws, share: float) -> Iterator[bytes]:
    """Some come again. At most ``_MAX_RETRY_DISTANCE`` wait for it at a time."""
    waiting: list[tuple[int, int, bytes]] = []
    for number, request in enumerate(requests):
        yield request
        while waiting and waiting[0][0] <= number:
            yield heapq.heappop(waiting)[-1]
        if draws.chance(share):
            due = number + 1 + draws.below(_MAX_RETRY_DISTANCE)
            heapq.heappush(waiting, (due, number, request))


# --- What all signals need --------------------------------------------------------------------


def _walk(seed: int, shape: Shape) -> Walk:
    return Walk(
        seed,
        services=shape.services,
        instances=shape.instances_per_service,
        error_share=shape.error_share,
        start=shape.start_time_unix_nano,
    )


def _agents_arguments(shape: Shape) -> dict[str, int]:
    return {
        "services": shape.services,
        "instances": shape.instances_per_service,
        "scopes": shape.scopes_per_resource,
        "resources_per_request": shape.resources_per_request,
        "items_per_request": shape.items_per_request,
    }


class _Attributes:
    """Attributes for items of one type, prepared as bytes that merge into an item."""

    def __init__(self, item: type[Span | LogRecord], draws: Draws, shape: Shape) -> None:
        self._item: Final = item
        self._draws: Final = draws
        self._tails: Final[dict[int, list[bytes]]] = {}
        self._sentences: Final = sentences(draws, 256 if shape.llm_share else 0)

    def part(self, attributes: dict[str, Value]) -> bytes:
        """An item that has these attributes and nothing else."""
        made = self._item(attributes=key_values(attributes))
        return made.SerializeToString(deterministic=True)

    def tails(self, count: int) -> list[bytes]:
        """Ways to add so many attributes of the application."""
        if count not in self._tails:
            self._tails[count] = [
                self.part(application_attributes(self._draws, count)) for _ in range(_TAILS)
            ]
        return self._tails[count]

    def language_model(self) -> bytes:
        """A call to a model, with what was asked and what it said."""
        draws = self._draws
        asked, said = (
            " ".join(draws.pick(self._sentences) for _ in range(4 + draws.below(28)))
            for _ in range(2)
        )
        return self.part(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": draws.pick(("openai", "anthropic", "mistral_ai")),
                "gen_ai.request.temperature": draws.below(11) / 10,
                "gen_ai.usage.input_tokens": len(asked) // 4,
                "gen_ai.usage.output_tokens": len(said) // 4,
                "gen_ai.prompt": asked,
                "gen_ai.completion": said,
            }
        )


# --- Traces -----------------------------------------------------------------------------------


class _Pattern:
    """The spans of one operation: what they share, and how they differ."""

    __slots__ = ("base", "fresh", "outcome", "scope", "tails")

    def __init__(self, operation: Operation, attributes: _Attributes, shape: Shape) -> None:
        room = shape.attributes_per_item
        fixed = dict(itertools.islice(operation.fixed.items(), room))
        room -= len(fixed)
        self.base = attributes.part(fixed) + Span(
            name=operation.name, kind=operation.kind
        ).SerializeToString(deterministic=True)
        self.scope = _SCOPE_OF_KIND[operation.kind] % shape.scopes_per_resource
        self.outcome = operation.outcome if room else None
        room -= self.outcome is not None
        self.fresh = operation.fresh[:room]
        self.tails = attributes.tails(room - len(self.fresh))

    def fill(self, span: Span, step: Step, draws: Draws) -> None:
        span.MergeFromString(self.base + draws.pick(self.tails))
        if self.outcome:
            key, well, failed = self.outcome
            added = span.attributes.add()
            added.key = key
            added.value.int_value = failed if step.failed else well
        for key, text, bits in self.fresh:
            added = span.attributes.add()
            added.key = key
            if text is None:
                added.value.int_value = draws.bits(bits)
            else:
                added.value.string_value = text % draws.bits(bits)


class _Spans:
    """Makes a span of each step."""

    def __init__(self, seed: int, shape: Shape, walk: Walk) -> None:
        self._shape: Final = shape
        self._draws: Final = Draws(seed, "spans")
        self._attributes: Final = _Attributes(Span, self._draws, shape)
        self.patterns: Final = {
            operation: _Pattern(operation, self._attributes, shape)
            for role in walk.roles
            for operation in role.operations()
        }
        self._exceptions: Final = [
            [_event("exception", thrown) for thrown in exceptions(service)]
            for service in range(shape.services)
        ]
        self._events: Final = [
            _event("cache.miss", {"cache.name": "sessions", "cache.size": 1024, "cache.ttl": 30.5}),
            _event("message", {"message.type": "SENT", "message.id": 1}),
            _event("retry", {"retry.attempt": 2, "retry.delay": 0.25}),
            _event("first byte received", {}),
        ]

    def fill(self, span: Span, step: Step) -> None:
        draws = self._draws
        self.patterns[step.operation].fill(span, step, draws)
        span.trace_id, span.span_id, span.parent_span_id = step[3:6]
        span.start_time_unix_nano, span.end_time_unix_nano = step.start, step.end
        if step.service % 3 < 2:  # noqa: PLR2004 - the SDKs of the others do not set them
            span.flags = _REMOTE if step.operation.kind in _ENTRY_KINDS else _LOCAL
        if step.trace_id[0] < 32:  # noqa: PLR2004 - all spans of a trace have it, or none
            span.trace_state = f"shop=t{step.trace_id[1]:02x},rojo=00f067aa0ba902b7"
        if step.failed:
            self._fail(span, step)
        elif draws.chance(0.1):
            span.status.code = Status.STATUS_CODE_OK
        if draws.chance(0.8):
            self._add_event(span, step, draws.pick(self._events))
        if step.link:
            self._add_link(span, step.link)
        if draws.chance(1 / 128):
            span.dropped_attributes_count = 1 + draws.below(4)
            span.dropped_events_count = draws.below(3)
            span.dropped_links_count = draws.below(2)
        if draws.chance(self._shape.llm_share):
            span.MergeFromString(self._attributes.language_model())

    def _fail(self, span: Span, step: Step) -> None:
        span.status.code = Status.STATUS_CODE_ERROR
        span.status.message = f"{step.operation.name} failed"
        self._add_event(span, step, self._draws.pick(self._exceptions[step.service]))

    def _add_event(self, span: Span, step: Step, event: bytes) -> None:
        added = span.events.add()
        added.MergeFromString(event)
        added.time_unix_nano = step.start + self._draws.below(step.end - step.start + 1)
        if self._draws.chance(1 / 64):
            added.dropped_attributes_count = 1

    def _add_link(self, span: Span, link: tuple[bytes, bytes]) -> None:
        added = span.links.add(trace_id=link[0], span_id=link[1], flags=_REMOTE)
        added.attributes.extend(_LINK_ATTRIBUTES)
        if self._draws.chance(0.1):
            added.trace_state = "shop=queue"
            added.dropped_attributes_count = 1


_LINK_ATTRIBUTES: Final = key_values({"messaging.batch.index": 0, "link.reason": "consumed"})


def _event(name: str, attributes: dict[str, Value]) -> bytes:
    event = Span.Event(name=name, attributes=key_values(attributes))
    return event.SerializeToString(deterministic=True)


def _trace_requests(seed: int, shape: Shape) -> Iterator[Message]:
    walk = _walk(seed, shape)
    spans = _Spans(seed, shape, walk)
    agents: Agents[ScopeSpans] = Agents(seed, Signal.TRACES, **_agents_arguments(shape))
    for step in walk:
        scope = agents.scope(step.resource, spans.patterns[step.operation].scope)
        spans.fill(scope.spans.add(), step)
        if request := agents.added(step.resource):
            yield request


# --- Logs -------------------------------------------------------------------------------------

_SEVERITIES: Final = (
    *((SeverityNumber.SEVERITY_NUMBER_INFO, "INFO"),) * 12,
    *((SeverityNumber.SEVERITY_NUMBER_DEBUG, "DEBUG"),) * 5,
    *((SeverityNumber.SEVERITY_NUMBER_WARN, "WARN"),) * 2,
    (SeverityNumber.SEVERITY_NUMBER_TRACE, "TRACE"),
)
_MESSAGES: Final = (
    "{} finished in %d us",
    "{}: took %d us, within its limit",
    "done with {} after %d us, connection goes back to the pool",
)


class _Records:
    """Makes log records of a step."""

    def __init__(self, seed: int, shape: Shape, walk: Walk) -> None:
        self._shape: Final = shape
        self._draws: Final = Draws(seed, "records")
        self._attributes: Final = _Attributes(LogRecord, self._draws, shape)
        room = shape.attributes_per_item // 3
        self._tails: Final = self._attributes.tails(max(room - 2, 0))
        self._bases: Final = {
            operation: self._attributes.part(_where(role_number, line, room))
            for role_number, role in enumerate(walk.roles)
            for line, operation in enumerate(role.operations())
        }
        self._exceptions: Final = [
            [self._attributes.part(thrown) for thrown in exceptions(service)]
            for service in range(shape.services)
        ]

    def fill(self, record: LogRecord, step: Step) -> None:
        draws = self._draws
        record.MergeFromString(self._bases[step.operation] + draws.pick(self._tails))
        record.time_unix_nano = step.start + draws.below(step.end - step.start + 1)
        record.observed_time_unix_nano = record.time_unix_nano + draws.bits(23)
        if step.failed:
            record.severity_number = SeverityNumber.SEVERITY_NUMBER_ERROR
            record.severity_text = "ERROR"
            record.body.string_value = f"{step.operation.name} failed"
            record.MergeFromString(draws.pick(self._exceptions[step.service]))
        else:
            record.severity_number, record.severity_text = draws.pick(_SEVERITIES)
            self._add_body(record, step)
        if draws.chance(0.9):
            record.trace_id, record.span_id = step.trace_id, step.span_id
            record.flags = 1
        if draws.chance(1 / 128):
            record.dropped_attributes_count = 1 + draws.below(4)
        if draws.chance(self._shape.llm_share):
            record.MergeFromString(self._attributes.language_model())

    def _add_body(self, record: LogRecord, step: Step) -> None:
        draws, spent = self._draws, (step.end - step.start) // 1000
        if draws.chance(0.1):
            record.event_name = "shop.operation.finished"
            body: dict[str, Value] = {
                "operation": step.operation.name,
                "spent": {"total": spent, "share": draws.random()},
                "steps": ["read", "checked", draws.bits(10)],
            }
            record.body.CopyFrom(any_value(body))
        else:
            record.body.string_value = draws.pick(_MESSAGES).format(step.operation.name) % spent


def _where(service: int, line: int, room: int) -> dict[str, Value]:
    """What a log record says about the place in the code."""
    known: dict[str, Value] = {
        "code.function.name": f"shop.{noun(service)}.Handler.run",
        "code.line.number": 30 + 11 * line,
    }
    return dict(itertools.islice(known.items(), room))


def _log_requests(seed: int, shape: Shape) -> Iterator[Message]:
    walk = _walk(seed, shape)
    records = _Records(seed, shape, walk)
    quiet = Draws(seed, "quiet steps")
    agents: Agents[ScopeLogs] = Agents(seed, Signal.LOGS, **_agents_arguments(shape))
    for step in walk:
        if not step.failed and quiet.chance(0.4):
            continue
        number = _SCOPE_OF_KIND[step.operation.kind] % shape.scopes_per_resource
        records.fill(agents.scope(step.resource, number).log_records.add(), step)
        if request := agents.added(step.resource):
            yield request


# --- Metrics ----------------------------------------------------------------------------------


def _metric_requests(seed: int, shape: Shape) -> Iterator[Message]:
    draws = Draws(seed, "points")
    series = all_series(
        draws,
        services=shape.services,
        instances=shape.instances_per_service,
        attributes=shape.attributes_per_item // 3,
        began=shape.start_time_unix_nano,
    )
    walk = iter(_walk(seed, shape))
    agents: Agents[ScopeMetrics] = Agents(seed, Signal.METRICS, **_agents_arguments(shape))
    for now in itertools.count(shape.start_time_unix_nano + _EXPORT_INTERVAL, _EXPORT_INTERVAL):
        for one in series:
            scope = agents.scope(one.resource, one.scope % shape.scopes_per_resource)
            one.add_point(scope, now, _EXPORT_INTERVAL, draws, walk)
            if request := agents.added(one.resource):
                yield request


_SOURCES: Final[dict[Signal, Callable[[int, Shape], Iterator[Message]]]] = {
    Signal.TRACES: _trace_requests,
    Signal.LOGS: _log_requests,
    Signal.METRICS: _metric_requests,
}
