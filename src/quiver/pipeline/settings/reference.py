"""The tables of ``docs/configuration.md``: every option of every node, from the classes themselves.

``renewed`` puts them between two marks of the page, so that what people wrote around them stays.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Final

from quiver.pipeline.settings.binding import Annotation, annotations_of, take_apart
from quiver.pipeline.settings.options import ProcessOptions
from quiver.pipeline.settings.plugin_names import Kind, Plugin
from quiver.pipeline.settings.schema import classes_of, default_text, field_texts, names_of, plugins
from quiver.pipeline.settings.vocabulary import CHOICES, NOT_NEEDED, OTHER_NAMES, WORDS_FOR_NONE

BEGIN: Final = "<!-- The tables below are made by tools/renew-configuration-docs. -->"
END: Final = "<!-- The tables above are made by tools/renew-configuration-docs. -->"

_PLAIN_NAMES: Final = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true`, `false`",
    Path: "path",
}


def renewed(page: str) -> str:
    """The page with new tables between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has lost the marks between which the tables stand")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """All tables, as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    shared = _shared_classes()
    for kind in Kind:
        yield from (f"## {kind.capitalize()}s", "")
        for plugin in plugins():
            if plugin.kind is kind:
                yield from _plugin_lines(plugin, shared)
    yield from ("## The process", "")
    for cls in classes_of(ProcessOptions):
        path = "process" if cls is ProcessOptions else f"process.{_key_of(ProcessOptions, cls)}"
        yield from _class_lines(cls, f"### `{path}`")
    yield from ("## Parts that several nodes have", "")
    for cls in shared:
        yield from _class_lines(cls, f"### {_title(cls)}")


def _plugin_lines(plugin: Plugin, shared: list[type]) -> Iterator[str]:
    yield from (f"### {plugin.kind} `{plugin.name}`", "")
    yield from (f"In a file: {', '.join(f'`{plugin.kind}:{n}`' for n in names_of(plugin))}.", "")
    for cls in classes_of(plugin.options):
        if cls is plugin.options:
            yield from _class_lines(cls, None)
        elif cls not in shared:
            key = _key_of(plugin.options, cls)
            yield from _class_lines(cls, f"#### `{key}` of `{plugin.name}`")
    others = OTHER_NAMES.get(plugin.options, {})
    if others:
        names = ", ".join(f"`{name}` for `{path}`" for name, path in others.items())
        yield from (f"Also understood: {names}.", "")
    for name, reason in NOT_NEEDED.get(plugin.options, {}).items():
        yield from (f"`{name}` is accepted and changes nothing: {reason}.", "")


def _class_lines(cls: type, heading: str | None) -> Iterator[str]:
    if heading:
        yield from (heading, "")
    texts_of_bases = (base.__doc__ for base in cls.__mro__ if dataclasses.is_dataclass(base))
    yield from (_inline(" ".join(text for text in texts_of_bases if text)), "")
    yield from ("| option | value | default | |", "|---|---|---|---|")
    texts = field_texts(cls)
    for field in dataclasses.fields(cls):
        annotation = annotations_of(cls)[field.name]
        cells = (
            f"`{field.name}`",
            _values(cls, field.name, annotation),
            _default(cls, field, annotation),
            _inline(texts.get(field.name, "")),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _shared_classes() -> list[type]:
    """Classes inside the options of more than one plugin."""
    counts: dict[type, int] = {}
    for plugin in plugins():
        for cls in classes_of(plugin.options)[1:]:
            counts[cls] = counts.get(cls, 0) + 1
    return [cls for cls, count in counts.items() if count > 1]


def _key_of(outer: type, inner: type) -> str:
    """The key, or the keys, by which a class is reached from another."""
    for name, annotation in annotations_of(outer).items():
        nearest = _innermost(annotation).type
        if nearest is inner:
            return name
        if isinstance(nearest, type) and inner in _inside(nearest):
            return f"{name}.{_key_of(nearest, inner)}"
    raise ValueError(f"{outer.__name__} has no {inner.__name__}")


def _inside(cls: type) -> list[type]:
    return classes_of(cls)[1:] if dataclasses.is_dataclass(cls) else []


def _innermost(annotation: Annotation) -> Annotation:
    while annotation.arguments:
        last = [each for each in annotation.arguments if each is not Ellipsis][-1]
        annotation = take_apart(last)
    return annotation


def _values(cls: type, name: str, annotation: Annotation) -> str:
    choices = CHOICES.get((cls, name))
    text = ", ".join(f"`{each}`" for each in choices) if choices else _type_text(annotation)
    word = WORDS_FOR_NONE.get((cls, name))
    return f"{text}, or `{word}`" if word else text


def _type_text(annotation: Annotation) -> str:
    kind = annotation.type
    if annotation.unit is not None:
        return "size" if annotation.unit == "bytes" else "duration"
    if annotation.choices:
        return "text, number, `true`, `false`"
    if annotation.arguments:
        inner = _type_text(_innermost(annotation))
        return f"list of {inner}" if kind is tuple else f"mapping to {inner}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return _PLAIN_NAMES.get(kind) or _reference(kind)


def _reference(cls: type) -> str:
    """Where the options of a class are listed."""
    if cls not in _shared_classes():
        return "see below"
    return f"[{_title(cls)}](#{_title(cls).lower().replace(' ', '-')})"


def _default(cls: type, field: dataclasses.Field[object], annotation: Annotation) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "**required**"
    if field.default is None:
        word = WORDS_FOR_NONE.get((cls, field.name))
        return f"`{word}`" if word else "none"
    text = default_text(annotation, field.default)
    if isinstance(text, bool):
        return f"`{str(text).lower()}`"
    return "" if text is None else f"`{text}`"


def _title(cls: type) -> str:
    """``client TLS`` for ``ClientTlsOptions``."""
    name = cls.__name__.removesuffix("Options")
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).split()
    return " ".join("TLS" if word == "tls" else word for word in words)


def _inline(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
