"""How many spans, log records or data points a serialised request holds, told from its bytes.

The walk goes from message to message by tags and lengths, down to the items, and does not look into
them. What is on the way must be sound: a request that ends early, or holds what is no protobuf, is
refused with the byte where that was seen. Damage inside an item is found by those who decode it.

=======  ==============================================================================
signal   the way down, by field numbers
=======  ==============================================================================
traces   ``resource_spans`` 1, ``scope_spans`` 2, ``spans`` 2
logs     ``resource_logs`` 1, ``scope_logs`` 2, ``log_records`` 2
metrics  ``resource_metrics`` 1, ``scope_metrics`` 2, ``metrics`` 2, then the kind of the
         metric (gauge 5, sum 7, histogram 9, exponential histogram 10, summary 11) and
         its ``data_points`` 1
=======  ==============================================================================

Fields that are not on the way are skipped, and so are those of a number on the way with another
wire type, as every protobuf library does.
"""

from __future__ import annotations

from typing import Final

from quiver.bundle import Signal
from quiver.errors import InvalidRequest

# Tags of fields with a length: number << 3 | 2.
_RESOURCE: Final = 1 << 3 | 2
_SCOPE: Final = 2 << 3 | 2
_ITEM: Final = 2 << 3 | 2
_DATA_POINT: Final = 1 << 3 | 2
_KINDS_OF_METRIC: Final = frozenset(number << 3 | 2 for number in (5, 7, 9, 10, 11))

_CONTINUED: Final = 0x80
_LOW_BITS: Final = 0x7F
_MAX_VARINT: Final = 10
_MAX_TAG: Final = 2**32 - 1
_VARINT, _FIXED_64, _LENGTH, _GROUP, _GROUP_END, _FIXED_32 = range(6)
_MAX_GROUPS: Final = 100
"""Groups inside each other that protobuf libraries follow."""


def count_items(signal: Signal, request: bytes) -> int:
    """The number of items; ``InvalidRequest`` with a byte offset where the structure breaks."""
    total = 0
    end = len(request)
    pos = 0
    while pos < end:
        tag, begin, pos = _field(request, pos, end)
        if tag == _RESOURCE:
            total += _in_resource(request, begin, pos, is_metrics=signal is Signal.METRICS)
    return total


def _in_resource(data: bytes, pos: int, end: int, *, is_metrics: bool) -> int:
    total = 0
    while pos < end:
        tag, begin, pos = _field(data, pos, end)
        if tag == _SCOPE:
            count = _in_metrics if is_metrics else _in_scope
            total += count(data, begin, pos)
    return total


def _in_scope(data: bytes, pos: int, end: int) -> int:
    """Fields of an item follow each other, with lengths of one or two bytes: that goes fast."""
    total = 0
    # Two bytes of length may be read behind any tag that lies before this.
    fast = end - 2
    while pos < end:
        if pos < fast and data[pos] == _ITEM:
            length = data[pos + 1]
            if length < _CONTINUED:
                behind = pos + 2 + length
            elif (second := data[pos + 2]) < _CONTINUED:
                behind = pos + 3 - _CONTINUED + length + (second << 7)
            else:
                _, _, behind = _field(data, pos, end)
            if behind > end:
                raise _too_long(pos, behind - end)
            pos = behind
            total += 1
        else:
            tag, _, pos = _field(data, pos, end)
            total += tag == _ITEM
    return total


def _in_metrics(data: bytes, pos: int, end: int) -> int:
    total = 0
    while pos < end:
        tag, begin, pos = _field(data, pos, end)
        if tag == _ITEM:
            total += _in_metric(data, begin, pos)
    return total


def _in_metric(data: bytes, pos: int, end: int) -> int:
    """A metric has one kind: of several the last one counts, and the same one twice is one."""
    kind = 0
    total = 0
    while pos < end:
        tag, begin, pos = _field(data, pos, end)
        if tag in _KINDS_OF_METRIC:
            if tag != kind:
                kind, total = tag, 0
            total += _data_points(data, begin, pos)
    return total


def _data_points(data: bytes, pos: int, end: int) -> int:
    total = 0
    while pos < end:
        tag, _, pos = _field(data, pos, end)
        total += tag == _DATA_POINT
    return total


def _field(data: bytes, pos: int, end: int) -> tuple[int, int, int]:
    """Tag, where the content begins, and where the next field does."""
    tag = data[pos]
    if tag < _CONTINUED:
        begin = pos + 1
    else:
        tag, begin = _varint(data, pos, end)
        if tag > _MAX_TAG:
            raise _broken(pos, "a field number has more than 32 bits")
    wire_type = tag & 7
    if wire_type != _LENGTH:
        return tag, begin, _skip(data, pos, begin, end, tag)
    if begin < end and data[begin] < _CONTINUED:
        length = data[begin]
        begin += 1
    else:
        length, begin = _varint(data, begin, end)
    behind = begin + length
    if behind > end:
        raise _too_long(pos, behind - end)
    if tag == _LENGTH:
        raise _broken(pos, "a field has the number 0")
    return tag, begin, behind


def _skip(data: bytes, pos: int, begin: int, end: int, tag: int) -> int:
    """The end of a field without a length."""
    if tag >> 3 == 0:
        raise _broken(pos, "a field has the number 0")
    wire_type = tag & 7
    if wire_type == _VARINT:
        return _varint(data, begin, end)[1]
    if wire_type == _GROUP:
        return _skip_group(data, begin, end, tag)
    if wire_type == _GROUP_END:
        raise _broken(pos, "a group ends that did not begin")
    if wire_type not in {_FIXED_32, _FIXED_64}:
        raise _broken(pos, f"there is no wire type {wire_type}")
    behind = begin + (4 if wire_type == _FIXED_32 else 8)
    if behind > end:
        raise _too_long(pos, behind - end)
    return behind


def _skip_group(data: bytes, pos: int, end: int, tag: int) -> int:
    """The end of a group; only fields that OTLP does not know are written so."""
    open_groups = [tag >> 3]
    while pos < end:
        inner, begin = _varint(data, pos, end)
        if inner & 7 == _GROUP_END and inner >> 3 == open_groups[-1]:
            open_groups.pop()
            pos = begin
            if not open_groups:
                return pos
        elif inner & 7 == _GROUP and inner >> 3 > 0 and inner <= _MAX_TAG:
            open_groups.append(inner >> 3)
            if len(open_groups) > _MAX_GROUPS:
                raise _broken(pos, f"groups lie more than {_MAX_GROUPS} deep")
            pos = begin
        else:
            pos = _field(data, pos, end)[2]
    raise _broken(pos, "a group does not end")


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    value = 0
    limit = min(end, pos + _MAX_VARINT)
    for index in range(pos, limit):
        byte = data[index]
        value |= (byte & _LOW_BITS) << 7 * (index - pos)
        if byte < _CONTINUED:
            return value, index + 1
    if limit - pos == _MAX_VARINT:
        raise _broken(pos, f"a number takes more than {_MAX_VARINT} bytes")
    raise _broken(limit, "it ends inside a number")


def _too_long(pos: int, missing: int) -> InvalidRequest:
    return _broken(pos, f"a field ends {missing} bytes behind what holds it")


def _broken(pos: int, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{reason}: it is no OTLP request, or not all of it", where=f"byte {pos}")
