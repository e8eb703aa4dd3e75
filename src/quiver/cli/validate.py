"""``quiver validate [-c FILE]``: what a configuration means, or all that is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quiver.cli.inspect import OutputFormat

if TYPE_CHECKING:  # what reads YAML is loaded when the command runs
    from quiver.cli.output import Report
    from quiver.pipeline.settings.load import NodeSpec, Settings
    from quiver.pipeline.settings.mistakes import Mistake

MISTAKES_FOUND: Final = 1

_DETAILS: Final = ("listening_addr", "path", "grpc_endpoint", "http_endpoint", "url", "subscriber")


def validate(
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
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Tables, or one JSON document.")
    ] = OutputFormat.TABLE,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a configuration instead.")
    ] = False,
) -> None:
    """Check a configuration file, and show what it means.

    Every mistake is one line, with its place in the file and what may have been meant.

    Exit codes: 0 all is well, 1 the file has mistakes, 2 wrong usage or unreadable.
    """
    from quiver.cli.output import ConsoleOutput, JsonOutput, Output, printable, write
    from quiver.pipeline.settings.load import InvalidSettings, default_settings, read_settings
    from quiver.pipeline.settings.schema import json_schema

    if schema:
        write(json.dumps(json_schema(), indent=2) + "\n")
        return
    out: Output = JsonOutput() if output is OutputFormat.JSON else ConsoleOutput()
    given = parse_variables(variables or [])
    try:
        if config is None:
            settings = default_settings()
        else:
            settings = read_settings(config, environment=os.environ, variables=given)
    except InvalidSettings as error:
        found = [*error.mistakes, *error.warnings]
        if output is OutputFormat.JSON:
            write(json.dumps(_document(str(config), found, ()), indent=2) + "\n")
        else:
            write("".join(f"{printable(str(mistake))}\n" for mistake in found))
        raise typer.Exit(MISTAKES_FOUND) from error
    if output is OutputFormat.TABLE:
        write("".join(f"{printable(str(warning))}\n" for warning in settings.warnings))
    nodes = tuple(settings.nodes.values())
    out.show(_document(settings.source, settings.warnings, nodes), _report(settings))


def parse_variables(given: list[str]) -> dict[str, str]:
    """``--set`` as a mapping."""
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        variables[name] = value
    return variables


def _document(
    source: str, found: tuple[Mistake, ...] | list[Mistake], nodes: tuple[NodeSpec, ...]
) -> dict[str, Any]:
    return {
        "source": source,
        "valid": all(mistake.warning for mistake in found),
        "mistakes": [
            {
                "line": mistake.place.line,
                "column": mistake.place.column,
                "message": mistake.message,
                "hint": mistake.hint,
                "warning": mistake.warning,
            }
            for mistake in found
        ],
        "nodes": [
            {
                "name": node.name,
                "kind": str(node.kind),
                "plugin": node.plugin,
                "destinations": list(node.destinations),
                "line": node.where.line,
            }
            for node in nodes
        ],
    }


def _report(settings: Settings) -> Report:
    from quiver.cli.output import UNKNOWN, Column, Report, Section
    from quiver.cli.reports.common import plural

    rows = tuple(
        (
            node.name,
            f"{node.kind}:{node.plugin}",
            _detail(node.options) or UNKNOWN,
            _ways(node) or UNKNOWN,
        )
        for node in settings.nodes.values()
    )
    columns = (Column("node"), Column("type"), Column("where"), Column("leads to"))
    cores = settings.process.cores
    warnings = len(settings.warnings)
    return Report(
        title="Pipeline",
        subject=settings.source,
        facts=(
            ("cores", "auto" if cores is None else str(cores)),
            ("admin", settings.process.admin.listening_addr),
        ),
        sections=(Section(title="Nodes", columns=columns, rows=rows, total=len(rows)),),
        verdict=f"The configuration is valid, with {plural(warnings, 'warning')}."
        if warnings
        else "The configuration is valid.",
    )


def _detail(options: object) -> str:
    return next((str(value) for name in _DETAILS if (value := getattr(options, name, None))), "")


def _ways(node: NodeSpec) -> str:
    """A store hands everything to each of its destinations, whatever the port says."""
    names = ", ".join(node.destinations)
    if len(node.destinations) < 2 or node.plugin == "persistence":  # noqa: PLR2004 - no choice
        return names
    return f"{names} ({', '.join(sorted({str(port.dispatch) for port in node.ports.values()}))})"
