"""``quiver dlq``: items that a destination refused for ever, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quiver.cli.inspect import OutputFormat

if TYPE_CHECKING:  # what reads segments is loaded when a command runs
    from quiver.bundle import RecordBundle
    from quiver.pipeline.dead_letters import DeadLetter, DeadLetters

StorePath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A store directory, or the one with core_0 in it.", show_default=False
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="As quiver dlq list shows them.", show_default=False),
]
Destination = Annotated[
    str | None, typer.Option("--destination", "-d", help="Only those that this one refused.")
]
All = Annotated[bool, typer.Option("--all", help="All of them, instead of names.")]


def list_letters(
    path: StorePath,
    *,
    destination: Destination = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="A table, or one JSON document.")
    ] = OutputFormat.TABLE,
) -> None:
    """List the items that destinations refused for ever, with the reasons. Oldest first."""
    # What reads and draws is loaded here: `quiver --help` needs neither.
    from quiver.cli.output import (
        UNKNOWN,
        Column,
        ConsoleOutput,
        JsonOutput,
        Output,
        Report,
        Section,
        humanised,
        number_text,
        time_text,
    )

    found = [letter for _, letter in _letters(path, destination)]
    rows = tuple(
        (
            letter.name,
            letter.destination,
            time_text(letter.refused_ms * 1_000_000),
            letter.signal or UNKNOWN,
            number_text(letter.items),
            humanised(letter.size),
            "yes" if letter.again else UNKNOWN,
            letter.reason,
        )
        for letter in found
    )
    columns = (
        Column("name"),
        Column("destination"),
        Column("refused"),
        Column("signal"),
        Column("items", right=True),
        Column("size", right=True),
        Column("again", optional=True),
        Column("reason"),
    )
    report = Report(
        title="Dead letters",
        subject=str(path),
        facts=(),
        sections=(Section(title="Items", columns=columns, rows=rows, total=len(rows)),),
        verdict=f"{len(found)} refused, {humanised(sum(letter.size for letter in found))}",
        alarming=bool(found),
    )
    out: Output = JsonOutput() if output is OutputFormat.JSON else ConsoleOutput()
    out.show({"letters": [_facts(letter) for letter in found]}, report)


def show(
    path: StorePath,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="As quiver dlq list shows it.", show_default=False)
    ],
) -> None:
    """Show one item: why it was refused, and what it holds, as one JSON document."""
    from quiver.cli.output import write

    ((letters, letter),) = _chosen(path, [name], None, everything=False)
    document = {**_facts(letter), **_content(letters.bundle(letter))}
    write(json.dumps(document, indent=2) + "\n")


def replay(
    path: StorePath,
    names: Names = None,
    *,
    destination: Destination = None,
    everything: All = False,
) -> None:
    """Have the pipeline try items once more; the running one does so within seconds.

    What is taken then disappears from the list. What is refused again stays, with the new reason.
    """
    from quiver.cli.output import write

    chosen = _chosen(path, names, destination, everything=everything)
    for letters, letter in chosen:
        letters.ask_again(letter)
    write(f"{len(chosen)} will be tried again by the pipeline that has the store open.\n")


def drop(
    path: StorePath,
    names: Names = None,
    *,
    destination: Destination = None,
    everything: All = False,
) -> None:
    """Delete items for good."""
    from quiver.cli.output import write

    chosen = _chosen(path, names, destination, everything=everything)
    for letters, letter in chosen:
        letters.remove(letter)
    write(f"{len(chosen)} deleted.\n")


def _letters(path: Path, destination: str | None) -> list[tuple[DeadLetters, DeadLetter]]:
    """Those of the store at a path, or of all stores under it."""
    from quiver.disk import RealDisk
    from quiver.pipeline.dead_letters import DeadLetters
    from quiver.store.siblings import PREFIX

    disk = RealDisk()
    names = sorted(disk.list_directory(path))
    roots = [path, *(path / name for name in names if name.startswith(PREFIX))]
    found = []
    for root in roots:
        letters = DeadLetters(disk, root, 0)
        found += [(letters, letter) for letter in letters.list(destination)]
    return sorted(found, key=lambda each: each[1].name)


def _chosen(
    path: Path, names: list[str] | None, destination: str | None, *, everything: bool
) -> list[tuple[DeadLetters, DeadLetter]]:
    if everything == bool(names):
        raise typer.BadParameter("give names, or --all", param_hint="NAME")
    found = _letters(path, destination)
    if everything:
        return found
    by_name = {letter.name: (letters, letter) for letters, letter in found}
    missing = [name for name in names or () if name not in by_name]
    if missing:
        raise typer.BadParameter(
            f"there is no {missing[0]!r} under {path}; see quiver dlq list", param_hint="NAME"
        )
    return [by_name[name] for name in dict.fromkeys(names or ())]


def _facts(letter: DeadLetter) -> dict[str, Any]:
    return {
        "name": letter.name,
        "destination": letter.destination,
        "reason": letter.reason,
        "refused_ms": letter.refused_ms,
        "signal": letter.signal,
        "items": letter.items,
        "size": letter.size,
        "again": letter.again,
    }


def _content(bundle: RecordBundle) -> dict[str, Any]:
    """The telemetry: OTLP requests as JSON where that is possible, tables by their size."""
    from quiver.errors import QuiverError
    from quiver.otlp.json_text import to_json
    from quiver.pipeline.item import from_bundle

    try:
        item = from_bundle(bundle)
    except QuiverError as error:
        return {"unreadable": str(error)}
    requests: list[Any] = []
    for request in item.requests:
        try:
            requests.append(json.loads(to_json(item.signal, request)))
        except QuiverError as error:
            requests.append({"unreadable": str(error), "bytes": request.hex()})
    return {
        "received_ns": item.received_ns,
        "context": dict(item.context),
        "requests": requests,
        "tables": {slot.name: table.num_rows for slot, table in item.tables.items()},
    }


COMMANDS: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {"list": list_letters, "show": show, "replay": replay, "drop": drop}
)
