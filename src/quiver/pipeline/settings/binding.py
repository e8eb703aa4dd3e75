"""Values of a file to the classes of ``options``, by their annotations.

==========================  =====================================================================
annotation                  in a file
==========================  =====================================================================
``str``, ``int``, ``float`` as they are; numbers are not negative
``bool``                    ``true`` or ``false``; ``yes``, ``no``, ``on``, ``off``
``Size``, ``Duration``      ``32MB``, ``25ms``, see ``units``
``Path``                    a text that is not empty
an enumeration              one of its values
a dataclass                 a mapping; nothing at all means its defaults
``tuple[X, ...]``           a list
``Mapping[str, X]``         a mapping
``X | None``                the same as X, or ``null``
==========================  =====================================================================

A value that does not fit becomes a mistake with its place, and the rest is bound all the same, so
that one look shows everything that is wrong.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from quiver.errors import InvalidConfig
from quiver.pipeline.settings.mistakes import Mistakes, Place, nearest, quoted, suggestion
from quiver.pipeline.settings.units import parse_duration, parse_size
from quiver.pipeline.settings.vocabulary import CHOICES, NOT_NEEDED, OTHER_NAMES, WORDS_FOR_NONE
from quiver.pipeline.settings.yaml_text import Field, Fields, Items, Scalar, Value

T = TypeVar("T")

_TRUTHS: Final = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(
    ("false", "no", "off"), False
)
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,3}(?:_?[0-9]{1,3}){0,8}", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,3})?", re.IGNORECASE)
_TAG: Final = "tag:yaml.org,2002:"


class _Failed:
    """In place of a value that did not fit, which was told already."""


_FAILED: Final = _Failed()


class _DoesNotFit(InvalidConfig):
    def __init__(self, message: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Annotation:
    """A type of an option, taken apart."""

    type: Any
    arguments: tuple[Any, ...] = ()
    unit: str | None = None
    optional: bool = False
    choices: tuple[Any, ...] = ()
    """More than one type is allowed: YAML decides which it is."""


def take_apart(annotation: Any) -> Annotation:  # noqa: ANN401 - annotations have no type of their own
    """What an annotation says."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, unit = typing.get_args(annotation)
        return Annotation(inner, unit=unit)
    if origin in {typing.Union, types.UnionType}:
        members = typing.get_args(annotation)
        others = [member for member in members if member is not types.NoneType]
        optional = len(others) < len(members)
        if len(others) == 1:
            return replace(take_apart(others[0]), optional=optional)
        return Annotation(None, optional=optional, choices=tuple(others))
    if origin is not None:
        return Annotation(origin, typing.get_args(annotation))
    return Annotation(annotation)


