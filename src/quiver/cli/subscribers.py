"""``quiver subscribers PATH``: who reads a store and how far behind; forget one that is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from quiver.cli.inspect import OutputFormat

if TYPE_CHECKING:  # what reads segments is loaded when the command runs
    from quiver.cli.output import Report
    from quiver.disk import Disk
    from quiver.inspection.store import StoreDescription, SubscriberFacts

_SECOND_NS: Final = 1_000_000_000


def subscribers(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A store directory, or the one with core_0 in it.",
            show_default=False,
        ),
    ],
    *,
    drop: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Forget this one, and let go of what it has not read, for good."
        ),
    ] = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="A table, or one JSON document.")
    ] = OutputFormat.TABLE,
) -> None:
    """List the subscribers of a store, and how far each is behind.

    One that is not in the configuration any more keeps its data pinned, because nobody can know
    whether it comes back. --drop forgets it; the pipeline must not be running meanwhile.
    """
    # What reads and draws is loaded here: `quiver --help` needs neither.
    from quiver.cli.output import ConsoleOutput, JsonOutput, Output, printable, write
    from quiver.disk import RealDisk

    disk = RealDisk()
    stores = _stores(disk, path)
    if drop is not None:
        dropped = _drop(stores, drop)
        write(f"{printable(drop)} is forgotten; it had not read {dropped} bundles.\n")
        return
    rows = [
        (store, facts, _lag(disk, Path(store.path), facts))
        for store in stores
        for facts in store.subscribers
    ]
    out: Output = JsonOutput() if output is OutputFormat.JSON else ConsoleOutput()
    document = {
        "subscribers": [
            {
                "store": store.path,
                "id": facts.id,
                "resolved": facts.resolved,
                "pending": facts.pending,
                "lag_seconds": lag,
            }
            for store, facts, lag in rows
        ]
    }
    out.show(document, _report(path, rows))


def _stores(disk: Disk, path: Path) -> list[StoreDescription]:
    from quiver.errors import InvalidConfig
    from quiver.inspection import inspect_path
    from quiver.inspection.store import RootDescription, StoreDescription

    found = inspect_path(disk, path, limit=None)
    if isinstance(found, StoreDescription):
        return [found]
    if isinstance(found, RootDescription):
        return list(found.stores)
    raise InvalidConfig(f"{path} is no store directory")


def _lag(disk: Disk, root: Path, facts: SubscriberFacts) -> float | None:
    """Seconds since the oldest bundle was ingested that it has not read; None when unknown."""
    from quiver.errors import FormatError
    from quiver.inspection.directory import SEGMENT_DIRECTORY
    from quiver.segment.layout import segment_sequence
    from quiver.segment.reader import SegmentReader
    from quiver.subscriber.progress import load_progress, progress_path

    if not facts.pending:
        return 0.0
    folder = root / SEGMENT_DIRECTORY
    try:
        progress = load_progress(disk, progress_path(root, facts.id))
        listed = {entry.segment: entry for entry in progress.entries}
        names = {segment_sequence(name): name for name in disk.list_directory(folder)}
        for number in sorted(number for number in names if number is not None):
            entry = listed.get(number)
            if entry is not None and entry.is_complete:
                continue
            manifest = SegmentReader.open(disk, folder / names[number]).manifest
            for bundle in range(len(manifest)):
                if entry is None or not entry.is_resolved(bundle):
                    ingested = manifest.ingestion_time_ns(bundle)
                    return None if ingested is None else (time.time_ns() - ingested) / _SECOND_NS
    except (FormatError, FileNotFoundError):
        pass  # the running store has moved on
    return None


def _drop(stores: list[StoreDescription], name: str) -> int:
    from quiver.config import RetentionConfig, StoreConfig
    from quiver.errors import SubscriberNotFound
    from quiver.store.store import Store

    there = [store for store in stores if any(facts.id == name for facts in store.subscribers)]
    if not there:
        raise SubscriberNotFound(f"there is no subscriber {name!r}; see quiver subscribers")
    # With all of them open, nobody else is at work: all forget it, or none.
    config = StoreConfig(retention=RetentionConfig(min_free_space=0))
    opened: list[Store] = []
    dropped = 0
    try:
        opened.extend(Store.open(store.path, config) for store in there)
        for store in opened:
            store.activate()
            dropped += store.drop_orphan(name)
    finally:
        for store in opened:
            store.close()
    return dropped


def _report(
    path: Path, rows: list[tuple[StoreDescription, SubscriberFacts, float | None]]
) -> Report:
    from quiver.cli.output import UNKNOWN, Column, Report, Section
    from quiver.cli.reports.common import plural

    table = tuple(
        (
            Path(store.path).name,
            facts.id,
            str(facts.resolved),
            str(facts.pending),
            UNKNOWN if lag is None else f"{lag:.1f} s",
        )
        for store, facts, lag in rows
    )
    columns = (
        Column("store"),
        Column("subscriber"),
        Column("resolved", right=True),
        Column("pending", right=True),
        Column("lag", right=True),
    )
    pending = sum(facts.pending for _, facts, _ in rows)
    return Report(
        title="Subscribers",
        subject=str(path),
        facts=(),
        sections=(Section(title="Subscribers", columns=columns, rows=table, total=len(table)),),
        verdict=f"{plural(len(rows), 'subscriber')}, {plural(pending, 'bundle')} pending",
    )
