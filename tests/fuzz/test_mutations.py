"""Any bytes given to any decoder end in a value or in a ``FormatError``: damaged files.

The cases run in processes of their own (``child``), so that a crash, a hang or an absurd allocation
fails one test, which names the case that did it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fuzz.hostile import HOSTILE

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("QUIVER_SEED", "0"))
CHUNK = 1500
CASES = {
    "cursor": 1500,
    "progress": 1500,
    "wal": 4500,
    "stream": 7500,
    "file": 6000,
    "segment": 3000,
}


def run_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.child", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_chunk(kind: str, first: int, count: int) -> None:
    result = run_child("mutations", kind, str(SEED), str(first), str(count))
    if result.returncode != 0:
        lines = [line for line in result.stdout.split() if line.isdecimal()]
        number = lines[-1] if lines else str(first)
        pytest.fail(
            f"case {number} of kind {kind} with seed {SEED} ended the process "
            f"({result.returncode}).\n"
            f"Again: python -m tests.fuzz.child mutations {kind} {SEED} {number} 1\n"
            + result.stderr[-4000:],
            pytrace=False,
        )


@pytest.mark.parametrize(
    ("kind", "first"),
    [(kind, first) for kind, count in CASES.items() for first in range(0, count, CHUNK)],
)
def test_damaged_files(kind: str, first: int) -> None:
    run_chunk(kind, first, CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_many_damaged_files(kind: str) -> None:
    start = CASES[kind]
    count = int(os.environ.get("QUIVER_EXAMPLES", "5000"))
    for first in range(start, start + count, 5000):
        run_chunk(kind, first, min(5000, start + count - first))


# --- small inputs that ask for much ------------------------------------------------------------

HARMLESS = {"null_rows"}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_small_inputs_that_ask_for_much_are_refused(name: str) -> None:
    """Within a few seconds, and without the memory that they ask for."""
    result = run_child("hostile", name)
    if result.returncode != 0:
        pytest.fail(
            f"{name} ended the process ({result.returncode}).\n"
            f"Again: python -m tests.fuzz.child hostile {name}\n" + result.stderr[-4000:],
            pytrace=False,
        )
    last_line = result.stdout.splitlines()[-1]
    errors = {word.partition("=")[0] for word in last_line.split()} - {"value"}
    if name.startswith("compressed_claim"):
        assert errors == {"LimitExceeded"}
    else:
        assert bool(errors) == (name not in HARMLESS)
