"""Reports on store directories, and on roots that have several."""

from __future__ import annotations

from collections.abc import Iterable

from quiver.cli.output import Column, Report, Section, humanised, number_text, size_text
from quiver.cli.reports.common import CHECKSUM, damage_section, listed_problems, plural, verdict
from quiver.inspection import RootDescription, StoreDescription


def store_report(store: StoreDescription) -> Report:
    """Totals, then log, segments and subscribers."""
    cursor = "none" if store.cursor is None else str(store.cursor)
    items = "" if store.items is None else f", {store.items} items"
    facts = [
        ("log", f"{plural(store.wal_count, 'file')}, {size_text(store.wal_bytes)}"),
        ("entries", f"{store.wal_entries}, {store.entries_past_cursor} past the cursor"),
        ("cursor", cursor),
        ("segments", f"{store.segment_count}, {size_text(store.segment_bytes)}"),
        ("in segments", f"{plural(store.bundles, 'bundle')}, {store.rows} rows{items}"),
        ("subscribers", str(store.subscriber_count)),
    ]
    if store.store_id is not None:
        facts.insert(0, ("store", store.store_id))
    facts += [(f"lost, {reason}", str(count)) for reason, count in store.losses.items()]
    if store.quarantined_files:
        quarantined = f"{plural(store.quarantined_files, 'file')}"
        facts.append(("quarantined", f"{quarantined}, {size_text(store.quarantined_bytes)}"))
    return Report(
        title="Store",
        subject=store.path,
        facts=tuple(facts),
        sections=(
            *_store_sections(store),
            *damage_section(listed_problems(store.problems), store.problem_count),
        ),
        verdict=verdict(store, store.problem_count),
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
                CHECKSUM[segment.checksum_verified],
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


def root_report(root: RootDescription) -> Report:
    """A row per store."""
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
        sections=(section, *damage_section(problems, count)),
        verdict=verdict(root, count),
        alarming=not root.healthy,
    )
