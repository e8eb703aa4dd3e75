"""``quiver demo``: the way of the data through the files, with a crash on the way."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_DIRECTORY: Final = Path("quiver_demo")
DEFAULT_SEED: Final = 1

NOT_EQUAL: Final = 1


def demo(
    *,
    directory: Annotated[
        Path,
        typer.Option(file_okay=False, help="Where to write: new, empty, or an earlier demo's."),
    ] = DEFAULT_DIRECTORY,
    seed: Annotated[
        int, typer.Option(metavar="N", help="What the data is made from; the same makes the same.")
    ] = DEFAULT_SEED,
) -> None:
    """Write telemetry, crash, recover, and compare what comes back with what went in.

    Exit codes: 0 all is equal, 1 something is not, 2 wrong usage or unreadable.
    """
    # What draws is loaded here: `quiver --help` does not need it.
    from quiver.cli.demo_steps import Demo
    from quiver.cli.output import ConsoleOutput, printable, write
    from quiver.disk import RealDisk

    show = Demo(RealDisk(), directory)
    write(f"Data made from seed {seed}.\n\n")
    out = ConsoleOutput()
    healthy = True
    for report in show.steps(seed):
        out.show({}, report)
        write("\n")
        healthy = healthy and not report.alarming
    if not healthy:
        raise typer.Exit(NOT_EQUAL)
    write("Look closer:\n")
    for path in show.worth_a_look:
        write(f"  {_this_program()} inspect {shlex.quote(printable(str(path)))}\n")


def _this_program() -> str:
    """How to call ``quiver`` again: by its name where the shell finds it, else as it was called."""
    called = Path(sys.argv[0])
    on_path = any((Path(p) / "quiver").exists() for p in os.get_exec_path())
    return "quiver" if on_path or called.name != "quiver" else shlex.quote(str(called))
