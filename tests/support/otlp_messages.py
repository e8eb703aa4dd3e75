"""OTLP requests for tests, drawn from the descriptors of the messages.

``messages(signal)`` draws upb messages, ``requests(signal)`` their bytes. Two knobs:

=============  ===================================================================================
``canonical``  true: the bytes that upb itself writes. False: other bytes for the same message.
               Fields in any order, among them unknown ones, lengths with more bytes than they
               need, defaults that are written, lists of numbers in pieces.
``edgy``       strings, numbers and enums from the edges of what is allowed, and far from English
=============  ===================================================================================

Ids have the right length or are absent, times fit 63 bits, NaN is always the same one. Two things
are never drawn because ptars does not keep them: indices into the string table of a profile
(``*_strindex``), and a negative zero in a field that cannot tell zero from absent.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from quiver.bundle import Signal
from quiver.otlp.messages import REQUEST_TYPES

ID_SIZES: Final = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
MAX_DEPTH: Final = 3
"""Lists and maps inside each other."""
_BUDGET: Final = 40
_VALUES_BUDGET: Final = 10
"""Messages of one request without attributes, and those for the attributes of one of them: so a
draw stays quick."""
_VALUES: Final = "opentelemetry.proto.common.v1"
_DEEPER: Final = frozenset({"ArrayValue", "KeyValueList"})
_UNKNOWN_FIELD: Final = 1000

_WORDS = ("", "a", "name", "http.method", "GET", "traceId", "span_id", "x" * 40)
_EDGY_WORDS = (
    *_WORDS,
    *(
        "\0",
        '"\\/\b\f\n\r\t',
        "\x7f\x80",
        "\u2028\ufeff",
        "\ud7ff\ue000\uffff",
        "\U0001f600\U0010ffff",
    ),
    *("null", "NaN", "é", "e\u0301", "\u202eabc"),
)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_DOUBLES = (0.0, 1.0, -1.5, 0.1, 1e300)
_EDGY_DOUBLES = (
    *(*_DOUBLES, -0.0, float("nan"), float("inf"), -float("inf"), 5e-324, 1.7976931348623157e308),
    *(2.0**53 + 2, 1e16, 1e21, 0.1 + 0.2),
)

_Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]


def requests(
    signal: Signal, *, canonical: bool = True, edgy: bool = False
) -> st.SearchStrategy[bytes]:
    """Serialised requests."""
    drawn = messages(signal, edgy=edgy)
    if canonical:
        return drawn.map(serialised)
    return st.builds(_other_bytes, drawn, st.integers(0, 2**32 - 1))


def serialised(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


@st.composite
def messages(draw: st.DrawFn, signal: Signal, *, edgy: bool = False) -> Message:
    """Requests, not serialised yet."""
    request = REQUEST_TYPES[signal]()
    _Filler(draw, edgy=edgy).fill(request, MAX_DEPTH)
    return request


@dataclass(frozen=True, slots=True)
class _Plan:
    """The fields of a message, by how it is drawn whether they are there."""

    spine: list[FieldDescriptor]
    """Always; how many says how often nothing."""
    optional: list[FieldDescriptor]
    choices: list[st.SearchStrategy[FieldDescriptor | None]]
    """One of several, for each oneof."""
    is_value: bool


@cache
def _plan(described: Descriptor) -> _Plan:
    plan = _Plan([], [], [], described.file.package == _VALUES)
    for declared in described.fields:
        oneof = declared.containing_oneof
        if declared.name.endswith("_strindex") or (oneof and len(oneof.fields) > 1):
            continue
        nested = declared.message_type
        on_spine = nested and declared.is_repeated and nested.file.package != _VALUES
        (plan.spine if on_spine else plan.optional).append(declared)
    for oneof in described.oneofs:
        members = [one for one in oneof.fields if not one.name.endswith("_strindex")]
        if len(members) > 1:
            plan.choices.append(st.sampled_from([None, *members]))
    return plan


class _Filler:
    """Draws what is in a message."""

    def __init__(self, draw: _Draw, *, edgy: bool) -> None:
        self._draw = draw
        self._edgy = edgy
        self._left = _BUDGET
        self._values_left = _VALUES_BUDGET

    def fill(self, message: Message, depth: int) -> None:
        """Set some fields; ``depth`` more lists and maps may be put into values."""
        plan = _plan(cast("Descriptor", message.DESCRIPTOR))
        if plan.is_value:
            self._values_left -= 1
        else:
            self._left -= 1
            self._values_left = _VALUES_BUDGET
        # One draw for all of them.
        present = self._draw(_bits(len(plan.optional)))
        chosen = [one for at, one in enumerate(plan.optional) if present >> at & 1]
        chosen += filter(None, map(self._draw, plan.choices))
        for declared in (*chosen, *plan.spine):
            nested = declared.message_type
            deepens = nested is not None and nested.name in _DEEPER
            if not (deepens and depth == 0):
                self._set(message, declared, depth - deepens)

    def _set(self, message: Message, declared: FieldDescriptor, depth: int) -> None:
        nested = declared.message_type
        if nested is None:
            drawn = _scalars(declared, self._edgy)
            if declared.is_repeated:
                getattr(message, declared.name).extend(self._draw(_lists(drawn)))
            else:
                setattr(message, declared.name, self._draw(drawn))
        elif declared.is_repeated:
            for _ in range(self._draw(_COUNTS)):
                if self._room(nested):
                    self.fill(getattr(message, declared.name).add(), depth)
        else:
            child = getattr(message, declared.name)
            child.SetInParent()
            if self._room(nested):
                self.fill(child, depth)

    def _room(self, described: Descriptor) -> bool:
        return (self._values_left if described.file.package == _VALUES else self._left) > 0


_COUNTS = st.sampled_from((0, 1, 1, 1, 2, 2, 3))


@cache
def _bits(count: int) -> st.SearchStrategy[int]:
    """Often all of them: a request in which most things are missing tests little."""
    every = (1 << count) - 1
    return st.one_of(st.integers(0, every), st.just(every))


@cache
def _lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(items, max_size=4)


@cache
def _scalars(declared: FieldDescriptor, edgy: bool) -> st.SearchStrategy[Any]:
    kind = declared.cpp_type
    if declared.type == FieldDescriptor.TYPE_BYTES:
        size = ID_SIZES.get(declared.name)
        return st.binary(max_size=9) if size is None else _ids(size)
    if declared.enum_type is not None:
        numbers = st.sampled_from([value.number for value in declared.enum_type.values])
        return numbers | st.integers(*_RANGES[FieldDescriptor.CPPTYPE_INT32]) if edgy else numbers
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return _doubles(declared) if edgy else st.sampled_from(_DOUBLES)
    if kind in _RANGES:
        return _integers(declared, edgy)
    return st.sampled_from(_EDGY_WORDS) | st.text(max_size=6) if edgy else st.sampled_from(_WORDS)


def _doubles(declared: FieldDescriptor) -> st.SearchStrategy[float]:
    doubles = st.sampled_from(_EDGY_DOUBLES) | st.floats(allow_nan=False)
    keeps_sign = declared.has_presence or declared.is_repeated
    return doubles if keeps_sign else doubles.map(lambda number: number + 0.0)


def _integers(declared: FieldDescriptor, edgy: bool) -> st.SearchStrategy[int]:
    low, high = _RANGES[declared.cpp_type]
    if declared.name.endswith("time_unix_nano"):
        high = 2**63 - 1
    if not edgy:
        return st.integers(0, min(high, 2_000_000_000_000_000_000))
    return st.sampled_from((low, high, 0, 1, 2**31 - 1)) | st.integers(low, high)


def _ids(size: int) -> st.SearchStrategy[bytes]:
    return st.integers(0, 2 ** (8 * size) - 1).map(lambda n: n.to_bytes(size, "big"))


# --- Other bytes for the same message ---------------------------------------------------------

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5
_ZIGZAG = frozenset({FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64})
_FIXED: Final = {
    FieldDescriptor.TYPE_FIXED64: (_FIXED_64, "<Q"),
    FieldDescriptor.TYPE_SFIXED64: (_FIXED_64, "<q"),
    FieldDescriptor.TYPE_DOUBLE: (_FIXED_64, "<d"),
    FieldDescriptor.TYPE_FIXED32: (_FIXED_32, "<I"),
}


def _other_bytes(message: Message, seed: int) -> bytes:
    return _rewritten(message, random.Random(seed))


def _rewritten(message: Message, rng: random.Random) -> bytes:
    """The message with the freedoms that the wire format allows a writer."""
    by_field: list[list[bytes]] = []
    for declared, value in message.ListFields():
        values = value if declared.is_repeated else [value]
        by_field.append([_written(declared, item, rng) for item in values])
    by_field.extend(
        [_written(declared, declared.default_value, rng)]
        for declared in cast("Descriptor", message.DESCRIPTOR).fields
        if not declared.is_repeated
        and not declared.has_presence
        and getattr(message, declared.name) == declared.default_value
        and rng.random() < 0.2
    )
    if rng.random() < 0.3:
        by_field.append([_tagged(_UNKNOWN_FIELD, _LENGTH, _varint(3, rng) + b"abc", rng)])
    # Values of one field keep their order; the fields among each other do not.
    order = [index for index, pieces in enumerate(by_field) for _ in pieces]
    rng.shuffle(order)
    waiting = [iter(pieces) for pieces in by_field]
    return b"".join(next(waiting[index]) for index in order)


def _written(declared: FieldDescriptor, value: Any, rng: random.Random) -> bytes:  # noqa: ANN401
    """One value, with its tag. A list of numbers becomes one tag for each: not packed."""
    if declared.message_type is not None:
        value = _rewritten(value, rng)
    elif isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return _tagged(declared.number, _LENGTH, _varint(len(value), rng) + value, rng)
    if declared.type in _FIXED:
        wire, layout = _FIXED[declared.type]
        return _tagged(declared.number, wire, struct.pack(layout, value), rng)
    if declared.type in _ZIGZAG:
        value = value * 2 if value >= 0 else -value * 2 - 1
    return _tagged(declared.number, _VARINT, _varint(int(value) % 2**64, rng), rng)


def _tagged(number: int, wire: int, payload: bytes, rng: random.Random) -> bytes:
    return _varint(number << 3 | wire, rng) + payload


def _varint(value: int, rng: random.Random) -> bytes:
    """Now and then with a needless byte at the end."""
    groups = []
    while True:
        groups.append(value & 0x7F)
        value >>= 7
        if not value:
            break
    if len(groups) < 5 and rng.random() < 0.1:
        groups.append(0)
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
