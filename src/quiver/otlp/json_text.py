"""OTLP/JSON: a request as text, and back.

The JSON mapping of protobuf, with the two exceptions that OTLP makes (ids, enums):

==========================  ===========================  =========================================
field                       written as                   read as
==========================  ===========================  =========================================
``trace_id``, ``span_id``,  hex, lower case              hex of the right length in either case,
``parent_span_id``                                       or an empty string
other bytes                 base64                       base64, standard or for URLs; padding may
                                                         be missing
enum                        integer                      integer or name; an unknown integer is
                                                         kept, an unknown name is refused
integer of 64 bits          decimal string               number or string
integer of 32 bits          number                       number or string
double                      number, ``"NaN"``,           the same, or a number in a string
                            ``"Infinity"``,
                            ``"-Infinity"``
name of a field             lowerCamelCase               lowerCamelCase or snake_case
==========================  ===========================  =========================================

On the way in a field that nobody knows is skipped, with all that it holds, and ``null`` is as if
the field were not there, except in a list, where it is refused. When an object names a field
twice, the last one counts.

``ParseDict`` of protobuf is not used for reading: it takes a string where a message belongs, drops
unknown enum names, skips characters that are not base64, and its errors repeat the input. So every
value is checked here, with its place, and after that the constructor of the message, which takes
nested dictionaries, does the rest in one call.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest
from quiver.otlp.messages import REQUEST_TYPES

_ID_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
)
_DEEPER: Final = frozenset({"ArrayValue", "KeyValueList"})
_MAX_NESTED: Final = 100
"""Messages inside each other, below the request. upb writes more, and does not read them again."""
_SHOWN: Final = 32
"""Characters of the input that an error repeats at most."""
_WAY: Final = 200
"""Characters of a path; one into deep values loses its middle."""
_WHOLE: Final = re.compile(r"-?[0-9]{1,20}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,400}(\.[0-9]{1,400})?([eE][+-]?[0-9]{1,4})?")
_NOT_FINITE: Final = MappingProxyType(
    {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
)
_URL_TO_STANDARD: Final = str.maketrans("-_", "+/")
_BITS_32: Final = (-(2**31), 2**31 - 1)
_BITS_64: Final = (-(2**63), 2**63 - 1)
_RANGES: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    {
        FieldDescriptor.CPPTYPE_INT32: _BITS_32,
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_INT64: _BITS_64,
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    }
)

_Scalar: TypeAlias = Callable[[object], object]


def from_json(signal: Signal, text: bytes, limits: OtlpConfig = OtlpConfig()) -> bytes:  # noqa: B008 - frozen
    """The serialised request that the text describes; ``InvalidRequest`` if it does not."""
    _check_size(len(text), limits)
    try:
        made = _read_message(_SHAPES[signal], _loads(text), limits.max_depth, 0)
    except _Refused as refused:
        raise InvalidRequest(refused.reason, where=refused.where) from None
    except RecursionError:
        raise InvalidRequest(
            "objects and lists lie too deep inside each other: send flatter values"
        ) from None
    request = REQUEST_TYPES[signal](**made).SerializeToString(deterministic=True)
    _check_size(len(request), limits)
    return request


def to_json(signal: Signal, request: bytes) -> bytes:
    """The request as compact UTF-8 text; ``InvalidRequest`` if upb cannot parse the bytes.

    Fields that nobody knows are left out. Ids are written whatever their length.
    """
    try:
        message = REQUEST_TYPES[signal].FromString(request)
    except DecodeError:
        raise InvalidRequest(
            f"the bytes are not an export request for {signal}: check signal and encoding"
        ) from None
    tree = MessageToDict(message, use_integers_for_enums=True)
    _spell_ids(_SHAPES[signal], tree)
    text = json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


class _Refused(Exception):
    """Why a value cannot be taken. Who passes it on adds a step of the way, last step first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    @property
    def where(self) -> str:
        way = "".join(reversed(self.steps)).removeprefix(".")
        return way if len(way) <= _WAY else f"{way[: _WAY // 2]}...{way[-_WAY // 2 :]}"


