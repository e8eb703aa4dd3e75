"""As much of JSON schema as the published one uses."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
KNOWN = {
    *("$schema", "title", "description", "default", "deprecated", "$defs", "$ref", "type", "enum"),
    *("const", "pattern", "minimum", "required", "properties", "additionalProperties", "items"),
    *("anyOf", "oneOf", "allOf", "if", "then", "else"),
}


def fits(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    assert schema.keys() <= KNOWN, schema.keys() - KNOWN
    if "$ref" in schema and not fits(value, root["$defs"][schema["$ref"].split("/")[-1]], root):
        return False
    return (
        _simple(value, schema)
        and _object(value, schema, root)
        and _combined(value, schema, root)
        and all(fits(each, schema.get("items", {}), root) for each in _list(value))
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _simple(value: object, schema: dict[str, Any]) -> bool:
    names = schema.get("type", [])
    allowed = [
        kind for name in ([names] if isinstance(names, str) else names) for kind in TYPES[name]
    ]
    if allowed and not isinstance(value, tuple(allowed)):
        return False
    if isinstance(value, bool) and allowed and bool not in allowed:
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        return False
    return value in schema.get("enum", [value]) and value == schema.get("const", value)


def _object(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if not isinstance(value, dict):
        return True
    if not set(schema.get("required", [])) <= value.keys():
        return False
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    for name, inner in value.items():
        rule = properties.get(name, others)
        if rule is False or not fits(inner, rule, root):
            return False
    return True


def _combined(value: object, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if "anyOf" in schema and not any(fits(value, each, root) for each in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(fits(value, each, root) for each in schema["oneOf"]) != 1:
        return False
    if not all(fits(value, each, root) for each in schema.get("allOf", [])):
        return False
    if "if" not in schema:
        return True
    branch = "then" if fits(value, schema["if"], root) else "else"
    return fits(value, schema.get(branch, {}), root)
