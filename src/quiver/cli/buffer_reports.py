"""What ``quiver buffer inspect`` shows."""

from __future__ import annotations

from typing import Any

from quiver.buffer.looking import QueueView, damage_of
from quiver.buffer.types import QueueEntry
from quiver.cli.output import (
    UNKNOWN,
    Column,
    Report,
    Section,
    humanised,
    number_text,
    size_text,
    time_text,
)
from quiver.config import QueueConfig


def queue_document(view: QueueView, now_ms: int) -> dict[str, Any]:
    """For programs."""
    read = view.manifest
    unlisted = view.unlisted
    entries = [_entry(entry, view, now_ms) for entry in read.entries]
    return {
        "version": 1,
        "epoch": read.footer.epoch,
        "next_sequence": read.footer.next_sequence,
        "entry_count": read.footer.entry_count,
        "manifest_bytes": read.size,
        "waiting_bytes": sum(entry["bytes"] or 0 for entry in entries),
        "oldest_age_s": max(
            (entry["age_s"] for entry in entries if entry["age_s"] is not None), default=None
        ),
        "unlisted_batches": len(unlisted),
        "unlisted_bytes": sum(info.size for info in unlisted),
        "entries": entries,
        "dead_letters": [
            {
                "sequence": letter.entry.sequence,
                "location": letter.entry.location,
                "reason": letter.reason,
                "time_ms": letter.time_ms,
            }
            for letter in view.letters
        ],
        "damage": list(view.damage),
    }


def _entry(entry: QueueEntry, view: QueueView, now_ms: int) -> dict[str, Any]:
    info = view.batches.get(entry.location)
    times = [item.ingestion_time_ms for item in entry.metadata]
    return {
        "sequence": entry.sequence,
        "location": entry.location,
        "bytes": info.size if info else None,
        "records": entry.facts.record_count,
        "producer_id": entry.facts.producer_id,
        "ingestion_time_ms": min(times, default=None),
        "age_s": round((now_ms - min(times)) / 1000, 3) if times else None,
        "damage": damage_of(entry, view.batches),
    }


def limited(document: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """With at most so many of each kind."""
    lists = ("entries", "dead_letters", "damage")
    return {
        name: value[:limit] if name in lists and limit is not None else value
        for name, value in document.items()
    }


def queue_report(
    url: str, queue: QueueConfig, view: QueueView, document: dict[str, Any], limit: int | None
) -> Report:
    """For people."""

    def age(seconds: float | None) -> str:
        return UNKNOWN if seconds is None else f"{seconds:,.1f} s"

    entries = tuple(
        (
            str(entry["sequence"]),
            entry["location"],
            UNKNOWN if entry["bytes"] is None else humanised(entry["bytes"]),
            number_text(entry["records"]),
            age(entry["age_s"]),
            entry["producer_id"] or UNKNOWN,
        )
        for entry in document["entries"][:limit]
    )
    letters = tuple(
        (str(letter["sequence"]), time_text(letter["time_ms"] * 1_000_000), letter["reason"])
        for letter in document["dead_letters"][:limit]
    )
    damage, count = document["damage"], document["entry_count"]
    return Report(
        title="Queue",
        subject=f"{url} {queue.manifest_path}",
        facts=(
            ("manifest", size_text(document["manifest_bytes"])),
            ("epoch", f"{document['epoch']}{'' if document['epoch'] else ' (no consumer yet)'}"),
            ("next sequence", str(document["next_sequence"])),
            ("waiting", f"{count} batches, {size_text(document['waiting_bytes'])}"),
            ("oldest", age(document["oldest_age_s"])),
            (
                "not listed",
                f"{len(view.unlisted)} batches, {size_text(document['unlisted_bytes'])}",
            ),
        ),
        sections=(
            Section(
                title="Waiting",
                columns=(
                    Column("sequence", right=True),
                    Column("location"),
                    Column("size", right=True),
                    Column("records", right=True, optional=True),
                    Column("age", right=True, optional=True),
                    Column("producer", optional=True),
                ),
                rows=entries,
                total=count,
            ),
            Section(
                title="Dead letters",
                columns=(Column("sequence", right=True), Column("since"), Column("reason")),
                rows=letters,
                total=len(document["dead_letters"]),
            ),
            Section(
                title="Damage",
                columns=(Column("what"),),
                rows=tuple((text,) for text in damage[:limit]),
                total=len(damage),
                alarming=True,
            ),
        ),
        verdict=f"{len(damage)} of {count} batches cannot be read" if damage else "All is well",
        alarming=bool(damage),
    )


def damaged_report(url: str, queue: QueueConfig, reason: str) -> Report:
    """Of a queue whose manifest cannot be read."""
    return Report(
        title="Queue",
        subject=f"{url} {queue.manifest_path}",
        facts=(),
        sections=(),
        verdict=f"The manifest does not add up: {reason}",
        alarming=True,
    )
