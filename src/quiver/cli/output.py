"""Where a command puts what it found: tables for people, one JSON document for programs.

Text from files and paths is untrusted here too. It reaches the terminal without the characters that
would move the cursor or colour the screen, and Rich never reads it as markup.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple, Protocol

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

UNKNOWN: Final = "-"

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_KIB = 1024
_SECOND_NS = 1_000_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Lines are not broken for a reader that is a program: as wide as any table gets.
_WIDTH_WITHOUT_TERMINAL = 400


class Column(NamedTuple):
    """The head of a column. Numbers stand at the right.

    An optional column is left out when all its cells are ``UNKNOWN``.
    """

    name: str
    right: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table. ``total`` counts the rows that were left out, too."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    total: int
    alarming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What people get to see: a headline, facts, tables, and a verdict."""

    title: str
    subject: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    verdict: str
    alarming: bool = False


class Output(Protocol):
    """The one way out for the result of a command."""

    def show(self, document: Mapping[str, Any], report: Report) -> None:
        """Show a result. Both arguments say the same, for two kinds of readers."""


class JsonOutput:
    """One JSON document, keys in the order of the record."""

    def show(self, document: Mapping[str, Any], report: Report) -> None:  # noqa: ARG002
        write(json.dumps(document, indent=2) + "\n")


class ConsoleOutput:
    """Tables. No colour when ``NO_COLOR`` is set or nobody looks at a terminal."""

    def show(self, document: Mapping[str, Any], report: Report) -> None:  # noqa: ARG002
        console = make_console()
        with console.capture() as capture:
            for part in _parts(report):
                # Lines stay whole, so that a path can be copied; tables fit the terminal.
                console.print(part, soft_wrap=isinstance(part, Text))
        lines = capture.get().splitlines()
        write("".join(f"{line.rstrip()}\n" for line in lines))


def make_console() -> Console:
    """A console for standard output."""
    # Without colour, Rich would keep bold and dim, which are escape sequences as well.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(color_system=colours, emoji=False, markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


def write(text: str) -> None:
    """Print to standard output; a reader that has seen enough, like ``head``, may leave."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_output()


def abandon_output() -> None:
    """Give up standard output, so that the interpreter does not complain about it at the end."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.close()


def _parts(report: Report) -> Iterator[RenderableType]:
    yield Text(report.title, style="bold").append(f"  {printable(report.subject)}", "not bold")
    if report.facts:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for name, value in report.facts:
            grid.add_row(Text(name), Text(printable(value)))
        yield grid
    for section in report.sections:
        if section.total:
            yield from _section(section)
    yield Text()
    yield Text(printable(report.verdict), style="bold red" if report.alarming else "green")


def _section(section: Section) -> Iterator[RenderableType]:
    yield Text()
    yield Text(section.title, style="bold red" if section.alarming else "bold")
    if section.rows:
        yield _table(section)
    if section.total > len(section.rows):
        hint = "" if section.alarming else ", use --limit"
        yield Text(f"... {section.total - len(section.rows)} more{hint}", style="dim")


def _table(section: Section) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    shown = []
    for i, column in enumerate(section.columns):
        if column.optional and all(row[i] == UNKNOWN for row in section.rows):
            continue
        shown.append(i)
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.name), justify=justify, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(printable(row[i])) for i in shown))
    return table


# --- values as text -----------------------------------------------------------------------------


def printable(text: str) -> str:
    r"""The text with control characters, line breaks and broken Unicode as ``\x1b``, ``\n``..."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def humanised(size: int) -> str:
    """``4.8 KiB`` for 4872."""
    if size < _KIB:
        return f"{size} B"
    value = float(size)
    for unit in _UNITS:
        value /= _KIB
        if round(value, 1) < _KIB or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def size_text(size: int) -> str:
    """``4.8 KiB (4,872 bytes)``."""
    return humanised(size) if size < _KIB else f"{humanised(size)} ({size:,} bytes)"


def time_text(time_ns: int | None) -> str:
    """``2023-11-14T22:13:20.000000001Z (1700000000000000001)``; ``-`` when unknown."""
    if time_ns is None:
        return UNKNOWN
    seconds, nanoseconds = divmod(time_ns, _SECOND_NS)
    moment = _EPOCH + timedelta(seconds=seconds)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09}Z ({time_ns})"


def number_text(value: int | None) -> str:
    """``-`` when unknown."""
    return UNKNOWN if value is None else str(value)
