"""``quiver inspect PATH``: what a file or a store directory holds, and what is damaged in it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_TABLE_LIMIT: Final = 20

DAMAGE_FOUND: Final = 1


class OutputFormat(enum.StrEnum):
    """How to show a result."""

    TABLE = "table"
    JSON = "json"


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A store directory, or a file out of one.", show_default=False
        ),
    ],
    *,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Tables, or one JSON document.")
    ] = OutputFormat.TABLE,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="List at most N of each kind; counts stay exact. "
            f"Default: {DEFAULT_TABLE_LIMIT} in tables, everything in JSON.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a file or a store directory holds, and what is damaged in it.

    What a file is, is told by its bytes, not by its name. Nothing is written.

    Beside a running store, the entry that is being appended may look torn.

    Exit codes: 0 all is well, 1 something is damaged, 2 wrong usage or unreadable.
    """
    # What draws and reads is loaded here: `quiver --help` needs neither.
    from quiver.cli.output import ConsoleOutput, JsonOutput, Output
    from quiver.cli.reports import report_on
    from quiver.disk import RealDisk
    from quiver.inspection import inspect_path

    out: Output = JsonOutput() if output is OutputFormat.JSON else ConsoleOutput()
    if limit is None and output is OutputFormat.TABLE:
        limit = DEFAULT_TABLE_LIMIT
    description = inspect_path(RealDisk(), path, limit=limit)
    out.show(description.to_json(), report_on(description))
    if not description.healthy:
        raise typer.Exit(DAMAGE_FOUND)
