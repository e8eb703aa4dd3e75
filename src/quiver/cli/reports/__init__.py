"""Descriptions as people read them: facts and tables, times and sizes spelled out."""

from __future__ import annotations

from functools import singledispatch

from quiver.cli.output import Report
from quiver.cli.reports.progress import progress_report
from quiver.cli.reports.segment import segment_report
from quiver.cli.reports.store import root_report, store_report
from quiver.cli.reports.wal import cursor_report, wal_report
from quiver.inspection import Description


@singledispatch
def report_on(description: Description) -> Report:
    """The report on any description."""
    raise NotImplementedError(type(description).__name__)


for _report in (
    wal_report,
    cursor_report,
    segment_report,
    progress_report,
    store_report,
    root_report,
):
    report_on.register(_report)
