"""Bytes to columns without harm: ptars behind a fence, and upb to say what is wrong.

ptars is fast and trusts its input more than it should. Three things stand between it and a
stranger's bytes:

=============================  =================================================================
what a message can do to it    what is done about it
=============================  =================================================================
panic (a length near 2**64)    the panic is caught; it still writes a few lines to stderr
overflow the stack (groups     messages with enough bytes that could open a group are shown to
inside groups, without end)    upb first, which stops at a depth of 100
fail a whole list              the list is halved until those that fail are alone
=============================  =================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import pyarrow as pa
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from quiver.otlp.messages import Converter

MAX_GROUP_TAGS: Final = 50_000
"""Groups inside groups that ptars survives: each takes about 80 bytes of a stack of 8 MiB."""
MAX_LEVELS: Final = 100
"""Messages inside messages that upb takes."""
_MAX_FIELDS: Final = 20_000
"""How far a broken message is searched for the place: a tenth of a second."""
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)
_WORDS: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_TAG: Final = 2**32
_FIXED_SIZE: Final = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
}


class Refused(Exception):
    """ptars does not take the messages, or does not give them back."""


def decode(converter: Converter, messages: list[bytes]) -> pa.RecordBatch:
    """One row for each message, or :class:`Refused` because of one of them."""
    try:
        return converter.list_to_record_batch(messages)
    except BaseException as error:  # noqa: BLE001 - a panic is not an Exception
        raise refusal(error) from None


def decode_array(converter: Converter, messages: pa.BinaryArray) -> pa.RecordBatch:
    """The same for messages that are a column already."""
    try:
        return converter.array_to_record_batch(messages)
    except BaseException as error:  # noqa: BLE001 - a panic is not an Exception
        raise refusal(error) from None


def refusal(error: BaseException) -> Refused:
    """What ptars said; raises again what ptars did not say."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
        raise error
    return Refused(str(error).removeprefix("failed to decode Protobuf message: "))


def undecodable(converter: Converter, messages: Sequence[bytes], first: int = 0) -> list[int]:
    """Which of the messages ptars refuses: one among n costs about 2 log n calls."""
    try:
        decode(converter, list(messages))
    except Refused:
        if len(messages) == 1:
            return [first]
    else:
        return []
    half = len(messages) // 2
    return [
        *undecodable(converter, messages[:half], first),
        *undecodable(converter, messages[half:], first + half),
    ]


def may_nest_groups(message: bytes) -> bool:
    """Whether there are enough bytes that look like the start of a group to overflow a stack."""
    if len(message) <= MAX_GROUP_TAGS:
        return False
    low_bits = np.frombuffer(message, np.uint8) & 7
    return int(np.count_nonzero(low_bits == _GROUP)) > MAX_GROUP_TAGS


def parse(kind: type[Message], message: bytes) -> Message | tuple[str, str]:
    """The message as upb sees it, or why it does not take it and where that is."""
    try:
        return kind.FromString(message)
    except DecodeError as error:
        place = find_break(cast("Descriptor", kind.DESCRIPTOR), message)
        if place is None:
            return str(error).rpartition(": ")[2] or "not a protobuf message", ""
        return place[1], f"byte {place[0]}"


# --- the place of the damage -------------------------------------------------------------------


class _Broken(Exception):
    """The offset at which a message stops making sense, and why."""


def find_break(described: Descriptor, data: bytes) -> tuple[int, str] | None:
    """The first place where the bytes are not such a message; None: there is none, or too far."""
    try:
        _Walk(data).message(described, 0, len(data), 0)
    except _Broken as broken:
        return broken.args[0], broken.args[1]
    except TimeoutError:
        pass
    return None


class _Walk:
    """One pass over a message, field by field, with a budget."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = _MAX_FIELDS

    def message(self, described: Descriptor | None, at: int, end: int, level: int) -> None:
        if level > MAX_LEVELS:
            raise _Broken(at, f"more than {MAX_LEVELS} messages inside each other")
        groups: list[int] = []
        while at < end:
            self._left -= 1
            if self._left < 0:
                raise TimeoutError
            start = at
            tag, at = self._varint(at, end, _MAX_TAG, "a tag")
            number, wire = tag >> 3, tag & 7
            if (number == 0 and wire != _END_GROUP) or wire > _FIXED32:
                inside = " inside a group" if groups else ""
                raise _Broken(start, f"field {number} of wire type {wire}{inside} cannot be")
            if wire == _GROUP:
                groups.append(number)
                if level + len(groups) > MAX_LEVELS:
                    raise _Broken(start, f"more than {MAX_LEVELS} groups inside each other")
            elif wire == _END_GROUP:
                if not groups or groups.pop() != number:
                    raise _Broken(start, "the end of a group that was not begun")
            else:
                known = None if groups or described is None else described
                field = known.fields_by_number.get(number) if known else None
                at = self._value(field, wire, at, end, level)
        if groups:
            raise _Broken(end, "a group has no end")

    def _value(
        self, field: FieldDescriptor | None, wire: int, at: int, end: int, level: int
    ) -> int:
        if wire == _VARINT:
            return self._varint(at, end, 2**70, "a number")[1]
        if wire in _WORDS:
            if end - at < _WORDS[wire]:
                raise _Broken(at, f"a number needs {_WORDS[wire]} bytes, {end - at} are left")
            return at + _WORDS[wire]
        length, start = self._varint(at, end, 2**70, "a length")
        if length > end - start:
            raise _Broken(at, f"a length of {length} bytes, {end - start} are left")
        if field is not None:
            self._content(field, start, start + length, level)
        return start + length

    def _content(self, field: FieldDescriptor, at: int, end: int, level: int) -> None:
        if field.message_type is not None:
            self.message(field.message_type, at, end, level + 1)
        elif field.type == FieldDescriptor.TYPE_STRING:
            try:
                self._data[at:end].decode()
            except UnicodeDecodeError as error:
                raise _Broken(at + error.start, f"{field.name} is not UTF-8") from None
        elif field.type == FieldDescriptor.TYPE_BYTES or not field.is_repeated:
            return  # not packed numbers: the field of somebody else, under this number
        elif field.type in _FIXED_SIZE:
            if (end - at) % _FIXED_SIZE[field.type]:
                raise _Broken(at, f"{field.name} has {end - at} bytes, not whole numbers")
        else:
            while at < end:
                at = self._varint(at, end, 2**70, "a number")[1]

    def _varint(self, at: int, end: int, limit: int, what: str) -> tuple[int, int]:
        value = shift = 0
        for position in range(at, min(at + (5 if limit == _MAX_TAG else 10), end)):
            byte = self._data[position]
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                if value >= limit:
                    raise _Broken(at, f"{what} is too large")
                return value, position + 1
            shift += 7
        raise _Broken(at, f"{what} has no end")
