"""What ``quiver demo`` does, step by step, each with a report.

Bundles are written to a log and synced. The writer is abandoned in the middle of an append, as by a
power cut. The log is opened again and gives back what was synced; that becomes a segment, which is
read through a memory map. What came back is compared with what went in, twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import pyarrow as pa
from rich.console import Console
from rich.progress import track

from quiver.bundle import Payload, RecordBundle, Slot, slot_name
from quiver.cli.demo_data import make_bundles
from quiver.cli.output import Column, Report, Section, humanised
from quiver.disk import Disk, publish
from quiver.errors import FormatError, InvalidConfig
from quiver.segment.layout import segment_file_name
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.wal.entry import prepare_entry
from quiver.wal.files import ACTIVE_NAME
from quiver.wal.recovery import QUARANTINE_NAME
from quiver.wal.replay import ReplayedEntry
from quiver.wal.writer import WalWriter

BUNDLE_COUNT: Final = 240
MARKER_NAME: Final = "quiver_demo.txt"

_MARKER_TEXT = b"Made by `quiver demo`. The next run in this directory replaces it all.\n"
_GROUP_SIZE = 8
_SAMPLE_SIZE = 5
_FINGERPRINT_DIGITS = 8
_T = TypeVar("_T")


class Demo:
    """One run in a directory that is new, empty, or an earlier demo's."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._store = directory / "store"
        self._wal = self._store / "wal"
        self._segment = self._store / "segments" / segment_file_name(0)
        self._take(directory)

    @property
    def worth_a_look(self) -> tuple[Path, ...]:
        """What to inspect afterwards."""
        return self._store, self._wal / ACTIVE_NAME, self._segment

    def steps(self, seed: int) -> Iterator[Report]:
        """A report after each step. An alarming one, about what is not equal, is the last."""
        bundles = list(_with_bar(make_bundles(seed, BUNDLE_COUNT), "making bundles", BUNDLE_COUNT))
        try:
            yield self._write_log(bundles)
            self._crash(bundles[0])
            writer, replayed, report = self._replay_log(bundles)
            with closing(writer):
                yield report
                if report.alarming:
                    return
                yield self._make_segment(replayed)
                writer.advance_cursor(writer.end_position)  # the segment holds it all
            yield self._read_segment(bundles)
        except FormatError as error:
            yield _failure(error)

    def _take(self, directory: Path) -> None:
        """Make the directory ours and remove what an earlier demo left in it."""
        disk = self._disk
        disk.make_directory(directory)
        names = disk.list_directory(directory)
        if names and MARKER_NAME not in names:
            raise InvalidConfig(
                f"{directory} is not empty, and not from an earlier demo; "
                "choose another with --directory, or empty this one"
            )
        publish(disk, directory / MARKER_NAME, [_MARKER_TEXT])
        for folder in (self._wal, self._wal / QUARANTINE_NAME, self._segment.parent):
            disk.make_directory(folder)
            for path in [folder / name for name in disk.list_directory(folder)]:
                if path.is_file():
                    disk.unlink(path)

    def _write_log(self, bundles: Sequence[RecordBundle]) -> Report:
        writer = WalWriter.open(self._disk, self._wal)
        starts = range(0, len(bundles), _GROUP_SIZE)
        for start in _with_bar(starts, "writing the log", len(starts)):
            group = bundles[start : start + _GROUP_SIZE]
            writer.append([prepare_entry(bundle) for bundle in group])
            writer.sync()
        # It is not closed: a crash does not do that either.
        records = sum(bundle.item_count or 0 for bundle in bundles)
        return Report(
            title="1. Written to the log, and synced",
            subject=str(self._wal / ACTIVE_NAME),
            facts=(
                ("bundles", f"{len(bundles)}, with {records} log records and spans"),
                ("size", humanised(writer.size)),
                ("syncs", str(len(starts))),
            ),
            sections=(_rows_by_slot("What went in", bundles),),
            verdict="From here on, it must not get lost.",
        )

    def _crash(self, bundle: RecordBundle) -> None:
        """Leave what a power cut leaves: half of an entry that was being appended."""
        entry = b"".join(prepare_entry(bundle).seal(BUNDLE_COUNT))
        file = self._disk.open_append(self._wal / ACTIVE_NAME)
        file.append([entry[: len(entry) // 2]])
        file.close()

    def _replay_log(
        self, expected: Sequence[RecordBundle]
    ) -> tuple[WalWriter, list[ReplayedEntry], Report]:
        replayed: list[ReplayedEntry] = []
        writer = WalWriter.open(self._disk, self._wal, on_entry=replayed.append)
        recovery = writer.recovery
        bundles = [item.entry.bundle() for item in replayed]
        report = Report(
            title="2. Crashed in the middle of an append, and opened again",
            subject=str(self._wal / ACTIVE_NAME),
            facts=(
                ("replayed", f"{len(replayed)} bundles, {humanised(recovery.replayed_bytes)}"),
                ("torn append", f"{recovery.cut_bytes} bytes cut off, never acknowledged"),
                ("damaged", f"{len(recovery.damaged)} places"),
                ("next sequence", str(writer.next_sequence)),
            ),
            sections=(_rows_by_slot("What came back", bundles),),
            **_verdict(expected, bundles),
        )
        return writer, replayed, report

    def _make_segment(self, replayed: Iterable[ReplayedEntry]) -> Report:
        segment = OpenSegment()
        for item in replayed:
            segment.append(item.entry.bundle(), item.entry.sequence)
        size = write_segment(self._disk, self._segment, segment)
        streams = SegmentReader.open(self._disk, self._segment).streams
        table = [
            (
                slot_name(stream.slot_id),
                stream.schema_fingerprint.hex()[:_FINGERPRINT_DIGITS],
                str(stream.chunk_count),
                str(stream.row_count),
                humanised(stream.byte_length),
            )
            for stream in streams
        ]
        columns = ("slot", "schema", "batches", "rows", "size")
        return Report(
            title="3. Turned into a segment",
            subject=str(self._segment),
            facts=(("bundles", str(segment.bundle_count)), ("size", humanised(size))),
            sections=(_section("Streams, one for each slot and schema", columns, table, right=2),),
            verdict="The log may go now: the cursor is moved behind it.",
        )

    def _read_segment(self, expected: Sequence[RecordBundle]) -> Report:
        reader = SegmentReader.open(self._disk, self._segment)
        indexes = range(reader.bundle_count)
        bundles = [reader.bundle(i) for i in _with_bar(indexes, "reading", len(indexes))]
        return Report(
            title="4. Read through a memory map",
            subject=str(self._segment),
            facts=(("bundles", str(len(bundles))),),
            sections=(_rows_by_slot("What is in it", bundles), _first_records(bundles)),
            **_verdict(expected, bundles),
        )


# --- comparing ---------------------------------------------------------------------------------


def differences(expected: Sequence[RecordBundle], found: Sequence[RecordBundle]) -> Iterator[str]:
    """What is not the same. Item counts do not take part: the log does not keep them."""
    if len(expected) != len(found):
        yield f"{len(expected)} bundles went in and {len(found)} came back"
        return
    for i, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.ingestion_time_ns != other.ingestion_time_ns:
            yield f"bundle {i} has another ingestion time"
        if list(one.payloads) != list(other.payloads):
            yield f"bundle {i} has other slots"
            continue
        for slot, payload in one.payloads.items():
            if payload.fingerprint != other.payloads[slot].fingerprint:
                yield f"bundle {i} has another fingerprint in {slot_name(slot)}"
            if not _same_rows(payload.batch, other.payloads[slot].batch):
                yield f"bundle {i} has other rows in {slot_name(slot)}"


def _same_rows(one: pa.RecordBatch, other: pa.RecordBatch) -> bool:
    """Equal schemas and values; the dictionaries behind the values may differ."""
    return one.schema.equals(other.schema, check_metadata=True) and all(
        _without_dictionary(a).equals(_without_dictionary(b)) or a.to_pylist() == b.to_pylist()
        for a, b in zip(one.columns, other.columns, strict=True)
    )


def _without_dictionary(column: pa.Array[Any]) -> pa.Array[Any]:
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


# --- showing -----------------------------------------------------------------------------------


def _verdict(expected: Sequence[RecordBundle], found: Sequence[RecordBundle]) -> dict[str, Any]:
    first = next(differences(expected, found), None)
    if first is None:
        return {"verdict": "Everything is equal to what went in."}
    return {"verdict": f"NOT EQUAL to what went in: {first}.", "alarming": True}


def _failure(error: FormatError) -> Report:
    return Report(
        title="Not readable",
        subject=error.source,
        facts=(("byte", str(error.offset)), ("reason", error.reason)),
        sections=(),
        verdict="NOT EQUAL to what went in: the file is damaged.",
        alarming=True,
    )


def _rows_by_slot(title: str, bundles: Iterable[RecordBundle]) -> Section:
    payloads: dict[int, list[Payload]] = {}
    for bundle in bundles:
        for slot, payload in bundle.payloads.items():
            payloads.setdefault(slot, []).append(payload)
    rows = [
        (
            slot_name(slot),
            str(len({payload.fingerprint for payload in group})),
            str(len(group)),
            str(sum(payload.batch.num_rows for payload in group)),
        )
        for slot, group in sorted(payloads.items())
    ]
    return _section(title, ("slot", "schemas", "batches", "rows"), rows, right=1)


def _first_records(bundles: Sequence[RecordBundle]) -> Section:
    logs = bundles[0].payloads[Slot.LOGS].batch.slice(0, _SAMPLE_SIZE)
    body = cast("pa.StructArray", logs.column("body")).field("str")
    columns = [
        _without_dictionary(column).cast(pa.string()).to_pylist()
        for column in (logs.column("time_unix_nano"), logs.column("severity_text"), body)
    ]
    rows = [tuple(value or "" for value in row) for row in zip(*columns, strict=True)]
    return _section("Its first log records", ("time", "severity", "body"), rows, right=3)


def _section(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], *, right: int
) -> Section:
    """A table whose columns from ``right`` on hold numbers."""
    heads = tuple(Column(name, right=i >= right) for i, name in enumerate(columns))
    return Section(title=title, columns=heads, rows=tuple(rows), total=len(rows))


def _with_bar(items: Iterable[_T], label: str, total: int) -> Iterable[_T]:
    """The same items, with a bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True)
    return track(
        items, label, total, console=console, transient=True, disable=not console.is_terminal
    )
