"""A machine made of fake programs, for the scripts in ``tools/``."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@dataclass(frozen=True)
class FakeMachine:
    """Its PATH is one directory, which holds only what a test put there."""

    bin: Path

    def program(self, name: str, body: str) -> Path:
        """Put a shell script on the PATH; with a slash in ``name``, beside it."""
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def user(self, number: int) -> None:
        """Who runs the scripts: 0 is root."""
        self.program("id", f"echo {number}")

    def run(
        self, tool: str, *arguments: str | Path, **environment: str | Path
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the scripts, with these variables and no others."""
        return subprocess.run(
            [TOOLS / tool, *arguments],
            env={"PATH": str(self.bin), **{k: str(v) for k, v in environment.items()}},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    directory = tmp_path / "bin"
    directory.mkdir()
    return FakeMachine(directory)
