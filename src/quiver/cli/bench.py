"""``quiver bench NAME``: run a benchmark and show its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from quiver.bench import BENCHMARKS
from quiver.bench.measure import (
    MEMORY_FILE_SYSTEMS,
    Benchmark,
    Plan,
    Table,
    Tick,
    file_system_type,
    scratch_directory,
)
from quiver.disk import RealDisk
from quiver.errors import QuiverError

DEFAULT_DIRECTORY: Final = Path("quiver_bench")

_NAMES: Final = ", ".join(sorted(BENCHMARKS))


def bench(
    name: Annotated[str, typer.Argument(help=f"Which benchmark: {_NAMES}.", metavar="NAME")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on the last line, and no table.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often to measure; the best time counts.")
    ] = Plan().rounds,
    directory: Annotated[
        Path | None,
        typer.Option(
            help=f"Where to write: an empty or a new directory. Default: ./{DEFAULT_DIRECTORY}.",
            file_okay=False,
        ),
    ] = None,
    megabytes: Annotated[
        int, typer.Option(min=1, max=10_000, help="Size of the files that are measured.")
    ] = Plan().megabytes,
) -> None:
    """Measure what Quiver costs on this machine, beside plain reading and writing."""
    benchmark = _find(name)
    plan = Plan(rounds, megabytes)
    errors = Console(stderr=True)
    disk = RealDisk()
    place = directory or DEFAULT_DIRECTORY
    try:
        with (
            scratch_directory(disk, place, benchmark.count_bytes(plan)),
            _progress(errors, benchmark, plan) as tick,
        ):
            _warn_about_memory(errors, place)
            report = benchmark.run(disk, place, plan, tick)
    except (QuiverError, OSError) as error:
        errors.print(f"quiver bench: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(report.figures))
    else:
        Console().print(_rendered(report.table))


def _find(name: str) -> Benchmark:
    try:
        return BENCHMARKS[name]
    except KeyError:
        raise typer.BadParameter(
            f"there is no benchmark {name!r}; there are: {_NAMES}", param_hint="NAME"
        ) from None


@contextmanager
def _progress(console: Console, benchmark: Benchmark, plan: Plan) -> Iterator[Tick]:
    """A bar on a terminal; nothing where the output goes to a file."""
    columns = (TextColumn("{task.description:<22}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("preparing", total=benchmark.count_ticks(plan) + 1)

        def tick(label: str) -> None:
            # Drawn between two measurements, not in one: there is no thread that redraws.
            progress.update(task, advance=1, description=label, refresh=True)

        yield tick


def _warn_about_memory(console: Console, directory: Path) -> None:
    kind = file_system_type(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        console.print(
            f"quiver bench: {directory} is in memory ({kind}); figures of writing and syncing say "
            "nothing about a disk. Choose another with --directory.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _rendered(table: Table) -> RichTable:
    rendered = RichTable(title=table.title, title_justify="left")
    first, *others = table.columns
    rendered.add_column(first, no_wrap=True)
    for column in others:
        rendered.add_column(column, justify="right", no_wrap=True)
    for row in table.rows:
        rendered.add_row(*row)
    return rendered
