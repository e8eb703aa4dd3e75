"""Every test that the documentation names exists, and every promise in a table names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
DEFINED = {
    name
    for path in ROOT.glob("tests/**/*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`(tests/[\w/.]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for name in re.findall(r"`(test_\w+)`", text):
        assert name in DEFINED, f"{page.name} names {name}"


def promises(page: Path) -> list[str]:
    """The rows of the tables whose last column is headed ``test``."""
    rows = []
    inside = False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[-1] == "test":
            inside = True
        elif inside and not set(line) <= set("|-: "):
            rows.append(cells[-1])
    return rows


def test_every_promise_names_its_test() -> None:
    rows = [row for page in PAGES for row in promises(page)]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`(tests/[\w/.]+|test_\w+)`", row), row
