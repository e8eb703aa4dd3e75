"""YAML as values that know where they stand.

A scalar keeps its text: what ``no``, ``1e3`` or ``127.0.0.1:4317`` mean is decided by the option
that it is for, not by the rules of YAML 1.1. Keys are text, so ``on:`` is the key ``on``.

A file is limited in size, depth and number of values, also after its aliases are followed; keys
come once; only the tags of plain YAML are known. ``<<`` merges mappings, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import yaml

from quiver.pipeline.settings.mistakes import Mistakes, Place, quoted

MAX_CHARACTERS: Final = 128 * 1024
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 50_000

_PREFIX: Final = "tag:yaml.org,2002:"
_TAGS: Final = {
    f"{_PREFIX}{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value")
}
NULL: Final = f"{_PREFIX}null"
_MERGE: Final = f"{_PREFIX}merge"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value: its text, and what YAML takes it for.

    ``written`` is the text before names were replaced: messages show it, for a value may be secret.
    ``known`` is False when a name in it could not be replaced, which was told already.
    """

    place: Place
    text: str
    tag: str
    written: str
    known: bool = True

    @property
    def is_null(self) -> bool:
        """Nothing is written, or ``null``."""
        return self.tag == NULL


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """A key, by its place, and its value."""

    place: Place
    value: Value


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping."""

    place: Place
    fields: Mapping[str, Field]


Value: TypeAlias = Scalar | Items | Fields
Fill: TypeAlias = Callable[[str, Place], str | None]


def parse_yaml(text: str, *, source: str, fill: Fill, mistakes: Mistakes) -> Value | None:
    """The value that a text holds; None, and a mistake, when it holds none.

    ``fill`` replaces the names in a scalar; None when it cannot.
    """
    if len(text) > MAX_CHARACTERS:
        mistakes.add(Place(source), f"the file is longer than {MAX_CHARACTERS} characters")
        return None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            mistakes.add(Place(source), "the file is empty", "leave it out to use the defaults")
            return None
        return _Reader(source, fill, mistakes).value(node, depth=1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(source) if mark is None else _place(source, mark)
        mistakes.add(place, f"not YAML: {_reason(error)}", _hint(error))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        mistakes.add(Place(source, line), f"not YAML: a character that is not text, {error.reason}")
    return None


class _Loader(yaml.SafeLoader):
    """Composes nodes, and nothing else; gives up on what is nested too deeply."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > 2 * MAX_DEPTH:
            raise _too_deep(self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Reader:
    """Nodes to values."""

    def __init__(self, source: str, fill: Fill, mistakes: Mistakes) -> None:
        self._source = source
        self._fill = fill
        self._mistakes = mistakes
        self._resolver = yaml.resolver.Resolver()
        self._count = 0

    def value(self, node: yaml.Node, depth: int) -> Value:
        self._count += 1
        if depth > MAX_DEPTH:
            raise _too_deep(node.start_mark)
        if self._count > MAX_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MAX_VALUES} values, counting aliases", node.start_mark
            )
        if node.tag not in _TAGS:
            self._mistakes.add(
                self._place(node), f"tag {quoted(node.tag)} is not supported", "leave it out"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode):
            values = tuple(self.value(item, depth + 1) for item in node.value)
            return Items(self._place(node), values)
        assert isinstance(node, yaml.MappingNode)  # noqa: S101 - there is no other kind
        return Fields(self._place(node), dict(self._fields(node, depth)))

    def _scalar(self, node: yaml.ScalarNode) -> Scalar:
        place = self._place(node)
        written: str = node.value
        text = self._fill(written, place)
        if text is None:
            return Scalar(place, written, node.tag, written, known=False)
        tag = node.tag
        if text != written and node.style is None:
            kind = (yaml.ScalarNode, text, (True, False))
            tag = str(self._resolver.resolve(*kind))  # type: ignore[no-untyped-call] # as it says
        return Scalar(place, text, tag, written)

    def _fields(self, node: yaml.MappingNode, depth: int) -> Iterator[tuple[str, Field]]:
        seen: dict[str, Place] = {}
        merged: dict[str, Field] = {}
        for key, value in node.value:
            place = self._place(key)
            if not isinstance(key, yaml.ScalarNode):
                hint = "put {{name}} in quotes" if isinstance(key, yaml.MappingNode) else ""
                self._mistakes.add(place, "a key must be a text", hint)
                continue
            if key.tag == _MERGE:
                merged |= self._merged(value, depth)
                continue
            name: str = key.value
            if name in seen:
                self._mistakes.add(
                    place, f"key {quoted(name)} comes twice", f"first in line {seen[name].line}"
                )
                continue
            seen[name] = place
            yield name, Field(place, self.value(value, depth + 1))
        yield from ((name, field) for name, field in merged.items() if name not in seen)

    def _merged(self, node: yaml.Node, depth: int) -> dict[str, Field]:
        """What ``<<`` brings in: of several mappings, the first that has a key."""
        value = self.value(node, depth + 1)
        fields: dict[str, Field] = {}
        for part in value.values if isinstance(value, Items) else (value,):
            if isinstance(part, Fields):
                fields = {**part.fields, **fields}
            else:
                self._mistakes.add(part.place, "only mappings can be merged by <<")
        return fields

    def _place(self, node: yaml.Node) -> Place:
        return _place(self._source, node.start_mark)


def _place(source: str, mark: yaml.Mark) -> Place:
    return Place(source, mark.line + 1, mark.column + 1)


def _too_deep(mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", mark)


def _reason(error: yaml.MarkedYAMLError) -> str:
    return ", ".join(part for part in (error.context, error.problem) if part)


def _hint(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and put texts that contain ': ' in quotes"
    if "single document" in (error.context or ""):
        return "only one document is allowed: remove the line ---"
    return ""
