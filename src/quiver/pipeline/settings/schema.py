"""The JSON schema of a configuration file, made from the classes of ``options``.

Editors use it to complete and check a file while it is written. It knows names, types and choices;
``quiver validate`` also knows the graph, ranges, and what names in braces stand for.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, TypeAlias

from quiver.pipeline.settings import document
from quiver.pipeline.settings.binding import Annotation, annotations_of, take_apart
from quiver.pipeline.settings.options import ProcessOptions
from quiver.pipeline.settings.plugin_names import NAMESPACES, PLUGINS, Kind, Plugin
from quiver.pipeline.settings.units import duration_text, size_text
from quiver.pipeline.settings.vocabulary import CHOICES, NOT_NEEDED, OTHER_NAMES, WORDS_FOR_NONE

Schema: TypeAlias = dict[str, Any]

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_NAMES: Final = r"\{\{.*\}\}|\$\{env:.*\}"
"""Names that stand for values: allowed wherever a single value is."""
_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "string"}


def json_schema() -> Schema:
    """The schema of a whole file."""
    pipeline = {
        "nodes": {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/node"},
            "description": "The nodes by name.",
        },
        "connections": {"type": "array", "items": {"$ref": "#/$defs/connection"}},
        "policies": {"type": "object"},
        "settings": {"type": "object"},
    }
    group = {
        "pipelines": {"type": "object", "additionalProperties": _mapping(pipeline)},
        "policies": {"type": "object"},
    }
    return {
        "$schema": DIALECT,
        "title": "Quiver pipeline",
        **_mapping(
            {
                **pipeline,
                "process": {"$ref": f"#/$defs/{ProcessOptions.__name__}"},
                "version": {"const": document.VERSION},
                "engine": {"type": "object"},
                "groups": {"type": "object", "additionalProperties": _mapping(group)},
            }
        ),
        "$defs": {**_frame(), **_classes()},
    }


def field_texts(cls: type) -> Mapping[str, str]:
    """What is written below the options of a class, and below those of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _texts_of(inspect.getmodule(base), base.__name__)
    return texts


def default_text(annotation: Annotation, default: object) -> str | int | float | bool | None:
    """A default as a file would say it."""
    if isinstance(default, enum.Enum):
        return str(default.value)
    if annotation.unit == "bytes" and isinstance(default, int):
        return size_text(default)
    if annotation.unit == "seconds" and isinstance(default, float):
        return duration_text(default)
    if isinstance(default, Path):
        return str(default)
    return default if isinstance(default, str | int | float) else None


def classes_of(plugin: type) -> list[type]:
    """A class of options and those inside it, each once, outer ones first."""
    found = [plugin]
    for annotation in annotations_of(plugin).values():
        inner = annotation
        while inner.arguments:
            inner = take_apart([each for each in inner.arguments if each is not Ellipsis][-1])
        if isinstance(inner.type, type) and dataclasses.is_dataclass(inner.type):
            found += [each for each in classes_of(inner.type) if each not in found]
    return found


def plugins() -> list[Plugin]:
    """Every plugin once, by kind."""
    found: dict[tuple[Kind, str], Plugin] = {}
    for names in PLUGINS.values():
        for plugin in names.values():
            found.setdefault((plugin.kind, plugin.name), plugin)
    return list(found.values())


def names_of(plugin: Plugin) -> list[str]:
    """The names of a plugin in a file."""
    return [name for name, each in PLUGINS[plugin.kind].items() if each.name == plugin.name]


# --- the frame of a file ----------------------------------------------------------------------


def _frame() -> Schema:
    text = {"type": "string"}
    dispatch = {"enum": list(document.DISPATCHES)}
    one_or_more = {"anyOf": [text, {"type": "array", "items": text}]}
    port = _mapping({"destinations": one_or_more, "dispatch_strategy": dispatch})
    node = _mapping(
        {
            "kind": {"enum": [str(kind) for kind in Kind]},
            "plugin_urn": {**text, "description": "What the node is, as urn:otel:otlp:receiver."},
            "type": {**text, "description": "What the node is, as receiver:otlp."},
            "config": {"type": ["object", "null"], "description": "The options of the node."},
            "out_ports": {"type": "object", "additionalProperties": port},
            "outputs": {"type": "array", "items": text},
            "default_output": text,
        }
    )
    node["oneOf"] = [{"required": ["plugin_urn"]}, {"required": ["type"]}]
    node["allOf"] = [_rule(plugin, key) for plugin in plugins() for key in ("plugin_urn", "type")]
    node["allOf"] += [_otlp_rule(key) for key in ("plugin_urn", "type")]
    connection = _mapping(
        {
            "from": one_or_more,
            "to": one_or_more,
            "policies": {"type": "object", "properties": {"dispatch": dispatch}},
        },
        required=["from", "to"],
    )
    return {"node": node, "connection": connection}


