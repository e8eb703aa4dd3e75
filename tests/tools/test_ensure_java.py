from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import FakeMachine


def java(version: str) -> str:
    """The body of a program that answers as Java does: on standard error."""
    return f"""echo 'openjdk version "{version}" 2025-04-15' >&2"""


def apt_get(machine: FakeMachine, install: str) -> Path:
    """An ``apt-get`` that writes down its arguments, and runs ``install`` to install; its log."""
    log = machine.bin.parent / "apt.log"
    machine.program(
        "apt-get",
        f"""echo "$DEBIAN_FRONTEND $*" >> {log}
        case "$*" in *install*) {install} ;; esac""",
    )
    return log


def installing(machine: FakeMachine, version: str) -> str:
    """The shell command that puts this version of Java on the PATH."""
    ready = machine.program("../ready/java", java(version))
    return f"/bin/cp {ready} {machine.bin}/java"


@pytest.mark.parametrize(
    ("version", "major"),
    [("17", 17), ("17.0.1", 17), ("21-ea", 21), ("21.0.2+13", 21), ("25", 25)],
)
def test_java_on_path(machine: FakeMachine, version: str, major: int) -> None:
    path = machine.program("java", java(version))
    result = machine.run("ensure-java")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"Java {major}: {path}\n", "")


@pytest.mark.parametrize(
    ("version", "major"), [("1.8.0_402", 8), ("9", 9), ("11.0.22", 11), ("16-ea", 16)]
)
def test_an_old_java_is_refused(machine: FakeMachine, version: str, major: int) -> None:
    path = machine.program("java", java(version))
    machine.user(1000)
    result = machine.run("ensure-java")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"but {path} is Java {major}; install it" in result.stderr


def test_lines_before_the_version_do_not_matter(machine: FakeMachine) -> None:
    machine.program("java", "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2\n" + java("17.0.1"))
    assert machine.run("ensure-java").returncode == 0


def test_java_home_is_preferred(machine: FakeMachine) -> None:
    machine.program("java", java("17.0.1"))
    home = machine.program("../home/bin/java", java("21.0.2"))
    result = machine.run("ensure-java", JAVA_HOME=home.parents[1])
    assert (result.returncode, result.stdout) == (0, f"Java 21: {home}\n")


@pytest.mark.parametrize("version", ["1.8.0_402", None])
def test_a_bad_java_home_is_not_passed_over(machine: FakeMachine, version: str | None) -> None:
    """Spark would take it, whatever is on the PATH."""
    machine.program("java", java("17.0.1"))
    home = machine.bin.parent / "home"
    if version:
        machine.program("../home/bin/java", java(version))
    machine.user(0)
    log = apt_get(machine, installing(machine, "17.0.1"))
    result = machine.run("ensure-java", JAVA_HOME=home)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("ensure-java: JAVA_HOME is set, but")
    assert result.stderr.endswith("point it to Java 17 or newer, or unset it\n")
    assert not log.exists()


@pytest.mark.parametrize("before", [None, java("1.8.0_402"), "exit 1"])
def test_root_on_debian_gets_one(machine: FakeMachine, before: str | None) -> None:
    if before:
        machine.program("java", before)
    machine.user(0)
    log = apt_get(machine, installing(machine, "17.0.15"))
    result = machine.run("ensure-java")
    assert result.stdout.splitlines() == [
        "Installing default-jre-headless",
        f"Java 17: {machine.bin}/java",
    ]
    assert result.returncode == 0
    assert log.read_text().splitlines() == [
        "noninteractive -qq update",
        "noninteractive -qq install -y default-jre-headless",
    ]


@pytest.mark.parametrize(("user", "has_apt"), [(1000, True), (0, False)])
def test_who_cannot_install_is_told_what_to(machine: FakeMachine, user: int, has_apt: bool) -> None:
    machine.user(user)
    if has_apt:
        apt_get(machine, installing(machine, "17.0.15"))
    result = machine.run("ensure-java")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "ensure-java: Spark needs Java 17 or newer, but there is no java; "
        "install it (Debian: default-jre-headless, as root)\n"
    )


def test_a_failing_update_stops(machine: FakeMachine) -> None:
    machine.user(0)
    machine.program("apt-get", "exit 100")
    result = machine.run("ensure-java")
    assert result.returncode == 1
    assert result.stderr == "ensure-java: apt-get update failed; install Java 17 or newer\n"


def test_a_failing_install_stops(machine: FakeMachine) -> None:
    machine.user(0)
    apt_get(machine, "exit 100")
    result = machine.run("ensure-java")
    assert result.returncode == 1
    assert result.stderr == (
        "ensure-java: apt-get could not install default-jre-headless; install Java 17 or newer\n"
    )


def test_an_installed_java_that_is_too_old_stops(machine: FakeMachine) -> None:
    machine.user(0)
    apt_get(machine, installing(machine, "11.0.22"))
    result = machine.run("ensure-java")
    assert result.returncode == 1
    assert f"default-jre-headless is installed, but {machine.bin}/java is Java 11" in result.stderr
