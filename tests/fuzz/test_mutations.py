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
    "wal": 6000,
    "stream": 7500,
    "file": 6000,
    "segment": 4500,
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


def outcome_of_hostile(name: str) -> set[str]:
    """How the calls ended, without those that rightly gave a value."""
    result = run_child("hostile", name)
    if result.returncode != 0:
        pytest.fail(
            f"{name} ended the process ({result.returncode}).\n"
            f"Again: python -m tests.fuzz.child hostile {name}\n" + result.stderr[-4000:],
            pytrace=False,
        )
    return {word.partition("=")[0] for word in result.stdout.splitlines()[-1].split()} - {"value"}


EXPECTED: dict[str, set[str]] = {
    "compressed_claim": {"LimitExceeded"},
    "compressed_claim_in_a_dictionary": {"LimitExceeded"},
    "compressed_claim_in_a_file": {"LimitExceeded"},
    "compressed_claim_in_a_log": {"LimitExceeded"},
    "compressed_claim_in_a_segment": {"LimitExceeded"},
    "views_in_more_buffers_than_there_are": {"FormatError"},
    "null_rows": set(),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_small_inputs_that_ask_for_much_are_refused_or_harmless(name: str) -> None:
    assert outcome_of_hostile(name) == EXPECTED[name]


def test_every_hostile_input_is_tried() -> None:
    assert set(HOSTILE) == {*EXPECTED, *NOT_YET}


NOT_YET = {
    "claims_in_the_manner_of_version_4": "compression of metadata version 4 is not looked for",
    "claims_in_the_manner_of_version_4_in_a_file": "as above",
    "claims_behind_a_prefix_of_old": "the marker of a batch message is not looked at",
    "claims_behind_a_prefix_of_old_in_a_file": "as above",
    "many_dictionaries_that_claim_little_each": "claims are added up per message only",
    "one_name_for_many_columns": "a schema that shares its strings becomes gigabytes",
    "one_text_for_many_views": "full validation of overlapping views takes quadratic time",
    "entries_that_lead_from_one_to_the_next": "looking for the next entry is quadratic",
    "a_manifest_of_ten_million_rows": "a compressed manifest becomes lists of any size",
    "more_null_rows_than_a_bundle_has": "InvalidBundle instead of a FormatError",
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xfail(reason=why)) for n, why in NOT_YET.items()]
)
def test_small_inputs_that_ask_for_much_are_refused(name: str) -> None:
    assert outcome_of_hostile(name) <= {"FormatError", "LimitExceeded", "Truncated"}
