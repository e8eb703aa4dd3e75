from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import FakeMachine

NEW_ENOUGH = "exit 0"
TOO_OLD = "exit 1"


def test_the_newest_on_path_is_found(machine: FakeMachine) -> None:
    for name in ("python3", "python3.11", "python3.13"):
        machine.program(name, NEW_ENOUGH)
    result = machine.run("find-python")
    assert (result.returncode, result.stdout) == (0, "python3.13\n")


def test_a_name_that_does_not_run_is_passed_over(machine: FakeMachine) -> None:
    machine.program("python3.12", "echo 'no such version' >&2; exit 127")
    machine.program("python3", NEW_ENOUGH)
    result = machine.run("find-python")
    assert (result.returncode, result.stdout, result.stderr) == (0, "python3\n", "")


def test_the_given_one_is_used(machine: FakeMachine) -> None:
    machine.program("python3.13", NEW_ENOUGH)
    result = machine.run("find-python", PYTHON=sys.executable)
    assert (result.returncode, result.stdout) == (0, f"{sys.executable}\n")


def test_an_empty_choice_is_no_choice(machine: FakeMachine) -> None:
    machine.program("python3", NEW_ENOUGH)
    assert machine.run("find-python", PYTHON="").stdout == "python3\n"


def test_the_given_one_is_refused_when_it_is_too_old(machine: FakeMachine) -> None:
    machine.program("python3.13", NEW_ENOUGH)
    old = machine.program("python3.8", TOO_OLD)
    result = machine.run("find-python", PYTHON=old)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"find-python: PYTHON is {old}, which is not a Python 3.11 or newer\n"


@pytest.mark.parametrize("present", [(), ("python3",), ("python3", "python3.11")])
def test_none_that_is_new_enough_is_one_line(
    machine: FakeMachine, present: tuple[str, ...]
) -> None:
    for name in present:
        machine.program(name, TOO_OLD)
    result = machine.run("find-python")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("find-python: no Python 3.11 or newer on PATH")
    assert result.stderr.count("\n") == 1
