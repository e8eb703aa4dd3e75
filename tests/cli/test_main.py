"""What all commands have in common: help, version, errors, exit codes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner, Result

import quiver
from quiver.cli import output
from quiver.cli.main import app, explain, reporting
from quiver.cli.output import (
    Column,
    ConsoleOutput,
    Report,
    Section,
    humanised,
    printable,
    size_text,
    time_text,
)
from quiver.errors import FormatError, InvalidConfig, QuiverError

COMMANDS = (
    *("run", "validate", "inspect", "subscribers", "bench", "demo"),
    *("dlq", "keys", "buffer"),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_command_and_exit_code(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    for command in COMMANDS:
        assert f" {command} " in result.stdout
    assert "0 all is well, 1 something is damaged, 2 wrong usage or unreadable" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: quiver {command}" in result.stdout


def test_the_help_of_inspect_documents_its_exit_codes() -> None:
    text = run("inspect", "--help").stdout
    assert "Exit codes: 0 all is well, 1 something is damaged, 2 wrong usage" in text


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"quiver {quiver.__version__}\n")
    assert importlib.metadata.version("quiver") == quiver.__version__


def test_a_command_that_does_not_exist() -> None:
    result = run("inspekt")
    assert result.exit_code == 2
    assert "Did you mean 'inspect'?" in result.stderr


def test_shell_completion_is_there() -> None:
    assert "--install-completion" in run("--help").stdout
    done = run_program(
        "-m", "quiver", _QUIVER_COMPLETE="complete_bash", COMP_WORDS="quiver in", COMP_CWORD="1"
    )
    assert "inspect" in done.stdout


@pytest.mark.parametrize("module", ["quiver", "quiver.cli.main"])
def test_the_package_can_be_run(module: str) -> None:
    done = run_program("-m", module, "--version")
    assert (done.returncode, done.stdout) == (0, f"quiver {quiver.__version__}\n")
    assert "Usage: quiver inspect" in run_program("-m", module, "inspect", "-h").stdout


def test_the_console_script_is_main() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="quiver")
    assert script.value == "quiver.cli.main:main"


def test_help_does_not_load_what_only_commands_need() -> None:
    code = (
        "import sys; from quiver.cli.main import app; "
        "print([m for m in ('quiver.inspection', 'pyspark', 'pandas') if m in sys.modules])"
    )
    assert run_program("-c", code).stdout == "[]\n"


# --- Errors -------------------------------------------------------------------------------------


def fail_with(error: BaseException) -> Result:
    failing = typer.Typer()

    @failing.command()
    @reporting
    def fail() -> None:
        raise error

    return CliRunner().invoke(failing)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FormatError("a.qseg", 12, "too short"), "a.qseg: at byte 12: too short"),
        (FormatError("a.qseg", 0, "not ours"), "a.qseg: not ours"),
        (InvalidConfig("x is 3; it must be at least 4"), "x is 3; it must be at least 4"),
        (FileNotFoundError(2, "No such file", "x"), "x: No such file; check the path"),
        (
            PermissionError(13, "Permission denied", "x"),
            "x: Permission denied; run it as the user whose files these are, or be given access",
        ),
        (OSError(5, "Input/output error", "x"), "x: Input/output error"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (FormatError("a\nb", 0, "[red]\x1b[31m"), r"a\nb: [red]\x1b[31m"),
    ],
)
def test_an_error_is_one_line_and_exits_with_2(error: QuiverError | OSError, line: str) -> None:
    result = fail_with(error)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {line}\n")
    assert printable(explain(error)) == line


def test_a_defect_still_shows_where_it_is() -> None:
    assert isinstance(fail_with(ZeroDivisionError()).exception, ZeroDivisionError)


def test_an_interrupt_ends_quietly() -> None:
    result = fail_with(KeyboardInterrupt())
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_a_reader_that_left_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = []
    monkeypatch.setattr(output, "abandon_output", lambda: abandoned.append(True))
    result = fail_with(BrokenPipeError())
    assert (result.exit_code, result.output, abandoned) == (0, "", [True])


# --- Output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (4872, "4.8 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (64 * 1024 * 1024, "64.0 MiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_sizes_are_humanised(size: int, text: str) -> None:
    assert humanised(size) == text


def test_large_sizes_are_exact_as_well() -> None:
    assert size_text(1_234_567) == "1.2 MiB (1,234,567 bytes)"
    assert size_text(24) == "24 B"


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (None, "-"),
        (0, "1970-01-01T00:00:00.000000000Z (0)"),
        (1_700_000_000_000_000_001, "2023-11-14T22:13:20.000000001Z (1700000000000000001)"),
        (-(2**63), "1677-09-21T00:12:43.145224192Z (-9223372036854775808)"),
    ],
)
def test_times_are_in_utc_and_exact(time_ns: int | None, text: str) -> None:
    assert time_text(time_ns) == text


def test_an_optional_column_without_values_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    section = Section(
        title="Things",
        columns=(Column("name"), Column("never", optional=True), Column("always")),
        rows=(("a", "-", "-"), ("b", "-", "-")),
        total=2,
    )
    report = Report(title="T", subject="s", facts=(), sections=(section,), verdict="Done.")
    ConsoleOutput().show({}, report)
    text = capsys.readouterr().out
    assert "always" in text
    assert "never" not in text
