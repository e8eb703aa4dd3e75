"""Reports on segments."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.cli.output import UNKNOWN, Column, Report, Section, humanised, number_text, time_text
from quiver.cli.reports.common import (
    CHECKSUM,
    damage_section,
    file_facts,
    listed_problems,
    short,
    slot_text,
    verdict,
)
from quiver.inspection import SegmentDescription
from quiver.inspection.segment import StreamFacts

_MAX_SCHEMA_TEXT = 400


def segment_report(segment: SegmentDescription) -> Report:
    """Where the parts lie, then streams, schemas and bundles."""
    facts = (
        *file_facts(segment),
        ("sequence", number_text(segment.sequence)),
        ("version", number_text(segment.version)),
        ("streams", number_text(segment.streams)),
        ("bundles", number_text(segment.bundles)),
        ("rows", number_text(segment.rows)),
        ("items", number_text(segment.items)),
        ("directory", _region(segment.directory)),
        ("manifest", _region(segment.manifest)),
        ("checksum", f"{segment.crc or UNKNOWN} {CHECKSUM[segment.checksum_verified]}"),
    )
    return Report(
        title="Segment",
        subject=segment.path,
        facts=facts,
        sections=(
            *_segment_sections(segment),
            *damage_section(listed_problems(segment.problems), segment.problem_count),
        ),
        verdict=verdict(segment, segment.problem_count),
        alarming=not segment.healthy,
    )


def _segment_sections(segment: SegmentDescription) -> Iterable[Section]:
    streams = segment.stream_table
    yield Section(
        title="Streams",
        columns=(
            Column("id", right=True),
            Column("slot"),
            Column("fingerprint"),
            Column("offset", right=True),
            Column("size", right=True),
            Column("rows", right=True),
            Column("chunks", right=True),
            Column("earliest event", optional=True),
            Column("latest event", optional=True),
        ),
        rows=tuple(_stream_row(stream) for stream in streams),
        total=segment.directory_rows,
    )
    yield Section(
        title="Schemas",
        columns=(Column("stream", right=True), Column("fields")),
        rows=tuple((str(stream.id), _shortened(stream.schema or UNKNOWN)) for stream in streams),
        total=segment.directory_rows,
    )
    yield Section(
        title="Bundles",
        columns=(
            Column("index", right=True),
            Column("signal"),
            Column("items", right=True),
            Column("sequence", right=True, optional=True),
            Column("ingested", optional=True),
            Column("slots: rows"),
        ),
        rows=tuple(
            (
                str(bundle.index),
                bundle.signal or UNKNOWN,
                number_text(bundle.items),
                number_text(bundle.sequence),
                time_text(bundle.ingestion_time_ns),
                ", ".join(
                    f"{slot_text(slot.name, slot.slot)}: {number_text(slot.rows)}"
                    for slot in bundle.slots
                )
                or "none",
            )
            for bundle in segment.bundle_table
        ),
        total=segment.manifest_rows,
    )


def _stream_row(stream: StreamFacts) -> tuple[str, ...]:
    return (
        str(stream.id),
        slot_text(stream.name, stream.slot),
        short(stream.fingerprint),
        str(stream.offset),
        humanised(stream.length),
        str(stream.rows),
        str(stream.chunks),
        time_text(stream.min_event_time_ns),
        time_text(stream.max_event_time_ns),
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SCHEMA_TEXT else f"{text[:_MAX_SCHEMA_TEXT]}..."


def _region(region: tuple[int, int] | None) -> str:
    return UNKNOWN if region is None else f"{region[1]} bytes at {region[0]}"
