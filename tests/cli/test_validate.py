"""``quiver validate`` as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from configurations import FIRST_FORM, graph
from typer.testing import CliRunner, Result

from quiver.cli.main import app
from quiver.pipeline.settings.schema import json_schema


def validate(*arguments: str | Path, **environment: str) -> Result:
    plain = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["validate", *map(str, arguments)], env={**plain, **environment})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.yaml"
    path.write_text(FIRST_FORM)
    return path


def test_a_good_file_is_shown_as_a_graph(file: Path) -> None:
    result = validate("-c", file, "--set", "backend_hostname=backend")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["otlp_receiver", "receiver:otlp_grpc", "127.0.0.1:4317", "persistence"] in rows
    assert [
        *("persistence", "processor:persistence", "quiver_data"),
        *("otap_exporter,", "otlp_exporter"),
    ] in rows
    assert ["otap_exporter", "exporter:otap", "http://backend:1235", "-"] in rows
    assert result.stdout.splitlines()[-1] == "The configuration is valid."


def test_every_mistake_is_a_line_with_its_place(file: Path) -> None:
    file.write_text(FIRST_FORM.replace("target_size", "targt_size").replace("25ms", "25mz"))
    result = validate("--config", file)
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{file}:44:9: segment has no option 'targt_size' (did you mean ")
    assert lines[1].startswith(f"{file}:47:25: flush_interval cannot be '25mz'")
    assert lines[2] == (
        f"{file}:58:22: variable 'backend_hostname' has no value "
        "(give it with --set backend_hostname=...)"
    )


def test_warnings_are_shown_with_a_good_file(file: Path) -> None:
    result = validate("-c", file, "--set", "backend_hostname=b", "--set", "other=1")
    assert result.exit_code == 0
    assert f"{file}:1:1: warning: variable 'other' is given" in result.stdout
    assert result.stdout.splitlines()[-1] == "The configuration is valid, with 1 warning."


def test_the_environment_is_read(file: Path) -> None:
    store = "processor:persistence | path: '${env:QUIVER_TEST_PATH}'"
    file.write_text(graph(a="receiver:otlp -> store", store=store))
    assert "QUIVER_TEST_PATH" in validate("-c", file).stdout
    result = validate("-c", file, QUIVER_TEST_PATH="/data/here")
    assert result.exit_code == 0
    assert "/data/here" in result.stdout


def test_several_destinations_are_shown_with_their_dispatch(file: Path) -> None:
    file.write_text(graph(a="receiver:otlp -> b, c", b="exporter:debug", c="exporter:debug"))
    assert "b, c (round_robin)" in validate("-c", file).stdout


def test_without_a_file_the_defaults_are_shown() -> None:
    result = validate()
    assert result.exit_code == 0
    for text in ("127.0.0.1:4317", "127.0.0.1:4318", "quiver_data", "(defaults)"):
        assert text in result.stdout


def test_a_document_for_programs(file: Path) -> None:
    good = json.loads(validate("-c", file, "--set", "backend_hostname=b", "-o", "json").stdout)
    assert (good["valid"], good["mistakes"], len(good["nodes"])) == (True, [], 5)
    assert good["nodes"][2]["destinations"] == ["otap_exporter", "otlp_exporter"]
    result = validate("-c", file, "-o", "json")
    bad = json.loads(result.stdout)
    assert (result.exit_code, bad["valid"], bad["nodes"]) == (1, False, [])
    (mistake,) = bad["mistakes"]
    assert (mistake["line"], mistake["column"], mistake["warning"]) == (58, 22, False)


def test_the_schema_is_printed() -> None:
    assert json.loads(validate("--schema").stdout) == json_schema()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = validate("-c", tmp_path / "none.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "check the path" in result.stderr


def test_a_file_that_is_not_text(file: Path) -> None:
    file.write_bytes(b"nodes:\n  a: \xff\n")
    result = validate("-c", file)
    assert result.exit_code == 1
    assert f"{file}:2:1: the file is not UTF-8" in result.stdout


@pytest.mark.parametrize("text", ["a", "=b", ""])
def test_a_variable_needs_a_name_and_a_value(text: str) -> None:
    result = validate("--set", text)
    assert result.exit_code == 2
    assert "is not NAME=VALUE" in result.stderr


def test_control_characters_do_not_reach_the_terminal(file: Path) -> None:
    file.write_text('nodes: {"a\\e[31m": {type: "receiver:otlp\\e[31m"}}')
    assert "\x1b" not in validate("-c", file).stdout
