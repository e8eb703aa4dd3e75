"""``quiver keys``: make, list and revoke the API keys of receivers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from quiver.cli.inspect import OutputFormat

DEFAULT_FILE: Final = Path("quiver_keys.json")

KeysFile = Annotated[
    Path,
    typer.Option("--file", "-f", dir_okay=False, help="What keys_file of a receiver names."),
]


def add(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Who will use it.", show_default=False)
    ],
    *,
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """Make a key, and show it: only its hash is kept, so it cannot be shown again.

    A running receiver knows it within its reload_interval. The key alone goes to standard output.
    """
    # What reads and draws is loaded here: `quiver --help` needs neither.
    from quiver.cli.output import printable, write
    from quiver.disk import RealDisk
    from quiver.pipeline.security.keys import add_key

    key, text = add_key(RealDisk(), file, name)
    typer.echo(f"Key {key.id} for {printable(key.name)}; keep it, it is shown only once:", err=True)
    write(f"{text}\n")


def list_keys(
    *,
    file: KeysFile = DEFAULT_FILE,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="A table, or one JSON document.")
    ] = OutputFormat.TABLE,
) -> None:
    """List the keys: ids and names, when they were made and revoked. Not the keys themselves."""
    from quiver.cli.output import (
        UNKNOWN,
        Column,
        ConsoleOutput,
        JsonOutput,
        Output,
        Report,
        Section,
    )
    from quiver.disk import RealDisk
    from quiver.pipeline.security.keys import read_keys

    keys = sorted(read_keys(RealDisk(), file).values(), key=lambda key: (key.created, key.id))
    out: Output = JsonOutput() if output is OutputFormat.JSON else ConsoleOutput()
    document = {
        "keys": [
            {"id": key.id, "name": key.name, "created": key.created, "revoked": key.revoked}
            for key in keys
        ]
    }
    section = Section(
        title="Keys",
        columns=(Column("id"), Column("name"), Column("created"), Column("revoked")),
        rows=tuple((key.id, key.name, key.created, key.revoked or UNKNOWN) for key in keys),
        total=len(keys),
    )
    in_force = sum(key.revoked is None for key in keys)
    report = Report(
        title="API keys",
        subject=str(file),
        facts=(),
        sections=(section,),
        verdict=f"{in_force} of {len(keys)} in force",
    )
    out.show(document, report)


def revoke(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="As quiver keys list shows it.", show_default=False)
    ],
    *,
    file: KeysFile = DEFAULT_FILE,
) -> None:
    """End a key. Running receivers refuse it within their reload_interval."""
    from quiver.cli.output import printable, write
    from quiver.disk import RealDisk
    from quiver.pipeline.security.keys import revoke_key

    key = revoke_key(RealDisk(), file, key_id)
    write(f"Key {key.id} for {printable(key.name)} is revoked since {key.revoked}.\n")
