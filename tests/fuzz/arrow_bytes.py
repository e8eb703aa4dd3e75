"""Arrow messages made by hand, to say what no writer would say.

A flatbuffer is written from front to back: a table, then what it refers to. The same object given
twice is written once and referred to twice, as hostile bytes may do.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
SCHEMA, DICTIONARY_BATCH, RECORD_BATCH = 1, 2, 3
NULL, INT, BINARY, UTF8, TIMESTAMP, LIST, FIXED_SIZE_LIST, UTF8_VIEW, LIST_VIEW = (
    *(1, 2, 4, 5, 10),
    *(12, 16, 24, 25),
)
LZ4, ZSTD = 0, 1
V4, V5 = 3, 4


@dataclass(eq=False)
class Table:
    """Slot number to value: ``(format, number)``, or something that is referred to."""

    fields: Mapping[int, Any]


@dataclass(eq=False)
class Vector:
    """A vector of references."""

    items: Sequence[Any]


@dataclass(eq=False)
class Structs:
    """A vector of structs, or of numbers."""

    format: str
    rows: Sequence[tuple[int, ...]]


Node: TypeAlias = Table | Vector | Structs | str | bytes


@dataclass
class _Builder:
    out: bytearray = field(default_factory=bytearray)
    placed: dict[int, int] = field(default_factory=dict)
    waiting: deque[tuple[int, Node]] = field(default_factory=deque)

    def build(self, root: Table) -> bytes:
        self._refer(root)
        while self.waiting:
            reference, node = self.waiting.popleft()
            if self.placed.get(id(node), -1) <= reference:  # references only point forward
                self.placed[id(node)] = self._place(node)
            struct.pack_into("<I", self.out, reference, self.placed[id(node)] - reference)
        self._align(8)
        return bytes(self.out)

    def _refer(self, node: Node) -> None:
        self.waiting.append((len(self.out), node))
        self.out += bytes(4)

    def _align(self, size: int, ahead: int = 0) -> None:
        self.out += bytes(-(len(self.out) + ahead) % size)

    def _place(self, node: Node) -> int:
        if isinstance(node, Table):
            return self._place_table(node)
        if isinstance(node, Structs):
            self._align(8, ahead=4)
            at = self._count(node.rows)
            for row in node.rows:
                self.out += struct.pack(node.format, *row)
        elif isinstance(node, Vector):
            self._align(4)
            at = self._count(node.items)
            for item in node.items:
                self._refer(item)
        else:
            text = node.encode() if isinstance(node, str) else node
            self._align(4)
            at = self._count(text)
            self.out += text + b"\0"
        return at

    def _count(self, items: Sequence[Any]) -> int:
        at = len(self.out)
        self.out += struct.pack("<I", len(items))
        return at

    def _place_table(self, table: Table) -> int:
        out = self.out
        slots = max(table.fields, default=-1) + 1
        self._align(8)
        vtable = len(out)
        out += bytes(4 + 2 * slots)
        self._align(8)
        start = len(out)
        out += struct.pack("<i", start - vtable)
        for slot, value in sorted(table.fields.items()):
            number = isinstance(value, tuple)
            self._align(struct.calcsize("<" + value[0]) if number else 4)
            struct.pack_into("<H", out, vtable + 4 + 2 * slot, len(out) - start)
            if number:
                out += struct.pack("<" + value[0], value[1])
            else:
                self._refer(value)
        struct.pack_into("<HH", out, vtable, 4 + 2 * slots, len(out) - start)
        return start


def flatbuffer(root: Table) -> bytes:
    return _Builder().build(root)


def message(
    kind: int,
    header: Table,
    body: bytes = b"",
    *,
    body_length: int | None = None,
    version: int = V5,
    metadata: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Prefix, metadata and body of one message."""
    fields: dict[int, Any] = {
        0: ("h", version),
        1: ("B", kind),
        2: header,
        3: ("q", len(body) if body_length is None else body_length),
    }
    if metadata:
        fields[4] = _pairs(metadata)
    encoded = flatbuffer(Table(fields))
    return struct.pack("<II", 0xFFFFFFFF, len(encoded)) + encoded + body


