"""Cut the power at every call of every protocol of the store, in many more states than the tests.

One line for each protocol: where the power was cut, how many different disks that left, and how
many of them broke a promise. Run by ``make crash``; a number on the command line sets how many
states are looked at for each point.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from store_protocols import FAILURES, PROTOCOLS
from stores import check

from quiver.testing import explore

SEED = 20261115
STATES_PER_POINT = 60


def main(limit: int) -> int:
    """Explore everything; 1 when a promise was broken."""
    _line("protocol", "points", "states", "violations")
    points = states = violations = 0
    first: list[str] = []
    started = time.monotonic()
    for name, script in {**PROTOCOLS, **FAILURES}.items():
        report = explore(script, check, limit_per_point=limit, seed=SEED)
        _line(name, report.points, report.states, len(report.violations))
        points += report.points
        states += report.states
        violations += len(report.violations)
        first += [f"{name}: {violation}" for violation in report.violations[:1]]
    _line("total", points, states, violations)
    _say(f"seed {SEED}, {time.monotonic() - started:.0f} s")
    for violation in first:
        _say(violation)
    return 1 if violations else 0


def _line(*columns: object) -> None:
    name, *counts = columns
    _say(f"{name:<26}" + "".join(f"{count:>12}" for count in counts))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else STATES_PER_POINT))
