"""``quiver keys``: the key is shown once, the list shows none."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from quiver.cli.main import app
from quiver.pipeline.security.keys import KeyRing
from quiver.pipeline.settings.options import AuthOptions


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_a_key_that_was_added_is_taken_until_it_is_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    added = run("add", "checkout", "--file", file)
    assert added.exit_code == 0
    text = added.stdout.strip()
    assert text.startswith("qk_")
    assert "shown only once" in added.stderr
    keys = KeyRing(AuthOptions(keys_file=Path(file)))
    keys.load()
    key_id = keys.identify({"x-api-key": text}.get)

    listed = run("list", "-f", file)
    assert "checkout" in listed.stdout
    assert key_id in listed.stdout
    assert "1 of 1 in force" in listed.stdout
    assert text.rpartition("_")[2] not in listed.stdout

    revoked = run("revoke", key_id, "-f", file)
    assert (revoked.exit_code, revoked.stderr) == (0, "")
    assert key_id in revoked.stdout
    document = json.loads(run("list", "-f", file, "-o", "json").stdout)
    (entry,) = document["keys"]
    assert set(entry) == {"id", "name", "created", "revoked"}
    assert (entry["id"], entry["name"]) == (key_id, "checkout")
    assert entry["revoked"] >= entry["created"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    for arguments in (("list",), ("revoke", "x"), ("add", "")):
        result = run(*arguments, "-f", file)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("add", "list", "revoke"):
        assert f" {command} " in result.stdout