def _pairs(metadata: Sequence[tuple[str, str]]) -> Vector:
    return Vector([Table({0: key, 1: value}) for key, value in metadata])


def column(
    name: Node,
    type_id: int,
    type_table: Table | None = None,
    *,
    children: Sequence[Table] = (),
    dictionary_id: int | None = None,
) -> Table:
    fields: dict[int, Any] = {
        0: name,
        1: ("B", 1),
        2: ("B", type_id),
        3: type_table or Table({}),
        5: Vector(children),
    }
    if dictionary_id is not None:
        fields[4] = Table({0: ("q", dictionary_id), 1: int_type(8)})
    return Table(fields)


def int_type(bits: int) -> Table:
    return Table({0: ("i", bits), 1: ("B", 1)})


def int64(name: Node, dictionary_id: int | None = None) -> Table:
    return column(name, INT, int_type(64), dictionary_id=dictionary_id)


def schema(columns: Sequence[Table], *, big_endian: bool = False) -> Table:
    return Table({0: ("h", int(big_endian)), 1: Vector(columns)})


def batch(
    rows: int,
    nodes: Sequence[tuple[int, int]],
    buffers: Sequence[tuple[int, int]],
    *,
    codec: int | None = None,
    variadic: Sequence[int] | None = None,
) -> Table:
    """``nodes`` are (length, nulls) of columns, ``buffers`` are (offset, length) in the body."""
    fields: dict[int, Any] = {
        0: ("q", rows),
        1: Structs("<qq", nodes),
        2: Structs("<qq", buffers),
    }
    if codec is not None:
        fields[3] = Table({0: ("b", codec), 1: ("b", 0)})
    if variadic is not None:
        fields[4] = Structs("<q", [(count,) for count in variadic])
    return Table(fields)


def dictionary_batch(dictionary_id: int, data: Table) -> Table:
    return Table({0: ("q", dictionary_id), 1: data})


def stream(columns: Sequence[Table], *messages: bytes, big_endian: bool = False) -> bytes:
    """A whole IPC stream."""
    head = message(SCHEMA, schema(columns, big_endian=big_endian))
    return head + b"".join(messages) + END_OF_STREAM


def file(
    columns: Sequence[Table],
    batches: Sequence[bytes],
    *,
    big_endian: bool = False,
    metadata: Sequence[tuple[str, str]] = (),
    blocks: Sequence[tuple[int, int]] | None = None,
) -> bytes:
    """A whole IPC file with these record batch messages.

    ``blocks`` are (metadata length, body length) of what the footer lists; without it, those of the
    messages.
    """
    head = schema(columns, big_endian=big_endian)
    out = b"ARROW1\0\0" + message(SCHEMA, head)
    listed = []
    for index, encoded in enumerate(batches):
        lengths = _lengths(encoded) if blocks is None else blocks[index]
        listed.append((len(out), *lengths))
        out += encoded
    fields: dict[int, Any] = {
        0: ("h", V5),
        1: head,
        2: Structs("<qi4xq", []),
        3: Structs("<qi4xq", listed),
    }
    if metadata:
        fields[4] = _pairs(metadata)
    footer = flatbuffer(Table(fields))
    return out + END_OF_STREAM + footer + struct.pack("<i", len(footer)) + b"ARROW1"


def _lengths(encoded: bytes) -> tuple[int, int]:
    marker, length = struct.unpack_from("<II", encoded)
    metadata = length + 8 if marker == 0xFFFFFFFF else marker + 4
    return metadata, len(encoded) - metadata


def claim(size: int, content: bytes = b"\x28\xb5\x2f\xfd") -> bytes:
    """A compressed buffer of 64 bytes that says how large it wants to become."""
    return (struct.pack("<q", size) + content).ljust(64, b"\0")


INT64_CLAIM_BUFFERS = [(0, 0), (0, 64)]
