"""The traffic behind the generated telemetry: who calls whom, and who exports what.

``Walk`` sends users through the services. All signals of a seed describe the same walk, so a log
record names a span that the traces have. ``Agents`` collects the items of some resources each, and
hands out a request whenever it is full: the spans of one trace leave with several requests.

The call graph is a tree, service ``n`` calls ``2n + 1`` and ``2n + 2``. A message that a service
publishes is consumed in a trace of its own, with a link to the span that sent it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from quiver.bundle import Signal
from quiver.otlp.messages import REQUEST_TYPES
from quiver.testing._vocabulary import Draws, Operation, Role, resource, role, scope

_ScopeT = TypeVar("_ScopeT")
_CALL_SHARE: Final = 0.65
_PUBLISH_SHARE: Final = 0.12
_ENTRY_SHARE: Final = 0.7  # of the traces that start at the first service
_FIELDS: Final = {
    Signal.TRACES: ("resource_spans", "scope_spans"),
    Signal.LOGS: ("resource_logs", "scope_logs"),
    Signal.METRICS: ("resource_metrics", "scope_metrics"),
}


class Step(NamedTuple):
    """A span, before it has attributes."""

    operation: Operation
    service: int
    resource: int
    trace_id: bytes
    span_id: bytes
    parent_id: bytes  # empty: the root
    start: int
    end: int
    failed: bool
    link: tuple[bytes, bytes] | None  # trace and span that sent the message


class Walk:
    """An endless row of traces. ``resource`` is ``instance * services + service``."""

    def __init__(
        self, seed: int, *, services: int, instances: int, error_share: float, start: int
    ) -> None:
        self.roles: Final[list[Role]] = [role(service) for service in range(services)]
        self._draws: Final = Draws(seed, "walk")
        self._instances: Final = instances
        self._error_share: Final = error_share
        self._clock = start

    def __iter__(self) -> Iterator[Step]:
        draws = self._draws
        while True:
            self._clock += 1 + draws.bits(22)
            first = draws.below(len(self.roles))
            service = 0 if draws.chance(_ENTRY_SHARE) else first
            which = draws.below(len(self.roles[service].serves))
            end = self._clock + 400_000 + (draws.bits(28) * draws.bits(8) >> 6)
            steps: list[Step] = []
            failed = draws.chance(self._error_share)
            self._visit(steps, service, which, b"", self._clock, end, failed)
            yield from steps
            for step in steps:
                if step.operation is self.roles[step.service].publishes:
                    yield self._consume(step)

    def _visit(  # noqa: PLR0917 - once for each span; names would cost
        self,
        steps: list[Step],
        service: int,
        which: int,
        parent: bytes,
        start: int,
        end: int,
        failed: bool,  # noqa: FBT001
    ) -> None:
        """A service serves one request, and has others serve it."""
        draws, own = self._draws, self.roles[service]
        place = draws.below(self._instances) * len(self.roles) + service
        trace = steps[0].trace_id if steps else draws.bits(128).to_bytes(16, "big")
        me = self._id()
        served = own.serves[which]
        steps.append(Step(served, service, place, trace, me, parent, start, end, failed, None))
        inner = [draws.pick(own.works), draws.pick(own.stores)]
        if draws.chance(_CALL_SHARE):
            inner.append(draws.pick(own.stores))
        if draws.chance(_PUBLISH_SHARE):
            inner.append(own.publishes)
        for operation in inner:
            begin, stop = self._part(start, end)
            bad = draws.chance(self._error_share)
            step = Step(operation, service, place, trace, self._id(), me, begin, stop, bad, None)
            steps.append(step)
            start = stop
        for callee in (2 * service + 1, 2 * service + 2):
            if callee < len(self.roles) and draws.chance(_CALL_SHARE):
                begin, stop = self._part(start, end)
                bad = draws.chance(self._error_share)
                way = draws.below(len(self.roles[callee].calls))
                call = self.roles[callee].calls[way]
                mine = self._id()
                steps.append(Step(call, service, place, trace, mine, me, begin, stop, bad, None))
                network = (stop - begin) >> 4
                self._visit(steps, callee, way, mine, begin + network, stop - network, bad)
                start = stop

    def _consume(self, sent: Step) -> Step:
        draws, services = self._draws, len(self.roles)
        service = (sent.service + 1) % services
        start = sent.end + 50_000 + draws.bits(24)
        return Step(
            operation=self.roles[sent.service].consumes,
            service=service,
            resource=draws.below(self._instances) * services + service,
            trace_id=draws.bits(128).to_bytes(16, "big"),
            span_id=self._id(),
            parent_id=b"",
            start=start,
            end=start + 100_000 + draws.bits(25),
            failed=draws.chance(self._error_share),
            link=(sent.trace_id, sent.span_id),
        )

    def _part(self, start: int, end: int) -> tuple[int, int]:
        """Some of the time that is left."""
        shares = self._draws.bits(12)
        begin = start + ((end - start) * (shares & 63) >> 9)
        return begin, begin + ((end - begin) * (16 + (shares >> 6)) >> 7)

    def _id(self) -> bytes:
        return (self._draws.bits(63) + 1).to_bytes(8, "big")


class _Filling(Generic[_ScopeT]):
    """A request that is not full yet."""

    __slots__ = ("count", "request", "resources", "scopes")

    def __init__(self, request: Message) -> None:
        self.request = request
        self.count = 0
        self.resources: dict[int, Message] = {}
        self.scopes: dict[tuple[int, int], _ScopeT] = {}


class Agents(Generic[_ScopeT]):
    """Who exports: an agent for some resources each. What it keeps is less than one request."""

    def __init__(
        self,
        seed: int,
        signal: Signal,
        *,
        services: int,
        instances: int,
        scopes: int,
        resources_per_request: int,
        items_per_request: int,
    ) -> None:
        draws = Draws(seed, "resources")
        self._resources: Final = [
            resource(service, instance, draws)
            for instance in range(instances)
            for service in range(services)
        ]
        self._scopes: Final = [
            [scope(service, number) for number in range(scopes)] for service in range(services)
        ]
        self._request: Final = REQUEST_TYPES[signal]
        self._fields: Final = _FIELDS[signal]
        self._resources_per_request: Final = resources_per_request
        self._items_per_request: Final = items_per_request
        self._filling: Final[dict[int, _Filling[_ScopeT]]] = {}

    def scope(self, resource: int, number: int) -> _ScopeT:
        """Where its agent puts what this scope of this resource has to say."""
        agent = resource // self._resources_per_request
        filling = self._filling.get(agent)
        if filling is None:
            filling = self._filling[agent] = _Filling(self._request())
        found = filling.scopes.get((resource, number))
        return found if found is not None else self._open(filling, resource, number)

    def _open(self, filling: _Filling[_ScopeT], resource: int, number: int) -> _ScopeT:
        of_resources, of_scopes = self._fields
        if resource not in filling.resources:
            made = getattr(filling.request, of_resources).add()
            made.MergeFromString(self._resources[resource])
            filling.resources[resource] = made
        opened: _ScopeT = getattr(filling.resources[resource], of_scopes).add()
        service = self._scopes[resource % len(self._scopes)]
        opened.MergeFromString(service[number])  # type: ignore[attr-defined]  # it is a Message
        filling.scopes[resource, number] = opened
        return opened

    def added(self, resource: int) -> Message | None:
        """Count an item, and take the request out if it is full with it."""
        agent = resource // self._resources_per_request
        filling = self._filling[agent]
        filling.count += 1
        if filling.count < self._items_per_request:
            return None
        return self._filling.pop(agent).request
