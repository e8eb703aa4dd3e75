"""A configuration file as a whole, in each of the forms that it may have.

::

    nodes:                                          nodes:
      receiver:                                       receiver:
        kind: receiver                                  type: receiver:otlp
        plugin_urn: "urn:otel:otlp:receiver"            config: {...}
        config: {...}                                 store:
        out_ports:                                      type: processor:durable_buffer
          out_port:                                 connections:
            destinations: [store]                     - from: receiver
            dispatch_strategy: round_robin              to: store

On the left the first form, on the right the newer one; a file may mix them. The newer one may also
stand below ``groups: {name: {pipelines: {name: ...}}}``. All pipelines of a file run in one
process, so the names of their nodes must differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from quiver.pipeline.node import Dispatch
from quiver.pipeline.settings.binding import bind
from quiver.pipeline.settings.graph_checks import Draft, DraftPort, Part
from quiver.pipeline.settings.mistakes import Mistakes, Place, quoted, suggestion
from quiver.pipeline.settings.options import ProcessOptions
from quiver.pipeline.settings.plugin_names import (
    OTLP_GRPC,
    OTLP_HTTP,
    Kind,
    Plugin,
    UnknownPlugin,
    find_plugin,
)
from quiver.pipeline.settings.yaml_text import Field, Fields, Items, Scalar, Value

VERSION: Final = "otel_dataflow/v1"
DISPATCHES: Final[Mapping[str, Dispatch]] = {
    **{str(each): each for each in Dispatch},
    "one_of": Dispatch.LEAST_LOADED,
}
PIPELINE_KEYS: Final = ("nodes", "connections", "policies", "settings")
GROUP_KEYS: Final = ("pipelines", "policies", "topics")
TOP_KEYS: Final = (*PIPELINE_KEYS, "process", "version", "engine", "groups")
NODE_KEYS: Final = (
    "kind",
    "plugin_urn",
    "type",
    "config",
    "out_ports",
    "outputs",
    "default_output",
)
PORT_KEYS: Final = ("destinations", "dispatch_strategy")
CONNECTION_KEYS: Final = ("from", "to", "policies")
PROTOCOLS: Final[Mapping[str, Plugin]] = {"grpc": OTLP_GRPC, "http": OTLP_HTTP}

_OLDER_KEYS: Final = {"pipeline_groups": "groups"}
_DEFAULT_PORT: Final = "default"
_LONGEST_NAME: Final = 128
_FROM_PORT: Final = re.compile(r"""(?P<node>.+?)\[["']?(?P<port>[^\]"']+)["']?\]""")


class Document:
    """What a file says: its nodes, drafts as yet, and the options of the process."""

    def __init__(self, root: Value, mistakes: Mistakes) -> None:
        self.drafts: dict[str, Draft] = {}
        self.process = ProcessOptions()
        self._mistakes = mistakes
        top = self._fields(root, "the file", TOP_KEYS, _OLDER_KEYS)
        self._read_version(top.get("version"))
        self._read_process(top)
        for pipeline in (top, *self._pipelines(top.get("groups"))):
            self._read_pipeline(pipeline)
        if not self.drafts and not mistakes.serious:
            mistakes.add(root.place, "there are no nodes", "a file needs at least 'nodes'")

    def _read_version(self, field: Field | None) -> None:
        text = self._text(field.value, "version") if field else None
        if field and text is not None and text != VERSION:
            self._mistakes.add(field.value.place, f"version {quoted(text)} is not known", VERSION)

    # --- the process --------------------------------------------------------------------------

    def _read_process(self, top: Mapping[str, Field]) -> None:
        field = top.get("process")
        if field is not None:
            process = bind(
                ProcessOptions,
                field.value,
                place=field.place,
                what="process",
                mistakes=self._mistakes,
            )
            self.process = process or self.process
            if self.process.cores is not None and self.process.cores < 1:
                self._mistakes.add(field.place, "cores must be at least 1, or auto")
        self._read_engine(top.get("engine"))
        self._read_policies(top.get("policies"))

    def _read_engine(self, field: Field | None) -> None:
        for name, inner in self._optional_fields(field, "engine").items():
            if name != "http_admin":
                self._not_used(inner.place, f"engine.{name}")
                continue
            known = ("bind_address",)
            address = self._fields(inner.value, "http_admin", known).get("bind_address")
            text = self._text(address.value, "bind_address") if address else None
            if text:
                admin = replace(self.process.admin, listening_addr=text)
                self.process = replace(self.process, admin=admin)

    def _read_policies(self, field: Field | None) -> None:
        for name, inner in self._optional_fields(field, "policies").items():
            if name != "resources":
                self._not_used(inner.place, f"policies.{name}")
                continue
            resources = self._fields(inner.value, "resources", ("core_allocation",))
            allocation = resources.get("core_allocation")
            if allocation is not None:
                self._read_cores(allocation.value)

    def _read_cores(self, value: Value) -> None:
        fields = self._fields(value, "core_allocation", ("type", "count"))
        kind = self._text(fields["type"].value, "type") if "type" in fields else None
        count = self._text(fields["count"].value, "count") if "count" in fields else None
        if kind == "all_cores":
            self.process = replace(self.process, cores=None)
        elif kind == "core_count" and count and re.fullmatch("[1-9][0-9]{0,3}", count):
            self.process = replace(self.process, cores=int(count))
        elif kind is not None:
            self._mistakes.add(
                value.place,
                f"core_allocation {quoted(kind)} cannot be used",
                "allowed: {type: all_cores}, {type: core_count, count: 2}",
            )

    def _not_used(self, place: Place, name: str) -> None:
        self._mistakes.warn(place, f"{quoted(name)} changes nothing: it is not used here")

    # --- pipelines ----------------------------------------------------------------------------

    def _pipelines(self, groups: Field | None) -> Iterator[Mapping[str, Field]]:
        for name, group in self._optional_fields(groups, "groups").items():
            parts = self._fields(group.value, f"group {name}", GROUP_KEYS)
            if "topics" in parts:
                self._mistakes.add(
                    parts["topics"].place, "topics are not supported", "connect the nodes directly"
                )
            self._read_policies(parts.get("policies"))
            for inner, pipeline in self._optional_fields(
                parts.get("pipelines"), "pipelines"
            ).items():
                fields = self._fields(pipeline.value, f"pipeline {inner}", PIPELINE_KEYS)
                self._read_policies(fields.get("policies"))
                yield fields

    def _read_pipeline(self, fields: Mapping[str, Field]) -> None:
        if "settings" in fields:
            for name, inner in self._optional_fields(fields["settings"], "settings").items():
                self._not_used(inner.place, f"settings.{name}")
        own: dict[str, Draft] = {}
        for name, field in self._optional_fields(fields.get("nodes"), "nodes").items():
            if name in self.drafts:
                self._mistakes.add(
                    field.place,
                    f"there is a node {quoted(name)} in another pipeline",
                    f"all of them run in one process; first in line {self.drafts[name].place.line}",
                )
            elif (
                not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME or name != name.strip()
            ):
                self._mistakes.add(
                    field.place, f"a node cannot be called {quoted(name)}", "at most 128 characters"
                )
            else:
                own[name] = self._read_node(name, field)
        self.drafts.update(own)
        connections = fields.get("connections")
        if connections is not None:
            for value in self._items(connections.value, "connections"):
                self._read_connection(value, own)

    # --- nodes --------------------------------------------------------------------------------

    def _read_node(self, name: str, field: Field) -> Draft:
        draft = Draft(name, field.place)
        if not isinstance(field.value, Fields):
            self._mistakes.add(field.value.place, f"node {quoted(name)} must be a mapping")
            return draft
        fields = self._fields(field.value, f"node {name}", NODE_KEYS)
        for port, inner in self._optional_fields(fields.get("out_ports"), "out_ports").items():
            draft.ports[port] = self._read_port(port, inner)
        found = self._find_plugin(name, field.place, fields)
        if found is not None:
            plugin, may_choose = found
            draft.parts = tuple(self._parts(draft, plugin, fields.get("config"), may_choose))
        return draft

    def _find_plugin(
        self, name: str, place: Place, fields: Mapping[str, Field]
    ) -> tuple[Plugin, bool] | None:
        kind = self._read_kind(fields.get("kind"))
        named = [fields[key] for key in ("type", "plugin_urn") if key in fields]
        if len(named) != 1:
            problem = "either type or plugin_urn, not both" if named else "a type, or a plugin_urn"
            self._mistakes.add(place, f"node {quoted(name)} needs {problem}", "as receiver:otlp")
            return None
        text = self._text(named[0].value, "the type of a node")
        if text is None:
            return None
        try:
            return find_plugin(text, kind)
        except UnknownPlugin as error:
            self._mistakes.add(named[0].value.place, str(error), error.hint)
            return None

    def _read_kind(self, field: Field | None) -> Kind | None:
        text = self._text(field.value, "kind") if field else None
        if field is None or text is None:
            return None
        if text not in set(Kind):
            self._mistakes.add(
                field.value.place, f"there is no kind {quoted(text)}", suggestion(text, Kind)
            )
            return None
        return Kind(text)

    def _parts(
        self,
        draft: Draft,
        plugin: Plugin,
        config: Field | None,
        may_choose: bool,  # noqa: FBT001
    ) -> Iterator[Part]:
        """The node that a draft is; an OTLP receiver may be two."""
        field = config or Field(draft.place, Fields(draft.place, {}))
        given = field.value.fields if isinstance(field.value, Fields) else {}
        if may_choose and "protocols" in given:
            self._only(given, f"node {draft.name} with protocols", ("protocols",))
            protocols = self._fields(given["protocols"].value, "protocols", PROTOCOLS)
            for name, inner in protocols.items():
                if name in PROTOCOLS:
                    suffix = f"/{name}" if len(protocols) > 1 else ""
                    yield self._part(draft, PROTOCOLS[name], inner, suffix)
            if not protocols:
                self._mistakes.add(
                    given["protocols"].place, "protocols is empty", suggestion("", PROTOCOLS)
                )
            return
        if may_choose and "protocol" in given:
            choice = given["protocol"].value
            text = self._text(choice, "protocol")
            if text is not None and text not in PROTOCOLS:
                self._mistakes.add(
                    choice.place, f"protocol cannot be {quoted(text)}", suggestion(text, PROTOCOLS)
                )
            plugin = PROTOCOLS.get(text or "", plugin)
            rest = {name: inner for name, inner in given.items() if name != "protocol"}
            field = Field(field.place, Fields(field.value.place, rest))
        yield self._part(draft, plugin, field, "")

    def _part(self, draft: Draft, plugin: Plugin, field: Field, suffix: str) -> Part:
        bound = bind(
            plugin.options,
            field.value,
            place=field.place,
            what=f"{draft.name}{suffix}",
            mistakes=self._mistakes,
            other_names={"endpoint": plugin.endpoint} if plugin.endpoint else {},
        )
        place = field.place
        for name in ("listening_addr", "path"):
            if isinstance(field.value, Fields) and name in field.value.fields:
                place = field.value.fields[name].value.place
        return Part(suffix, plugin, bound, place, field.value)

    # --- edges --------------------------------------------------------------------------------

    def _read_port(self, name: str, field: Field) -> DraftPort:
        fields = self._fields(field.value, f"port {name}", PORT_KEYS)
        port = DraftPort(field.place)
        if "dispatch_strategy" in fields:
            value = fields["dispatch_strategy"].value
            port.dispatch = self._dispatch(value, "dispatch_strategy")
        if "destinations" in fields:
            self._add_destinations(port, fields["destinations"].value, "destinations")
        return port

    def _add_destinations(self, port: DraftPort, value: Value, what: str) -> None:
        for each in self._items(value, what, one_is_enough=True):
            name = self._text(each, "a destination")
            if name is not None and name in port.destinations:
                self._mistakes.add(each.place, f"{quoted(name)} is a destination already")
            elif name is not None:
                port.destinations[name] = each.place

    def _read_connection(self, value: Value, own: Mapping[str, Draft]) -> None:
        fields = self._fields(value, "a connection", CONNECTION_KEYS)
        missing = [key for key in ("from", "to") if key not in fields]
        if not isinstance(value, Fields):
            return
        if missing:
            self._mistakes.add(value.place, f"a connection needs {' and '.join(missing)}")
            return
        dispatch = None
        for name, inner in self._optional_fields(fields.get("policies"), "policies").items():
            if name == "dispatch":
                dispatch = self._dispatch(inner.value, "dispatch")
            else:
                self._not_used(inner.place, f"policies.{name}")
        for source in self._items(fields["from"].value, "from", one_is_enough=True):
            text = self._text(source, "from")
            match = _FROM_PORT.fullmatch(text or "")
            node, name = (match["node"], match["port"]) if match else (text, _DEFAULT_PORT)
            if node is None:
                continue
            if node not in own:
                self._mistakes.add(
                    source.place, f"there is no node {quoted(node)}", suggestion(node, own)
                )
                continue
            port = own[node].ports.setdefault(name, DraftPort(source.place))
            if dispatch and port.dispatch and dispatch is not port.dispatch:
                self._mistakes.add(
                    source.place, f"{quoted(node)} dispatches by {port.dispatch} already"
                )
            port.dispatch = port.dispatch or dispatch
            self._add_destinations(port, fields["to"].value, "to")

    def _dispatch(self, value: Value, what: str) -> Dispatch | None:
        text = self._text(value, what)
        if text is not None and text not in DISPATCHES:
            self._mistakes.add(
                value.place, f"{what} cannot be {quoted(text)}", suggestion(text, DISPATCHES)
            )
        return DISPATCHES.get(text or "")

    # --- values -------------------------------------------------------------------------------

    def _fields(
        self,
        value: Value,
        what: str,
        known: tuple[str, ...] | Mapping[str, object],
        older: Mapping[str, str] | None = None,
    ) -> Mapping[str, Field]:
        """The fields of a mapping, of which only these are known."""
        fields = dict(self._optional_fields(Field(value.place, value), what))
        for other, name in (older or {}).items():
            if other in fields and name not in fields:
                fields[name] = fields.pop(other)
        self._only(fields, what, known)
        return fields

    def _only(
        self, fields: Mapping[str, Field], what: str, known: tuple[str, ...] | Mapping[str, object]
    ) -> None:
        for name, field in fields.items():
            if name not in known:
                self._mistakes.add(
                    field.place, f"{what} has no key {quoted(name)}", suggestion(name, known)
                )

    def _optional_fields(self, field: Field | None, what: str) -> Mapping[str, Field]:
        """The fields of a mapping; none when it is left out or empty."""
        if field is None or (isinstance(field.value, Scalar) and field.value.is_null):
            return {}
        if isinstance(field.value, Fields):
            return field.value.fields
        self._mistakes.add(field.value.place, f"{what} must be a mapping")
        return {}

    def _items(self, value: Value, what: str, *, one_is_enough: bool = False) -> tuple[Value, ...]:
        if isinstance(value, Items):
            return value.values
        if one_is_enough and isinstance(value, Scalar) and not value.is_null:
            return (value,)
        if not (isinstance(value, Scalar) and value.is_null):
            self._mistakes.add(value.place, f"{what} must be a list")
        return ()

    def _text(self, value: Value, what: str) -> str | None:
        if not isinstance(value, Scalar) or value.is_null:
            self._mistakes.add(value.place, f"{what} must be a text")
            return None
        return value.text if value.known else None
