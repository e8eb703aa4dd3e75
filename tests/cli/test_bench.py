"""``quiver bench``: what is printed where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiver.cli import bench
from quiver.cli.main import app

TINY = ("--rounds", "1", "--megabytes", "1")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_last_line_is_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "formats", "--json", *TINY])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    figures = json.loads(lines[-1])
    assert figures["benchmark"] == "formats"
    assert figures["rounds"] == 1
    assert not any(line.startswith("{") for line in lines[:-1])
    assert list((tmp_path / bench.DEFAULT_DIRECTORY).iterdir()) == []


def test_a_table_is_printed_without_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "formats", "--directory", str(tmp_path / "there"), *TINY]
    )
    assert result.exit_code == 0, result.output
    for text in ("1,000 rows", "mix", "encode and append it", "replay", "segment write"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout
    assert not (tmp_path / bench.DEFAULT_DIRECTORY).exists()


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    result = CliRunner().invoke(app, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "there is no benchmark 'nothing'" in result.stderr
    assert "formats" in result.stderr
    assert list(Path().iterdir()) == []


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    result = CliRunner().invoke(app, ["bench", "formats", "--directory", str(tmp_path), *TINY])
    assert result.exit_code == 2
    assert "is not empty" in result.stderr
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_directory_in_memory_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "file_system_type", lambda path: "tmpfs")
    result = CliRunner().invoke(app, ["bench", "formats", "--json", *TINY])
    assert result.exit_code == 0
    assert "is in memory (tmpfs)" in result.stderr
    assert json.loads(result.stdout)
