"""How the tests draw their random numbers, and who runs the Spark tests.

Every run has one seed: that of ``QUIVER_SEED``, or a new one. It reaches the workers through that
same variable, and Hypothesis through its own option. It is printed at the start, and again after a
failure.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings

settings.register_profile(
    "ci",
    deadline=None,  # a shared machine stalls now and then; a test that hangs has its timeout
    derandomize=False,  # each run tries something new
    max_examples=100,
    print_blob=True,
)
settings.register_profile(
    "explore",
    settings.get_profile("ci"),
    max_examples=int(os.environ.get("QUIVER_EXAMPLES", "5000")),
)
settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_seed is None:
        # What is set here is inherited by the workers, which start later and read it as theirs.
        seed = os.environ.setdefault("QUIVER_SEED", str(random.getrandbits(32)))
        if not seed.isdecimal():
            raise pytest.UsageError(f"QUIVER_SEED must be a whole number, not {seed!r}")
        config.option.hypothesis_seed = seed


def pytest_report_header(config: pytest.Config) -> str:
    return _how_to_repeat(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(_how_to_repeat(config))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark"):
            item.add_marker(pytest.mark.xdist_group("spark"))


def _how_to_repeat(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    return f"seed: {seed} (again: QUIVER_SEED={seed} make test)"
