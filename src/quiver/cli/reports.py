"""Descriptions as people read them: facts and tables, times and sizes spelled out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import Final

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
from quiver.inspection import (
    CursorDescription,
    Description,
    FileDescription,
    Problem,
    ProgressDescription,
    RootDescription,
    SegmentDescription,
    StoreDescription,
    WalDescription,
)
from quiver.inspection.segment import StreamFacts

_FINGERPRINT_DIGITS = 8
_MAX_SCHEMA_TEXT = 400
_MAX_BITMAP_BITS = 64
_CHECKSUM: Final = {True: "verified", False: "NOT verified"}


@singledispatch
def report_on(description: Description) -> Report:
    """The report on any description."""
    raise NotImplementedError(type(description).__name__)


# --- the log ------------------------------------------------------------------------------------


@report_on.register
def _wal(wal: WalDescription) -> Report:
    positions = f"{number_text(wal.wal_position_start)} to {number_text(wal.wal_position_end)}"
    facts = [
        *_file_facts(wal),
        ("log positions", positions),
        ("entries", _with_range(wal.entry_count, "sequence", wal.first_seq, wal.last_seq)),
        ("rows", str(wal.row_count)),
        ("payloads", size_text(wal.payload_bytes)),
    ]
    if wal.entry_count:
        facts += [("first", time_text(wal.first_ts)), ("last", time_text(wal.last_ts))]
    damage = [*_problem_rows("header", wal.problem), *_damage_rows(wal)]
    count = wal.damaged_count + (wal.problem is not None)
    return Report(
        title="WAL file",
        subject=wal.path,
        facts=tuple(facts),
        sections=(*_wal_sections(wal), *_damage_section(damage, count)),
        verdict=_verdict(wal, count),
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
                    f"{_slot(slot.name, slot.slot)}: {slot.rows}, {_short(slot.fingerprint)}"
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


@report_on.register
def _cursor(cursor: CursorDescription) -> Report:
    return Report(
        title="WAL cursor",
        subject=cursor.path,
        facts=(*_file_facts(cursor), ("log position", number_text(cursor.wal_position))),
        sections=_damage_section(_problem_rows("file", cursor.problem), not cursor.healthy),
        verdict=_verdict(cursor, not cursor.healthy),
        alarming=not cursor.healthy,
    )


# --- segments -----------------------------------------------------------------------------------


@report_on.register
def _segment(segment: SegmentDescription) -> Report:
    facts = (
        *_file_facts(segment),
        ("sequence", number_text(segment.sequence)),
        ("version", number_text(segment.version)),
        ("streams", number_text(segment.streams)),
        ("bundles", number_text(segment.bundles)),
        ("rows", number_text(segment.rows)),
        ("items", number_text(segment.items)),
        ("directory", _region(segment.directory)),
        ("manifest", _region(segment.manifest)),
        ("checksum", f"{segment.crc or UNKNOWN} {_CHECKSUM[segment.checksum_verified]}"),
    )
    return Report(
        title="Segment",
        subject=segment.path,
        facts=facts,
        sections=(
            *_segment_sections(segment),
            *_damage_section(_problems(segment.problems), segment.problem_count),
        ),
        verdict=_verdict(segment, segment.problem_count),
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
        total=segment.streams or 0,
    )
    yield Section(
        title="Schemas",
        columns=(Column("stream", right=True), Column("fields")),
        rows=tuple((str(stream.id), _shortened(stream.schema or UNKNOWN)) for stream in streams),
        total=segment.streams or 0,
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
                    f"{_slot(slot.name, slot.slot)}: {number_text(slot.rows)}"
                    for slot in bundle.slots
                )
                or "none",
            )
            for bundle in segment.bundle_table
        ),
        total=segment.bundles or 0,
    )


def _stream_row(stream: StreamFacts) -> tuple[str, ...]:
    return (
        str(stream.id),
        _slot(stream.name, stream.slot),
        _short(stream.fingerprint),
        str(stream.offset),
        humanised(stream.length),
        str(stream.rows),
        str(stream.chunks),
        time_text(stream.min_event_time_ns),
        time_text(stream.max_event_time_ns),
    )


# --- progress -----------------------------------------------------------------------------------


@report_on.register
def _progress(progress: ProgressDescription) -> Report:
    names = f" ({', '.join(progress.flag_names)})" if progress.flag_names else ""
    return Report(
        title="Progress file",
        subject=progress.path,
        facts=(
            *_file_facts(progress),
            ("subscriber", progress.subscriber or UNKNOWN),
            ("flags", f"{progress.flags}{names}"),
            ("oldest incomplete segment", str(progress.oldest_incomplete_segment)),
            ("segments", str(progress.segment_count)),
            ("bundles", f"{progress.resolved} resolved, {progress.pending} pending"),
        ),
        sections=(
            Section(
                title="Segments",
                columns=(
                    Column("segment", right=True),
                    Column("bundles", right=True),
                    Column("resolved", right=True),
                    Column("pending", right=True),
                    Column("bundles from 0 on: # resolved, . pending"),
                ),
                rows=tuple(
                    (
                        str(entry.seg),
                        str(entry.bundles),
                        str(entry.resolved),
                        str(entry.pending),
                        _bitmap(entry.words, entry.bundles),
                    )
                    for entry in progress.entries
                ),
                total=progress.segment_count,
            ),
            *_damage_section(_problem_rows("file", progress.problem), not progress.healthy),
        ),
        verdict=_verdict(progress, not progress.healthy),
        alarming=not progress.healthy,
    )


def _bitmap(words: tuple[int, ...], bundles: int) -> str:
    """One character per bundle, for as many as one line takes."""
    first = words[0] if words else 0
    shown = min(bundles, _MAX_BITMAP_BITS)
    dots = "".join("#" if first >> i & 1 else "." for i in range(shown))
    return dots + ("..." if bundles > shown else "")


# --- stores -------------------------------------------------------------------------------------


@report_on.register
def _store(store: StoreDescription) -> Report:
    cursor = "none" if store.cursor is None else str(store.cursor)
    items = "" if store.items is None else f", {store.items} items"
    facts = [
        ("log", f"{_plural(store.wal_count, 'file')}, {size_text(store.wal_bytes)}"),
        ("entries", f"{store.wal_entries}, {store.entries_past_cursor} past the cursor"),
        ("cursor", cursor),
        ("segments", f"{store.segment_count}, {size_text(store.segment_bytes)}"),
        ("in segments", f"{_plural(store.bundles, 'bundle')}, {store.rows} rows{items}"),
        ("subscribers", str(store.subscriber_count)),
    ]
    if store.quarantined_files:
        quarantined = f"{_plural(store.quarantined_files, 'file')}"
        facts.append(("quarantined", f"{quarantined}, {size_text(store.quarantined_bytes)}"))
    return Report(
        title="Store",
        subject=store.path,
        facts=tuple(facts),
        sections=(
            *_store_sections(store),
            *_damage_section(_problems(store.problems), store.problem_count),
        ),
        verdict=_verdict(store, store.problem_count),
        alarming=not store.healthy,
    )


def _store_sections(store: StoreDescription) -> Iterable[Section]:
    if store.wal_count:
        yield _log_section(store)
    if store.segment_count:
        yield _segments_section(store)
    if store.subscriber_count:
        yield _subscribers_section(store)
    if store.leftover_count:
        yield Section(
            title="Left over from interrupted writes, harmless",
            columns=(Column("file"),),
            rows=tuple((name,) for name in store.leftovers),
            total=store.leftover_count,
        )
    if store.unknown_count:
        yield Section(
            title="Not part of the store",
            columns=(Column("file"), Column("content")),
            rows=tuple((file.name, file.looks_like or "unknown") for file in store.unknown),
            total=store.unknown_count,
        )


def _log_section(store: StoreDescription) -> Section:
    return Section(
        title="Log, oldest first",
        columns=(
            Column("file"),
            Column("size", right=True),
            Column("from position", right=True),
            Column("to position", right=True),
            Column("entries", right=True),
            Column("past cursor", right=True),
            Column("rows", right=True),
            Column("skipped", right=True),
            Column("damaged", right=True),
        ),
        rows=tuple(
            (
                file.name,
                humanised(file.size),
                str(file.wal_position_start),
                str(file.wal_position_end),
                str(file.entries),
                str(file.entries_past_cursor),
                str(file.rows),
                str(file.skipped),
                str(file.damaged_count),
            )
            for file in store.wal
        ),
        total=store.wal_count,
    )


def _segments_section(store: StoreDescription) -> Section:
    return Section(
        title="Segments",
        columns=(
            Column("sequence", right=True),
            Column("file"),
            Column("size", right=True),
            Column("streams", right=True),
            Column("bundles", right=True),
            Column("rows", right=True),
            Column("items", right=True),
            Column("checksum"),
        ),
        rows=tuple(
            (
                str(segment.sequence),
                segment.name,
                humanised(segment.size),
                number_text(segment.streams),
                number_text(segment.bundles),
                number_text(segment.rows),
                number_text(segment.items),
                _CHECKSUM[segment.checksum_verified],
            )
            for segment in store.segments
        ),
        total=store.segment_count,
    )


def _subscribers_section(store: StoreDescription) -> Section:
    return Section(
        title="Subscribers, over the segments above",
        columns=(
            Column("id"),
            Column("resolved", right=True),
            Column("pending", right=True),
            Column("oldest incomplete segment", right=True),
            Column("segments gone", right=True),
        ),
        rows=tuple(
            (
                subscriber.id,
                str(subscriber.resolved),
                str(subscriber.pending),
                str(subscriber.oldest_incomplete_segment),
                str(subscriber.segments_gone),
            )
            for subscriber in store.subscribers
        ),
        total=store.subscriber_count,
    )


@report_on.register
def _root(root: RootDescription) -> Report:
    count = sum(store.problem_count for store in root.stores)
    problems = [
        (f"{store.path}: {problem.where}", problem.reason)
        for store in root.stores
        for problem in store.problems
    ]
    section = Section(
        title="Stores",
        columns=(
            Column("store"),
            Column("entries", right=True),
            Column("past cursor", right=True),
            Column("segments", right=True),
            Column("bundles", right=True),
            Column("rows", right=True),
            Column("subscribers", right=True),
            Column("damaged", right=True),
        ),
        rows=tuple(
            (
                store.path,
                str(store.wal_entries),
                str(store.entries_past_cursor),
                str(store.segment_count),
                str(store.bundles),
                str(store.rows),
                str(store.subscriber_count),
                str(store.problem_count),
            )
            for store in root.stores
        ),
        total=len(root.stores),
    )
    return Report(
        title="Stores, one per core",
        subject=root.path,
        facts=(("stores", str(len(root.stores))),),
        sections=(section, *_damage_section(problems, count)),
        verdict=_verdict(root, count),
        alarming=not root.healthy,
    )


# --- parts --------------------------------------------------------------------------------------


def _file_facts(file: FileDescription) -> tuple[tuple[str, str], ...]:
    return (
        ("size", size_text(file.size)),
        ("mode", file.mode or UNKNOWN),
        ("sha256", file.sha256),
    )


def _problem_rows(where: str, problem: str | None) -> list[tuple[str, str]]:
    return [] if problem is None else [(where, problem)]


def _problems(problems: Iterable[Problem]) -> list[tuple[str, str]]:
    return [(problem.where, problem.reason) for problem in problems]


def _damage_section(rows: list[tuple[str, str]], count: int) -> tuple[Section, ...]:
    if not count:
        return ()
    columns = (Column("where"), Column("reason"))
    return (
        Section(title="Damaged", columns=columns, rows=tuple(rows), total=count, alarming=True),
    )


def _verdict(description: Description, count: int) -> str:
    return "Nothing is damaged." if description.healthy else f"{_plural(count, 'part')} damaged."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _with_range(count: int, what: str, first: int | None, last: int | None) -> str:
    return f"{count}, {what} {first} to {last}" if count else "0"


def _slot(name: str, number: int) -> str:
    return f"{name} ({number})"


def _short(fingerprint: str) -> str:
    return fingerprint[:_FINGERPRINT_DIGITS]


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SCHEMA_TEXT else f"{text[:_MAX_SCHEMA_TEXT]}..."


def _region(region: tuple[int, int] | None) -> str:
    return UNKNOWN if region is None else f"{region[1]} bytes at {region[0]}"
