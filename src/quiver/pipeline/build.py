"""From settings to nodes: each made by its plugin, joined by ports, destinations first.

What a plugin is made of is named in a table and loaded when a configuration asks for it. All of a
kind are made alike:

=========  =====================================================================================
receiver   ``(name, options, port, *, metrics, pressure, now_ns)``
processor  ``(name, options, port, *, metrics)``
exporter   ``(name, options, *, metrics)``
=========  =====================================================================================

Two are special: a persistence node keeps its destinations itself, one subscriber for each, and a
lake is no node of ours but a subscriber in another process.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, cast

from quiver.disk import Disk, RealDisk
from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.pipeline.node import Node, Port, Taker
from quiver.pipeline.persistence import ExternalTaker, Persistence
from quiver.pipeline.settings.load import NodeSpec, PortSpec, Settings
from quiver.pipeline.settings.options import LakeOptions, OtlpExporterOptions, PersistenceOptions
from quiver.pipeline.settings.plugin_names import Kind

_PACKAGES: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.RECEIVER: "quiver.pipeline.receivers",
        Kind.PROCESSOR: "quiver.pipeline.processors",
        Kind.EXPORTER: "quiver.pipeline.exporters",
    }
)
CLASSES: Final[Mapping[tuple[Kind, str], str]] = MappingProxyType(
    {
        (Kind.RECEIVER, "otlp_grpc"): "otlp_grpc:OtlpGrpcReceiver",
        (Kind.RECEIVER, "otlp_http"): "otlp_http:OtlpHttpReceiver",
        (Kind.RECEIVER, "otap"): "otap:OtapReceiver",
        (Kind.PROCESSOR, "batch"): "batch:BatchProcessor",
        (Kind.PROCESSOR, "filter"): "filter:FilterProcessor",
        (Kind.PROCESSOR, "attributes"): "attributes:AttributesProcessor",
        (Kind.EXPORTER, "otlp_grpc"): "otlp_grpc:OtlpGrpcExporter",
        (Kind.EXPORTER, "otlp_http"): "otlp_http:OtlpHttpExporter",
        (Kind.EXPORTER, "otap"): "otap:OtapExporter",
        (Kind.EXPORTER, "parquet"): "parquet:ParquetExporter",
        (Kind.EXPORTER, "buffer"): "buffer:BufferExporter",
        (Kind.EXPORTER, "debug"): "debug:DebugExporter",
    }
)
"""Module and class of a plugin, in the package of its kind."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What nodes are given beside their options."""

    metrics: Metrics
    core: int = 0
    pressure: Callable[[], bool] = lambda: False
    now_ns: Callable[[], int] = time.time_ns
    disk: Disk = field(default_factory=RealDisk)


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they start: destinations before those who send to them."""

    nodes: list[Node] = field(default_factory=list)
    receivers: list[Node] = field(default_factory=list)
    stores: list[Persistence] = field(default_factory=list)
    spare_stores: dict[str, SpareStore] = field(default_factory=dict)
    """By the name of the persistence node."""

    @property
    def takers(self) -> list[Node]:
        """All but the receivers."""
        return [node for node in self.nodes if node not in self.receivers]


@dataclass(frozen=True, slots=True)
class SpareStore:
    """How to open the store of another core for the same destinations."""

    options: PersistenceOptions
    make: Callable[[int], Persistence]
    """By the number of the core."""


def build(settings: Settings, around: Surroundings) -> Graph:
    """All nodes; ``InvalidConfig`` when one cannot be made. Nothing is started."""
    builder = _Builder(settings, around)
    for name in _destinations_first(settings.nodes):
        builder.add(settings.nodes[name])
    return builder.graph


def _destinations_first(nodes: Mapping[str, NodeSpec]) -> list[str]:
    order: dict[str, None] = {}
    path: list[str] = []

    def visit(name: str, sender: str) -> None:
        if name in order:
            return
        if name not in nodes:
            raise InvalidConfig(f"{sender} leads to {name}, which is not there")
        if name in path:
            raise InvalidConfig(f"items would go round for ever: {' -> '.join([*path, name])}")
        path.append(name)
        for destination in nodes[name].destinations:
            visit(destination, name)
        path.pop()
        order[name] = None

    for name in nodes:
        visit(name, "")
    return list(order)


class _Builder:
    def __init__(self, settings: Settings, around: Surroundings) -> None:
        self._settings = settings
        self._around = around
        self._made: dict[str, Taker | ExternalTaker] = {}
        self.graph = Graph()

    def add(self, spec: NodeSpec) -> None:
        graph = self.graph
        if spec.kind is Kind.RECEIVER:
            receiver = self._receiver(spec)
            graph.nodes.append(receiver)
            graph.receivers.append(receiver)
            return
        if isinstance(spec.options, LakeOptions):
            self._made[spec.name] = ExternalTaker(spec.name, spec.options.subscriber)
            return
        if isinstance(spec.options, PersistenceOptions):
            taker: Taker = self._store(spec, spec.options)
        elif spec.kind is Kind.PROCESSOR:
            taker = self._make(spec, self._port(spec))
        else:
            taker = self._make(spec)
        self._made[spec.name] = taker
        graph.nodes.append(taker)

    def _receiver(self, spec: NodeSpec) -> Node:
        pressure, now_ns = self._around.pressure, self._around.now_ns
        return cast("Node", self._make(spec, self._port(spec), pressure=pressure, now_ns=now_ns))

    def _make(self, spec: NodeSpec, *parts: object, **more: object) -> Any:  # noqa: ANN401 - by its name
        made = find_class(spec)
        try:
            return made(spec.name, spec.options, *parts, metrics=self._around.metrics, **more)
        except InvalidConfig as error:
            raise _located(spec, error) from error

    def _port(self, spec: NodeSpec) -> Port:
        ports = list(spec.ports.values()) or [PortSpec(())]
        if len(ports) > 1:
            raise InvalidConfig(f"{spec.where}: {spec.name} has one way out, not {len(ports)}")
        return Port([self._taker(spec, name) for name in ports[0].destinations], ports[0].dispatch)

    def _taker(self, spec: NodeSpec, name: str) -> Taker:
        taker = self._made.get(name)
        if taker is None or isinstance(taker, ExternalTaker):
            raise InvalidConfig(f"{spec.where}: {spec.name} leads to {name}, which takes nothing")
        return taker

    def _store(self, spec: NodeSpec, options: PersistenceOptions) -> Persistence:
        destinations: Sequence[Taker | ExternalTaker] = [
            self._made[name] for name in spec.destinations
        ]

        def make(core: int) -> Persistence:
            return Persistence(
                spec.name,
                options,
                destinations,
                core=core,
                metrics=self._around.metrics,
                disk=self._around.disk,
            )

        store = make(self._around.core)
        self.graph.stores.append(store)
        self.graph.spare_stores[spec.name] = SpareStore(options, make)
        return store


def find_class(spec: NodeSpec) -> Callable[..., Any]:
    """What a node is an instance of."""
    plugin = spec.plugin
    if isinstance(spec.options, OtlpExporterOptions):
        plugin = "otlp_grpc" if spec.options.grpc_endpoint else "otlp_http"
    where = CLASSES.get((spec.kind, plugin))
    if where is None:
        raise InvalidConfig(f"{spec.where}: there is no {spec.kind} {plugin}")
    module, _, name = where.partition(":")
    path = f"{_PACKAGES[spec.kind]}.{module}"
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(path), name))
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        raise InvalidConfig(
            f"{spec.where}: {spec.name}: the {plugin} {spec.kind} is not part of this version of "
            "Quiver"
        ) from error


def _located(spec: NodeSpec, error: InvalidConfig) -> InvalidConfig:
    text = str(error)
    named = text if text.startswith(spec.name) else f"{spec.name}: {text}"
    return InvalidConfig(f"{spec.where}: {named}")
