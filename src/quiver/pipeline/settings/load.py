"""The configuration of a process: its nodes, what leads where, and how it runs.

``load_settings`` reads the text of a file (``document`` says in which forms), binds every node to
its options and checks the graph. All mistakes of a file are told at once. ``default_settings`` is
what a process does when it has no file: it listens where OTLP clients send, and stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiver.errors import InvalidConfig
from quiver.pipeline.node import Dispatch
from quiver.pipeline.settings.document import Document
from quiver.pipeline.settings.graph_checks import Draft, Part, check_graph
from quiver.pipeline.settings.mistakes import Mistake, Mistakes, Place
from quiver.pipeline.settings.options import (
    OtlpGrpcOptions,
    OtlpHttpOptions,
    PersistenceOptions,
    ProcessOptions,
)
from quiver.pipeline.settings.plugin_names import OTLP_GRPC, OTLP_HTTP, PERSISTENCE, Kind, Plugin
from quiver.pipeline.settings.substitution import Substitution
from quiver.pipeline.settings.yaml_text import MAX_CHARACTERS, parse_yaml

DEFAULTS: Final = "(defaults)"


class InvalidSettings(InvalidConfig):
    """A configuration file with mistakes: all of them, and the warnings."""

    def __init__(self, mistakes: Iterable[Mistake], warnings: Iterable[Mistake] = ()) -> None:
        self.mistakes = tuple(mistakes)
        self.warnings = tuple(warnings)
        super().__init__("\n".join(map(str, self.mistakes)))


@dataclass(frozen=True)
class PortSpec:
    """A way out of a node."""

    destinations: tuple[str, ...]
    dispatch: Dispatch = Dispatch.ROUND_ROBIN


@dataclass(frozen=True)
class NodeSpec:
    """One node: what it is, what it was told, who follows it, and where the file says so."""

    name: str
    kind: Kind
    plugin: str
    options: object
    ports: Mapping[str, PortSpec]
    where: Place

    @property
    def destinations(self) -> tuple[str, ...]:
        """Of all ports, in order."""
        return tuple(name for port in self.ports.values() for name in port.destinations)


@dataclass(frozen=True)
class Settings:
    """Everything that a process needs to know."""

    nodes: Mapping[str, NodeSpec]
    process: ProcessOptions
    source: str
    warnings: tuple[Mistake, ...] = ()


def load_settings(
    text: str, *, source: str, environment: Mapping[str, str], variables: Mapping[str, str]
) -> Settings:
    """The settings that a text holds; ``InvalidSettings`` with all its mistakes."""
    mistakes = Mistakes()
    substitution = Substitution(environment, variables, mistakes)
    root = parse_yaml(text, source=source, fill=substitution, mistakes=mistakes)
    if root is None:
        raise InvalidSettings(mistakes.serious)
    substitution.warn_of_unused(source)
    document = Document(root, mistakes)
    if document.drafts:
        check_graph(document.drafts, document.process.admin, mistakes)
    nodes = _specs(document.drafts, mistakes)
    if mistakes.serious:
        raise InvalidSettings(mistakes.serious, mistakes.warnings)
    return Settings(nodes, document.process, source, mistakes.warnings)


def read_settings(
    path: Path, *, environment: Mapping[str, str], variables: Mapping[str, str]
) -> Settings:
    """The settings that a file holds; ``OSError`` when it cannot be read."""
    with path.open("rb") as file:
        data = file.read(4 * MAX_CHARACTERS + 1)
    source = str(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        mistake = Mistake(Place(source, line), "the file is not UTF-8", "save it as UTF-8")
        raise InvalidSettings([mistake]) from error
    return load_settings(text, source=source, environment=environment, variables=variables)


def default_settings() -> Settings:
    """OTLP over gRPC on port 4317 and over HTTP on 4318 of this machine, stored; no exporter."""
    store = {"out_port": PortSpec(("persistence",))}
    place = Place(DEFAULTS)
    nodes = [
        _spec("otlp_grpc", OTLP_GRPC, OtlpGrpcOptions(), store, place),
        _spec("otlp_http", OTLP_HTTP, OtlpHttpOptions(), store, place),
        _spec("persistence", PERSISTENCE, PersistenceOptions(), {}, place),
    ]
    return Settings({node.name: node for node in nodes}, ProcessOptions(), DEFAULTS)


def _specs(drafts: Mapping[str, Draft], mistakes: Mistakes) -> dict[str, NodeSpec]:
    nodes: dict[str, NodeSpec] = {}
    for draft in drafts.values():
        ports = {
            name: PortSpec(tuple(port.destinations), port.dispatch or Dispatch.ROUND_ROBIN)
            for name, port in draft.ports.items()
        }
        for part in draft.parts:
            name = f"{draft.name}{part.suffix}"
            if part.suffix and name in drafts:
                mistakes.add(draft.place, f"{name!r} is the name of a node already")
            nodes[name] = _spec(name, part.plugin, part.options, ports, _where(draft, part))
    return nodes


def _where(draft: Draft, part: Part) -> Place:
    return part.place if part.suffix else draft.place


def _spec(
    name: str, plugin: Plugin, options: object, ports: Mapping[str, PortSpec], where: Place
) -> NodeSpec:
    return NodeSpec(name, plugin.kind, plugin.name, options, ports, where)
