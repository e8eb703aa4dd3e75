"""Nested attribute values: bytes of OTLP's ``ArrayValue`` and ``KeyValueList``, and CBOR.

OTAP holds a list or map as one CBOR item (RFC 8949).

=======================  ===============================================
OTLP value               CBOR
=======================  ===============================================
nothing set              null
string, bool             text, true or false
int, double              integer, float
bytes                    byte string
array, key-value list    array, map with text keys
=======================  ===============================================

What comes in is checked: no tags, so nothing that refers to something else or stands for more than
its bytes; integers of 64 bits; text keys; nothing after the item. A key that a map has twice keeps
its last value, in both directions.

Each distinct value is converted once for a column: most telemetry repeats its lists.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, Final, Never

import cbor2
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValueList

_PLAIN: Final = frozenset(
    {"string_value", "int_value", "double_value", "bool_value", "bytes_value"}
)
_INT64: Final = range(-(2**63), 2**63)


class BadValue(ValueError):
    """A nested value that cannot be converted. The caller knows where it stands."""


def array_to_cbor(message: bytes, max_depth: int) -> bytes:
    """The CBOR array for the bytes of an ``ArrayValue``."""
    try:
        return cbor2.dumps(_list(ArrayValue.FromString(message), max_depth))
    except DecodeError:
        raise BadValue(f"not a list of at most {max_depth} levels in protobuf") from None


def kvlist_to_cbor(message: bytes, max_depth: int) -> bytes:
    """The CBOR map for the bytes of a ``KeyValueList``."""
    try:
        return cbor2.dumps(_map(KeyValueList.FromString(message), max_depth))
    except DecodeError:
        raise BadValue(f"not a map of at most {max_depth} levels in protobuf") from None


def cbor_to_array(item: bytes, max_depth: int) -> bytes:
    """The bytes of an ``ArrayValue`` for a CBOR array."""
    values = _decoded(item, max_depth)
    if type(values) is not list:
        raise BadValue("CBOR that is no array, though the type of the value is 6 (slice)")
    message = ArrayValue()
    _fill_list(message, values)
    return message.SerializeToString()


def cbor_to_kvlist(item: bytes, max_depth: int) -> bytes:
    """The bytes of a ``KeyValueList`` for a CBOR map."""
    values = _decoded(item, max_depth)
    if type(values) is not dict:
        raise BadValue("CBOR that is no map, though the type of the value is 5 (map)")
    message = KeyValueList()
    _fill_map(message, values)
    return message.SerializeToString()


def _list(message: ArrayValue, depth: int) -> list[object]:
    _check_depth(depth)
    return [_value(value, depth) for value in message.values]


def _map(message: KeyValueList, depth: int) -> dict[str, object]:
    _check_depth(depth)
    return {pair.key: _value(pair.value, depth) for pair in message.values}


def _check_depth(depth: int) -> None:
    if depth <= 0:
        raise BadValue("lists and maps inside each other, deeper than the limit; flatten them")


def _value(value: AnyValue, depth: int) -> object:
    kind = value.WhichOneof("value")
    if kind in _PLAIN:
        return getattr(value, kind)
    if kind == "array_value":
        return _list(value.array_value, depth - 1)
    if kind == "kvlist_value":
        return _map(value.kvlist_value, depth - 1)
    return None


class _NoTags(dict[int, Callable[..., Never]]):
    """Stands for the decoder of every tag."""

    def __missing__(self, tag: int) -> Callable[..., Never]:
        return _refuse_tag


def _refuse_tag(*_: object) -> Never:
    raise BadValue("a CBOR tag; only plain items are allowed")


_NO_TAGS: Final = _NoTags()


def _decoded(item: bytes, max_depth: int) -> object:
    _check_depth(max_depth)
    source = BytesIO(item)
    try:
        value = cbor2.CBORDecoder(
            source,
            semantic_decoders=_NO_TAGS,
            max_depth=max_depth,
            strict_hashable_types=True,
        ).decode()
    except cbor2.CBORError as error:
        cause = error.__cause__ if isinstance(error.__cause__, BadValue) else error
        raise BadValue(f"not CBOR: {cause}") from None
    if source.tell() != len(item):
        raise BadValue("bytes after the CBOR item; write one item for each value")
    return value


def _fill_list(message: ArrayValue, values: list[object]) -> None:
    add = message.values.add
    for value in values:
        _fill(add(), value)


def _fill_map(message: KeyValueList, values: dict[object, object]) -> None:
    add = message.values.add
    for key, value in values.items():
        if type(key) is not str:
            raise BadValue("a CBOR map whose key is not text")
        pair = add(key=key)
        _fill(pair.value, value)


def _fill(target: AnyValue, value: Any) -> None:  # noqa: ANN401 - whatever CBOR can hold
    # Exact types: what a tag would become must not pass as one of these.
    kind = type(value)
    if value is None:
        target.SetInParent()
    elif kind is str:
        target.string_value = value
    elif kind is bool:
        target.bool_value = value
    elif kind is int and value in _INT64:
        target.int_value = value
    elif kind is float:
        target.double_value = value
    elif kind is bytes:
        target.bytes_value = value
    elif kind is list:
        target.array_value.SetInParent()
        _fill_list(target.array_value, value)
    elif kind is dict:
        target.kvlist_value.SetInParent()
        _fill_map(target.kvlist_value, value)
    else:
        raise BadValue(f"a CBOR item that OTLP has no value for ({kind.__name__})")
