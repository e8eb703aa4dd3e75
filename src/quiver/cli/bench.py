"""``quiver bench NAME``: run a benchmark and show its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from quiver.bench import BENCHMARKS
from quiver.bench.measure import (
    MEMORY_FILE_SYSTEMS,
    Benchmark,
    Plan,
    Results,
    Tick,
    file_system_type,
    scratch_directory,
)
from quiver.disk import RealDisk

DEFAULT_DIRECTORY: Final = Path("quiver_bench")

_NAMES: Final = ", ".join(sorted(BENCHMARKS))
_PLAN: Final = Plan()


def bench(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=f"Which one: {_NAMES}.", show_default=False)
    ],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One line of JSON on standard output, no table.")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="How often to measure; the best time counts.")
    ] = _PLAN.rounds,
    megabytes: Annotated[
        int, typer.Option(min=1, max=2_000, metavar="N", help="Size of each file measured.")
    ] = _PLAN.megabytes,
    directory: Annotated[
        Path,
        typer.Option(file_okay=False, help="Where to write: a directory that is new, or empty."),
    ] = DEFAULT_DIRECTORY,
) -> None:
    """Measure what Quiver costs on this machine, beside plain reading and writing.

    The files of the measurement are removed at the end.
    """
    benchmark = _find(name)
    plan = Plan(rounds, megabytes)
    disk = RealDisk()
    with scratch_directory(disk, directory, benchmark.count_bytes(plan)):
        _warn_about_memory(directory)
        with _progress_bar(benchmark, plan) as tick:
            results = benchmark.run(disk, directory, plan, tick)
    if as_json:
        typer.echo(json.dumps(results.figures))
    else:
        _show(benchmark, results, directory)


def _find(name: str) -> Benchmark:
    try:
        return BENCHMARKS[name]
    except KeyError:
        message = f"there is no benchmark {name!r}; there are: {_NAMES}"
        raise typer.BadParameter(message, param_hint="NAME") from None


def _warn_about_memory(directory: Path) -> None:
    kind = file_system_type(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        typer.echo(
            f"warning: {directory} is in memory ({kind}): figures of writing say nothing about "
            "a disk; choose another with --directory",
            err=True,
        )


@contextmanager
def _progress_bar(benchmark: Benchmark, plan: Plan) -> Iterator[Tick]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeRemainingColumn())
    # Drawn between measurements only: a thread that redraws would disturb them.
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("making bundles", total=benchmark.count_ticks(plan) + 1)
        yield lambda label: progress.update(task, advance=1, description=label, refresh=True)


def _show(benchmark: Benchmark, results: Results, directory: Path) -> None:
    from quiver.cli.output import Column, ConsoleOutput, Report, Section

    figures, table = results
    first, *others = table.columns
    ConsoleOutput().show(
        figures,
        Report(
            title=f"Benchmark {benchmark.name}",
            subject=str(directory),
            facts=tuple((fact, str(figures[fact])) for fact in benchmark.facts),
            sections=(
                Section(
                    title=table.title,
                    columns=(Column(first), *(Column(name, right=True) for name in others)),
                    rows=table.rows,
                    total=len(table.rows),
                ),
            ),
            verdict="Speed to plain: 1.00 is as fast as a plain read or write of the same bytes.",
        ),
    )