@dataclass(slots=True)
class _Shape:
    """A type of message: its fields by both names that JSON may use."""

    fields: dict[str, _Field] = field(default_factory=dict)
    holds_ids: bool = False
    """In itself or in what it contains."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    oneof: str
    repeated: bool
    is_id: bool
    deepens: bool
    """It puts a list or map into an attribute's value."""
    shape: _Shape | None
    scalar: _Scalar


def _check_size(size: int, limits: OtlpConfig) -> None:
    if size > limits.max_request_bytes:
        raise InvalidRequest(
            f"it takes {size} bytes, at most {limits.max_request_bytes} are taken: split it"
        )


def _loads(text: bytes) -> object:
    try:
        # Not left to json: it would also take UTF-16 and UTF-32.
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest("it is not UTF-8", where=f"byte {error.start}") from None
    except json.JSONDecodeError as error:
        at = len(error.doc[: error.pos].encode())
        raise InvalidRequest(f"it is not JSON: {error.msg}", where=f"byte {at}") from None
    except ValueError:
        # Python's own limit for the digits of an integer.
        raise InvalidRequest("a number has thousands of digits: none may be so long") from None


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f'{name} is not JSON: put it in quotes, "{name}"')


def _read_message(shape: _Shape, value: object, depth: int, level: int) -> dict[str, Any]:
    """Arguments for the constructor; ``depth`` is how many lists and maps may still be entered."""
    if not isinstance(value, dict):
        raise _Refused(f"an object is needed, not {_shown(value)}")
    if level > _MAX_NESTED:
        raise _Refused(f"messages lie more than {_MAX_NESTED} deep: send flatter values")
    made: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    name = ""
    try:
        for name, member in value.items():
            known = shape.fields.get(name)
            if known is None or member is None:
                continue
            if known.oneof and chosen.setdefault(known.oneof, known.name) != known.name:
                raise _Refused(f"{chosen[known.oneof]} is set as well: only one of them may be")
            made[known.name] = _read_field(known, member, depth, level)
    except _Refused as refused:
        refused.steps.append(f".{name}")
        raise
    return made


def _read_field(known: _Field, value: object, depth: int, level: int) -> object:
    if known.deepens:
        depth -= 1
        if depth < 0:
            raise _Refused("more lists and maps inside each other than max_depth: flatten them")
    if not known.repeated:
        return _read_one(known, value, depth, level)
    if not isinstance(value, list):
        raise _Refused(f"a list is needed, not {_shown(value)}")
    made: list[object] = []
    try:
        for item in value:
            made.append(_read_one(known, item, depth, level))  # noqa: PERF401 - its length is used
    except _Refused as refused:
        refused.steps.append(f"[{len(made)}]")
        raise
    return made


def _read_one(known: _Field, value: object, depth: int, level: int) -> object:
    if known.shape is None:
        return known.scalar(value)
    return _read_message(known.shape, value, depth, level + 1)


def _spell_ids(shape: _Shape, tree: dict[str, Any]) -> None:
    """Turn ids from base64 to hex, in place. What cannot hold ids is not looked into."""
    for name, member in tree.items():
        known = shape.fields[name]
        if known.is_id:
            tree[name] = base64.b64decode(member).hex()
        elif known.shape is not None and known.shape.holds_ids:
            for child in member if known.repeated else (member,):
                _spell_ids(known.shape, child)


# --- Scalars ----------------------------------------------------------------------------------


def _integer(low: int, high: int) -> _Scalar:
    def read(value: object) -> int:
        number = value
        if isinstance(number, str):
            if _WHOLE.fullmatch(number):
                number = int(number)
            elif _NUMBER.fullmatch(number):
                number = float(number)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool):
            raise _Refused(f"a whole number is needed, not {_shown(value)}")
        if not low <= number <= high:
            raise _Refused(f"it must be between {low} and {high}, not {_shown(value)}")
        return number

    return read


def _enum(described: EnumDescriptor) -> _Scalar:
    numbers = {value.name: value.number for value in described.values}
    number = _integer(*_BITS_32)

    def read(value: object) -> object:
        if isinstance(value, str):
            known = numbers.get(value)
            if known is not None:
                return known
            if not _WHOLE.fullmatch(value):
                raise _Refused(f"{described.name} has no value named {_shown(value)}")
        return number(value)

    return read


