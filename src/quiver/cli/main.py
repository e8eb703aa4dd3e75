"""The ``quiver`` command: what all of its commands have in common.

Exit codes are 0 when all is well, 1 when a command found damage, 2 when it was called wrongly or
could not read what it was given. An error that Quiver or the operating system raises on purpose is
one line that says what happened and what to do; only a defect of Quiver shows a traceback.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Annotated, Final, ParamSpec

import typer

from quiver import __version__
from quiver.cli import buffer as about_queues
from quiver.cli import dlq as about_dead_letters
from quiver.cli.bench import bench
from quiver.cli.demo import demo
from quiver.cli.inspect import inspect
from quiver.cli.keys import add, list_keys, revoke
from quiver.cli.run import run
from quiver.cli.subscribers import subscribers
from quiver.cli.validate import validate
from quiver.errors import FormatError, QuiverError

UNREADABLE: Final = 2

_P = ParamSpec("_P")

app = typer.Typer(
    name="quiver",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 something is damaged, 2 wrong usage or unreadable.",
)


@app.callback()
def _quiver(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Telemetry that is acknowledged only when it is durable."""
    if version:
        typer.echo(f"quiver {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def reporting(command: Callable[_P, None]) -> Callable[_P, None]:
    """Let a command end with one line instead of a traceback."""

    @functools.wraps(command)
    def reported(*args: _P.args, **kwargs: _P.kwargs) -> None:
        from quiver.cli.output import abandon_output, printable

        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            abandon_output()
        except (QuiverError, OSError) as error:
            typer.echo(f"error: {printable(explain(error))}", err=True)
            raise typer.Exit(UNREADABLE) from error

    return reported


def explain(error: QuiverError | OSError) -> str:
    """What happened, and what to do."""
    if isinstance(error, FormatError) and error.offset == 0:
        return f"{error.source}: {error.reason}"
    if not isinstance(error, OSError):
        return str(error)
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if isinstance(error, FileNotFoundError):
        return f"{what}; check the path"
    if isinstance(error, PermissionError):
        return f"{what}; run it as the user whose files these are, or be given access"
    return what


for _command in (run, validate, inspect, subscribers, bench, demo):
    app.command()(reporting(_command))

dead_letters = typer.Typer(no_args_is_help=True, help="What destinations refused for ever.")
for _name, _about_letters in about_dead_letters.COMMANDS.items():
    dead_letters.command(_name)(reporting(_about_letters))
app.add_typer(dead_letters, name="dlq")

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke the API keys of receivers.")
for _name, _about_keys in (("add", add), ("list", list_keys), ("revoke", revoke)):
    keys.command(_name)(reporting(_about_keys))
app.add_typer(keys, name="keys")

queues = typer.Typer(no_args_is_help=True, help="Look into a queue in object storage, and more.")
for _name, _about_queues in about_queues.COMMANDS.items():
    queues.command(_name)(reporting(_about_queues))
app.add_typer(queues, name="buffer")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal cannot show is no reason to stop.
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="quiver")


if __name__ == "__main__":
    main()