def annotations_of(cls: type) -> Mapping[str, Annotation]:
    """The options of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: take_apart(hints[field.name]) for field in dataclasses.fields(cls)}


def bind(
    cls: type[T],
    value: Value | None,
    *,
    place: Place,
    what: str,
    mistakes: Mistakes,
    other_names: Mapping[str, str] | None = None,
) -> T | None:
    """An object of the class; None, and mistakes, when something does not fit.

    ``place`` is that of the key, ``what`` its name.
    """
    binder = _Binder(mistakes)
    if value is None or _is_null(value):
        value = Fields(place, {})
    bound = binder.options(cls, value, what, other_names or {})
    return bound if isinstance(bound, cls) else None


class _Binder:
    def __init__(self, mistakes: Mistakes) -> None:
        self._mistakes = mistakes

    def options(
        self, cls: type, value: Value, what: str, other_names: Mapping[str, str] | None = None
    ) -> object:
        if not isinstance(value, Fields):
            return self._wrong(value, f"{what} must be a mapping of options")
        others = {**OTHER_NAMES.get(cls, {}), **(other_names or {})}
        given = self._at_their_own_names(value, others)
        annotations = annotations_of(cls)
        bound: dict[str, object] = {}
        unknown = self._unknown_keys(cls, given, annotations, others, what)
        for name, annotation in annotations.items():
            field = given.get(name)
            if field is None or (_is_null(field.value) and _may_be_left_empty(annotation)):
                continue
            bound[name] = self._option(cls, name, annotation, field.value)
        missing = [name for name in _required(cls) if name not in bound]
        for name in missing:
            if name not in unknown.values():
                self._mistakes.add(value.place, f"{what} needs {name!r}, which is missing")
        if missing or unknown or any(found is _FAILED for found in bound.values()):
            return _FAILED
        return self._make(cls, bound, given, value.place)

    def _make(
        self, cls: type, bound: Mapping[str, Any], given: Mapping[str, Field], place: Place
    ) -> object:
        try:
            return cls(**bound)
        except InvalidConfig as error:
            words = re.findall(r"\w+", str(error))
            named = next((given[word].value.place for word in words if word in given), place)
            self._mistakes.add(named, str(error))
            return _FAILED

    def _unknown_keys(
        self,
        cls: type,
        given: Mapping[str, Field],
        annotations: Mapping[str, Annotation],
        others: Mapping[str, str],
        what: str,
    ) -> dict[str, str | None]:
        """Keys that mean nothing, with those that may have been meant."""
        unknown = {}
        not_needed = NOT_NEEDED.get(cls, {})
        for name, field in given.items():
            if name in not_needed:
                self._mistakes.warn(
                    field.place, f"{quoted(name)} changes nothing", not_needed[name]
                )
            elif name not in annotations:
                unknown[name] = nearest(name, [*annotations, *others])
                hint = suggestion(name, annotations)
                if unknown[name] in others:
                    hint = f"did you mean {unknown[name]!r}?"
                self._mistakes.add(field.place, f"{what} has no option {quoted(name)}", hint)
        return unknown

    def _at_their_own_names(self, value: Fields, others: Mapping[str, str]) -> dict[str, Field]:
        """The fields with those that have another name, or another place, put where they belong."""
        given = {name: field for name, field in value.fields.items() if name not in others}
        for other, path in others.items():
            field = value.fields.get(other)
            if field is not None and not self._put(given, path.split("."), field):
                self._mistakes.add(
                    field.place, f"{other!r} is the same as {path!r}: only one can be given"
                )
        return given

    def _put(self, given: dict[str, Field], path: Sequence[str], field: Field) -> bool:
        head, *rest = path
        there = given.get(head)
        if not rest:
            if there is None:
                given[head] = field
            return there is None
        if there is None or _is_null(there.value):
            there = Field(field.place, Fields(field.place, {}))
        if not isinstance(there.value, Fields):
            return True  # told when it is bound
        inner = dict(there.value.fields)
        done = self._put(inner, rest, field)
        given[head] = Field(there.place, Fields(there.value.place, inner))
        return done

    def _option(self, cls: type, name: str, annotation: Annotation, value: Value) -> object:
        word = WORDS_FOR_NONE.get((cls, name))
        if word is not None and isinstance(value, Scalar) and value.text == word:
            return None
        bound = self._value(annotation, value, name if word is None else f"{name}, if not {word},")
        choices = CHOICES.get((cls, name))
        if choices and isinstance(bound, str) and bound not in choices:
            return self._wrong(
                value, f"{name} cannot be {_shown(value)}", suggestion(bound, choices)
            )
        return bound

    # --- one value ---------------------------------------------------------------------------

    def _value(self, annotation: Annotation, value: Value, what: str) -> object:
        if annotation.optional and _is_null(value):
            return None
        if dataclasses.is_dataclass(annotation.type) and isinstance(annotation.type, type):
            return self.options(annotation.type, value, what)
        if annotation.type is tuple:
            return self._list(annotation, value, what)
        if annotation.type is Mapping:
            return self._mapping(annotation, value, what)
        return self._scalar(annotation, value, what)

    def _list(self, annotation: Annotation, value: Value, what: str) -> object:
        if not isinstance(value, Items):
            hint = f"write [{value.written}]" if isinstance(value, Scalar) else ""
            return self._wrong(value, f"{what} must be a list, not {_shown(value)}", hint)
        inner = take_apart(annotation.arguments[0])
        bound = [
            self._value(inner, item, f"{what}[{index}]") for index, item in enumerate(value.values)
        ]
        return _FAILED if _FAILED in bound else tuple(bound)

    def _mapping(self, annotation: Annotation, value: Value, what: str) -> object:
        if not isinstance(value, Fields):
            return self._wrong(value, f"{what} must be a mapping, not {_shown(value)}")
        inner = take_apart(annotation.arguments[1])
        bound = {
            name: self._value(inner, field.value, f"{what}.{name}")
            for name, field in value.fields.items()
        }
        return _FAILED if _FAILED in bound.values() else bound

    def _scalar(self, annotation: Annotation, value: Value, what: str) -> object:
        if not isinstance(value, Scalar) or value.is_null:
            return self._wrong(
                value, f"{what} must be {_described(annotation)}, not {_shown(value)}"
            )
        try:
            return _parsed(annotation, value) if value.known else _FAILED
        except _DoesNotFit as error:
            return self._wrong(value, f"{what} {error}", error.hint)
        except InvalidConfig as error:
            return self._wrong(value, f"{what} cannot be {_shown(value)}: {error}")

    def _wrong(self, value: Value, message: str, hint: str = "") -> _Failed:
        if not isinstance(value, Scalar) or value.known:
            self._mistakes.add(value.place, message, hint)
        return _FAILED


def _parsed(annotation: Annotation, value: Scalar) -> object:
    kind = annotation.type
    if annotation.unit is not None:
        return (parse_size if annotation.unit == "bytes" else parse_duration)(value.text)
    if annotation.choices:
        return _as_yaml_means(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind, value)
    if kind is str or (kind is Path and value.text):
        return kind(value.text)
    number = _TRUTHS.get(value.text.lower()) if kind is bool else _number(kind, value.text)
    if number is None:
        raise _DoesNotFit(f"must be {_described(annotation)}, not {_shown(value)}")
    if number < 0:
        raise _DoesNotFit("must not be negative")
    return number


def _member(kind: type[enum.Enum], value: Scalar) -> enum.Enum:
    allowed = {str(member.value): member for member in kind}
    if value.text not in allowed:
        raise _DoesNotFit(f"cannot be {_shown(value)}", suggestion(value.written, allowed))
    return allowed[value.text]


def _number(kind: object, text: str) -> float | None:
    if kind is int:
        return int(text) if _WHOLE.fullmatch(text) else None
    number = float(text) if _NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None


def _as_yaml_means(value: Scalar) -> object:
    """A text, a number or a truth: as YAML takes it, quotes make it a text."""
    text = value.text
    if value.tag == f"{_TAG}bool":
        return _TRUTHS[text.lower()]
    if value.tag == f"{_TAG}int" and _WHOLE.fullmatch(text):
        return int(text)
    if value.tag == f"{_TAG}float" and _NUMBER.fullmatch(text):
        return float(text)
    return text


def _required(cls: type) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.default is MISSING and field.default_factory is MISSING
    ]


def _is_null(value: Value) -> bool:
    return isinstance(value, Scalar) and value.known and value.is_null


def _may_be_left_empty(annotation: Annotation) -> bool:
    """``wal:`` with all its options commented out means the defaults."""
    container = dataclasses.is_dataclass(annotation.type) or annotation.type in {tuple, Mapping}
    return container and not annotation.optional


def _described(annotation: Annotation) -> str:
    if annotation.unit is not None:
        return {"bytes": "a size, as 32MB", "seconds": "a duration, as 25ms"}[annotation.unit]
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    if isinstance(annotation.type, type) and issubclass(annotation.type, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation.type)
    return "a path" if annotation.type is Path else names.get(annotation.type, "a single value")


def _shown(value: Value) -> str:
    if isinstance(value, Scalar):
        return "empty" if value.is_null else quoted(value.written)
    return "a list" if isinstance(value, Items) else "a mapping"