def _double(value: object) -> float:
    if isinstance(value, str):
        special = _NOT_FINITE.get(value)
        if special is not None:
            return special
        if not _NUMBER.fullmatch(value):
            raise _Refused(f"a number is needed, not {_shown(value)}")
        number = float(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        raise _Refused(f"a number is needed, not {_shown(value)}")
    if math.isinf(number):
        raise _Refused(f"{_shown(value)} is too large for a double")
    return number


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Refused(f"true or false is needed, not {_shown(value)}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise _Refused(f"a string is needed, not {_shown(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Refused(f"half a surrogate pair at character {error.start}") from None
    return value


def _base64(value: object) -> bytes:
    digits = _string(value).translate(_URL_TO_STANDARD)
    bare = digits.rstrip("=")
    if len(bare) == len(digits):
        digits += "=" * (-len(digits) % 4)
    try:
        return base64.b64decode(digits, validate=True)
    except (binascii.Error, ValueError):
        raise _Refused(f"base64 is needed, not {_shown(value)}") from None


def _id(size: int) -> _Scalar:
    def read(value: object) -> bytes:
        digits = _string(value)
        if not digits:
            return b""
        if len(digits) == 2 * size:
            try:
                made = bytes.fromhex(digits)
            except ValueError:
                made = b""
            # fromhex skips blanks: then it makes fewer bytes.
            if len(made) == size:
                return made
        raise _Refused(f"{2 * size} hex digits are needed, not {_shown(value)}")

    return read


def _shown(value: object) -> str:
    """A few words for a value, however large it is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        whole = len(value) <= _SHOWN
        # Escapes make it longer.
        return ascii(value)[: 2 * _SHOWN] if whole else f"{ascii(value[:_SHOWN])[: 2 * _SHOWN]}..."
    digits = repr(value)
    return digits if len(digits) <= _SHOWN else f"{digits[:_SHOWN]}..."


# --- Shapes -----------------------------------------------------------------------------------


def _shape(described: Descriptor, made: dict[str, _Shape]) -> _Shape:
    """The shape of a message and, in ``made``, of all that it contains."""
    shape = made.get(described.full_name)
    if shape is not None:
        return shape
    # A value contains values: it has to be found while it is being made.
    shape = made[described.full_name] = _Shape()
    for declared in described.fields:
        known = _field(declared, made)
        shape.fields[declared.json_name] = shape.fields[declared.name] = known
        if known.is_id or (known.shape is not None and known.shape.holds_ids):
            shape.holds_ids = True
    return shape


def _field(declared: FieldDescriptor, made: dict[str, _Shape]) -> _Field:
    oneof = declared.containing_oneof
    nested = declared.message_type
    return _Field(
        name=declared.name,
        oneof="" if oneof is None else oneof.name,
        repeated=declared.is_repeated,
        is_id=_is_id(declared),
        deepens=nested is not None and nested.name in _DEEPER,
        shape=None if nested is None else _shape(nested, made),
        scalar=_scalar(declared),
    )


def _is_id(declared: FieldDescriptor) -> bool:
    return declared.type == FieldDescriptor.TYPE_BYTES and declared.name in _ID_SIZES


def _scalar(declared: FieldDescriptor) -> _Scalar:
    if declared.type == FieldDescriptor.TYPE_BYTES:
        return _id(_ID_SIZES[declared.name]) if _is_id(declared) else _base64
    if declared.enum_type is not None:
        return _enum(declared.enum_type)
    if declared.cpp_type in _RANGES:
        return _integer(*_RANGES[declared.cpp_type])
    if declared.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _double
    return _bool if declared.cpp_type == FieldDescriptor.CPPTYPE_BOOL else _string


def _shapes() -> Mapping[Signal, _Shape]:
    made: dict[str, _Shape] = {}
    return MappingProxyType(
        {
            signal: _shape(cast("Descriptor", message.DESCRIPTOR), made)
            for signal, message in REQUEST_TYPES.items()
        }
    )


_SHAPES: Final = _shapes()
