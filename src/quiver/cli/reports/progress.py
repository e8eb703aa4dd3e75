"""Reports on progress files."""

from __future__ import annotations

from quiver.cli.output import UNKNOWN, Column, Report, Section
from quiver.cli.reports.common import damage_section, file_facts, problem_rows, verdict
from quiver.inspection import ProgressDescription

_MAX_BITMAP_BITS = 64


def progress_report(progress: ProgressDescription) -> Report:
    """Flags and counts, then a row per segment."""
    names = f" ({', '.join(progress.flag_names)})" if progress.flag_names else ""
    return Report(
        title="Progress file",
        subject=progress.path,
        facts=(
            *file_facts(progress),
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
            *damage_section(problem_rows("file", progress.problem), not progress.healthy),
        ),
        verdict=verdict(progress, not progress.healthy),
        alarming=not progress.healthy,
    )


def _bitmap(words: tuple[int, ...], bundles: int) -> str:
    """One character per bundle, for as many as one line takes."""
    first = words[0] if words else 0
    shown = min(bundles, _MAX_BITMAP_BITS)
    dots = "".join("#" if first >> i & 1 else "." for i in range(shown))
    return dots + ("..." if bundles > shown else "")
