"""The example in the README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_python_example_runs(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 1
    run = subprocess.run(
        [sys.executable, "-c", examples[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "0 {'body': ['first', 'second']}\n"


def test_the_first_two_commands_are_the_two_that_matter() -> None:
    first = re.search(r"```\n(.*?)```", README.read_text(), re.DOTALL)
    assert first is not None
    assert first[1].split("\n")[:2] == ["make demo", "make test"]
