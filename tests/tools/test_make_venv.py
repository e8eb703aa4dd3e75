from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import FakeMachine

MKDIR = "/bin/mkdir -p"


def python(machine: FakeMachine, *, ensurepip: bool) -> Path:
    """A Python 3.11 that can make environments, or can as soon as the returned file exists."""
    works = machine.bin.parent / "ensurepip"
    if ensurepip:
        works.touch()
    machine.program(
        "python3.11",
        f"""case "$*" in
            *ensurepip*) test -e {works} ;;
            "-m venv "*) {MKDIR} "$3/bin" ;;
            *-venv*) echo python3.11-venv ;;
            *) echo fake 3.11.0 ;;
        esac""",
    )
    return works


@pytest.fixture
def machine(machine: FakeMachine) -> FakeMachine:
    machine.program("rm", 'exec /bin/rm "$@"')
    return machine


def test_an_environment_is_made(machine: FakeMachine, tmp_path: Path) -> None:
    python(machine, ensurepip=True)
    result = machine.run("make-venv", tmp_path / "venv")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"Making {tmp_path}/venv with fake 3.11.0\n"
    assert (tmp_path / "venv/bin").is_dir()


def test_what_an_interrupted_one_left_is_removed(machine: FakeMachine, tmp_path: Path) -> None:
    python(machine, ensurepip=True)
    left = tmp_path / "venv/lib/half-a-package"
    left.parent.mkdir(parents=True)
    left.touch()
    assert machine.run("make-venv", tmp_path / "venv").returncode == 0
    assert not left.exists()


def test_root_on_debian_gets_what_is_missing(machine: FakeMachine, tmp_path: Path) -> None:
    works = python(machine, ensurepip=False)
    machine.user(0)
    machine.program("apt-get", f'case "$*" in *"install -y python3.11-venv") : > {works} ;; esac')
    result = machine.run("make-venv", tmp_path / "venv")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Installing python3.11-venv\n")


@pytest.mark.parametrize(
    ("user", "apt_get"), [(0, None), (0, "exit 100"), (0, "exit 0"), (1000, "exit 0")]
)
def test_who_cannot_install_is_told_what_to(
    machine: FakeMachine, tmp_path: Path, user: int, apt_get: str | None
) -> None:
    python(machine, ensurepip=False)
    machine.user(user)
    if apt_get:
        machine.program("apt-get", apt_get)
    (tmp_path / "venv").mkdir()
    result = machine.run("make-venv", tmp_path / "venv")
    assert result.returncode == 1
    assert result.stderr == (
        "make-venv: python3.11 cannot make an environment; install python3.11-venv (as root)\n"
    )
    assert (tmp_path / "venv").exists()


def test_no_python_is_one_line(machine: FakeMachine, tmp_path: Path) -> None:
    result = machine.run("make-venv", tmp_path / "venv")
    assert result.returncode == 1
    assert result.stderr.startswith("find-python: ")
