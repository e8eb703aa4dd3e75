"""Reports on WAL files and cursors."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.cli.output import Column, Report, Section, number_text, size_text, time_text
from quiver.cli.reports.common import (
    damage_section,
    file_facts,
    problem_rows,
    short,
    slot_text,
    verdict,
)
from quiver.inspection import CursorDescription, WalDescription


def wal_report(wal: WalDescription) -> Report:
    """Positions and totals, then a row per entry."""
    positions = f"{number_text(wal.wal_position_start)} to {number_text(wal.wal_position_end)}"
    facts = [
        *file_facts(wal),
        ("log positions", positions),
        ("entries", _with_range(wal.entry_count, "sequence", wal.first_seq, wal.last_seq)),
        ("rows", str(wal.row_count)),
        ("payloads", size_text(wal.payload_bytes)),
    ]
    if wal.entry_count:
        facts += [("first", time_text(wal.first_ts)), ("last", time_text(wal.last_ts))]
    damage = [*problem_rows("header", wal.problem), *_damage_rows(wal)]
    count = wal.damaged_count + (wal.problem is not None)
    return Report(
        title="WAL file",
        subject=wal.path,
        facts=tuple(facts),
        sections=(*_wal_sections(wal), *damage_section(damage, count)),
        verdict=verdict(wal, count),
        alarming=not wal.healthy,
    )


def _wal_sections(wal: WalDescription) -> Iterable[Section]:
    yield Section(
        title="Entries",
        columns=(
            Column("sequence", right=True),
            Column("offset", right=True),
            Column("length", right=True),
            Column("ingested"),
            Column("crc"),
            Column("slots: rows, fingerprint"),
        ),
        rows=tuple(
            (
                str(entry.seq),
                str(entry.offset),
                str(entry.entry_len),
                time_text(entry.ts),
                entry.crc,
                ", ".join(
                    f"{slot_text(slot.name, slot.slot)}: {slot.rows}, {short(slot.fingerprint)}"
                    for slot in entry.slots
                )
                or "none",
            )
            for entry in wal.entries
        ),
        total=wal.entry_count,
    )
    if wal.skipped_count:
        yield Section(
            title="Entries of unknown types",
            columns=(
                Column("offset", right=True),
                Column("type", right=True),
                Column("length", right=True),
            ),
            rows=tuple((str(s.offset), str(s.entry_type), str(s.length)) for s in wal.skipped),
            total=wal.skipped_count,
        )


def _damage_rows(wal: WalDescription) -> Iterable[tuple[str, str]]:
    for damage in wal.damaged:
        torn = "; nothing good follows: an append that did not finish" if damage.torn else ""
        yield f"{damage.length} bytes at {damage.offset}", damage.reason + torn


def cursor_report(cursor: CursorDescription) -> Report:
    """The position."""
    return Report(
        title="WAL cursor",
        subject=cursor.path,
        facts=(*file_facts(cursor), ("log position", number_text(cursor.wal_position))),
        sections=damage_section(problem_rows("file", cursor.problem), not cursor.healthy),
        verdict=verdict(cursor, not cursor.healthy),
        alarming=not cursor.healthy,
    )


def _with_range(count: int, what: str, first: int | None, last: int | None) -> str:
    return f"{count}, {what} {first} to {last}" if count else "0"
