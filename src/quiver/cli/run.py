"""``quiver run [-c FILE]``: receive, store, deliver, until a signal comes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from quiver.cli.validate import parse_variables

if TYPE_CHECKING:  # what reads YAML is loaded when the command runs
    from quiver.pipeline.settings.load import Settings

UNUSABLE: Final = 2


def run(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="The configuration. Without: the defaults."
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="What {{NAME}} stands for in the file."),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto", help="How many processes, whatever the file says; auto: all cores."
        ),
    ] = None,
) -> None:
    """Run a pipeline: receive telemetry, acknowledge it when it is durable, deliver it.

    Without a file it listens for OTLP on 127.0.0.1:4317 (gRPC) and 127.0.0.1:4318 (HTTP), and
    stores under ./quiver_data.

    SIGTERM and SIGINT stop it in order; a second signal ends it at once. Nothing that was
    acknowledged is lost either way.

    Exit codes: 0 stopped in order, 1 something failed, 2 wrong usage or configuration.
    """
    # What runs is loaded here: `quiver --help` needs none of it.
    import asyncio

    from quiver.pipeline.supervisor import Supervisor
    from quiver.pipeline.worker import Launch, run_alone, start_logging

    given = parse_variables(variables or [])
    chosen = None if cores is None else parse_cores(cores)
    settings = _settings(config, given)
    count = chosen or settings.process.cores or usable_cores()
    if count == 1:
        start_logging()
        run_alone(settings)
        return
    _check_ports(settings, count)
    start_logging("supervisor")
    launch = Launch(
        source=settings.source,
        text=None if config is None else config.read_text("utf-8"),
        variables=given,
        cores=count,
    )
    code = asyncio.run(Supervisor(launch, settings.process).run())
    if code:
        raise typer.Exit(code)


def parse_cores(text: str) -> int:
    """``--cores`` as a number."""
    if text == "auto":
        return usable_cores()
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"{text!r} is neither auto nor above 0", param_hint="--cores")
    return int(text)


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not every system has it
        return os.cpu_count() or 1


def _check_ports(settings: Settings, count: int) -> None:
    """Each process would get a port of its own from the system, and nobody could know which."""
    from quiver.errors import InvalidConfig
    from quiver.pipeline.settings.options import ReceiverOptions

    for node in settings.nodes.values():
        if isinstance(node.options, ReceiverOptions) and not node.options.port:
            raise InvalidConfig(
                f"{node.where}: {node.name} listens on {node.options.listening_addr}: {count} "
                "processes need a port that is known, not 0"
            )


def _settings(config: Path | None, variables: dict[str, str]) -> Settings:
    """What the file says; all its mistakes, one a line, when it has any."""
    from quiver.cli.output import printable
    from quiver.pipeline.settings.load import InvalidSettings, default_settings, read_settings

    try:
        if config is None:
            settings = default_settings()
        else:
            settings = read_settings(config, environment=os.environ, variables=variables)
    except InvalidSettings as error:
        for mistake in (*error.mistakes, *error.warnings):
            typer.echo(printable(str(mistake)), err=True)
        raise typer.Exit(UNUSABLE) from error
    for warning in settings.warnings:
        typer.echo(printable(str(warning)), err=True)
    return settings