def _rule(plugin: Plugin, key: str) -> Schema:
    names = [name for name in names_of(plugin) if not _is_otlp_receiver(plugin.kind, name)]
    config: Schema = {"$ref": f"#/$defs/{plugin.options.__name__}"}
    return _when(key, plugin.kind, names, config)


def _otlp_rule(key: str) -> Schema:
    """An OTLP receiver says which protocol it speaks, or names several."""
    refs = {
        name: {"$ref": f"#/$defs/{plugin.options.__name__}"}
        for name, plugin in document.PROTOCOLS.items()
    }
    with_protocols = _mapping({"protocols": _mapping(refs)}, required=["protocols"])
    # Which options there are depends on a key that may be left out: names are not checked here.
    plain = {"type": "object", "properties": {"protocol": {"enum": list(refs)}}}
    config = {
        "if": {"type": "object", "required": ["protocols"]},
        "then": with_protocols,
        "else": plain,
    }
    return _when(key, Kind.RECEIVER, ["otlp"], config)


def _is_otlp_receiver(kind: Kind, name: str) -> bool:
    return kind is Kind.RECEIVER and name == "otlp"


def _when(key: str, kind: Kind, names: Sequence[str], config: Schema) -> Schema:
    words = "|".join(map(re.escape, names))
    prefix = f"(urn:({'|'.join(NAMESPACES)}):)?"
    pattern = f"^{prefix}(({words}):{kind}|{kind}:({words}))$"
    return {
        "if": {"properties": {key: {"type": "string", "pattern": pattern}}, "required": [key]},
        "then": {"properties": {"config": {"anyOf": [config, {"type": "null"}]}}},
    }


# --- options ----------------------------------------------------------------------------------


def _classes() -> Schema:
    roots = [ProcessOptions, *(plugin.options for plugin in plugins())]
    found = {cls.__name__: cls for root in roots for cls in classes_of(root)}
    return {name: _class(cls) for name, cls in sorted(found.items())}


def _class(cls: type) -> Schema:
    texts = field_texts(cls)
    properties: Schema = {}
    required = []
    for field in dataclasses.fields(cls):
        annotation = annotations_of(cls)[field.name]
        properties[field.name] = _option(cls, field.name, annotation)
        if field.name in texts:
            properties[field.name]["description"] = texts[field.name]
        default = default_text(annotation, field.default)
        if default is not None:
            properties[field.name]["default"] = default
        elif field.default is MISSING and field.default_factory is MISSING:
            required.append(field.name)
    for name, path in OTHER_NAMES.get(cls, {}).items():
        properties[name] = {"description": f"Another name of `{path}`."}
    for name, reason in NOT_NEEDED.get(cls, {}).items():
        properties[name] = {"description": f"Changes nothing: {reason}.", "deprecated": True}
    if any(plugin.endpoint for plugin in _spellings(cls)):
        properties["endpoint"] = {"type": "string"}
    return {**_mapping(properties, required=required), "description": inspect.getdoc(cls) or ""}


def _spellings(cls: type) -> list[Plugin]:
    return [
        plugin for names in PLUGINS.values() for plugin in names.values() if plugin.options is cls
    ]


def _option(cls: type, name: str, annotation: Annotation) -> Schema:
    schema = _value(annotation)
    choices = CHOICES.get((cls, name))
    if choices:
        schema = _or_names({"enum": list(choices)})
    word = WORDS_FOR_NONE.get((cls, name))
    if word:
        schema = {"anyOf": [schema, {"const": word}]}
    if annotation.optional and schema:
        schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}
    return schema


def _value(annotation: Annotation) -> Schema:
    kind = annotation.type
    if annotation.choices:
        return {}
    if annotation.unit is not None:
        form = "a size, as 32MB" if annotation.unit == "bytes" else "a duration, as 25ms"
        return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "title": form}]}
    if annotation.arguments:
        inner = [_value(take_apart(each)) for each in annotation.arguments if each is not Ellipsis]
        if kind is tuple:
            return {"type": "array", "items": inner[-1]}
        return {"type": "object", "additionalProperties": inner[-1]}
    return _single(kind)


def _single(kind: Any) -> Schema:  # noqa: ANN401 - annotations have no type of their own
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if issubclass(kind, enum.Enum):
        return _or_names({"enum": [str(member.value) for member in kind]})
    simple = {"type": _SIMPLE[kind]}
    return simple if simple["type"] == "string" else _or_names(simple)


def _or_names(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "string", "pattern": _NAMES}]}


def _mapping(properties: Mapping[str, Any], required: Sequence[str] = ()) -> Schema:
    schema: Schema = {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    }
    if required:
        schema["required"] = list(required)
    return schema


@functools.cache
def _tree(source: str) -> ast.Module:
    return ast.parse(source)


def _texts_of(module: object, name: str) -> dict[str, str]:
    """The strings that follow the fields of a class in its source."""
    texts: dict[str, str] = {}
    for node in _tree(inspect.getsource(module)).body:  # type: ignore[arg-type] # a class has one
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    return texts
