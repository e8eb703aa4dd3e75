"""What reports have in common: facts about a file, the table of damage, the verdict."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quiver.cli.output import UNKNOWN, Column, Section, size_text
from quiver.inspection import Description, FileDescription, Problem

CHECKSUM: Final = {True: "verified", False: "NOT verified"}

_FINGERPRINT_DIGITS = 8


def file_facts(file: FileDescription) -> tuple[tuple[str, str], ...]:
    """Size, mode and sum of a file."""
    return (
        ("size", size_text(file.size)),
        ("mode", file.mode or UNKNOWN),
        ("sha256", file.sha256),
    )


def problem_rows(where: str, problem: str | None) -> list[tuple[str, str]]:
    """The one problem of a file as a row of the table of damage, if there is one."""
    return [] if problem is None else [(where, problem)]


def listed_problems(problems: Iterable[Problem]) -> list[tuple[str, str]]:
    """Problems as rows of the table of damage."""
    return [(problem.where, problem.reason) for problem in problems]


def damage_section(rows: list[tuple[str, str]], count: int) -> tuple[Section, ...]:
    """The table of damage; none when nothing is damaged."""
    if not count:
        return ()
    columns = (Column("where"), Column("reason"))
    return (
        Section(title="Damaged", columns=columns, rows=tuple(rows), total=count, alarming=True),
    )


def verdict(description: Description, count: int) -> str:
    """The last line."""
    return "Nothing is damaged." if description.healthy else f"{plural(count, 'part')} damaged."


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def slot_text(name: str, number: int) -> str:
    """``LOGS (30)``."""
    return f"{name} ({number})"


def short(fingerprint: str) -> str:
    """The first digits of a fingerprint, enough to tell two apart."""
    return fingerprint[:_FINGERPRINT_DIGITS]
