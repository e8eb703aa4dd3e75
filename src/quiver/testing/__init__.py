"""Tools to test Quiver, and what is built on it: a disk that loses power, on purpose."""

from __future__ import annotations

from quiver.testing.calls import Call
from quiver.testing.crash import ExplorationReport, Violation, error_loop, explore, replay
from quiver.testing.disk import SimulatedDisk

__all__ = [
    "Call",
    "ExplorationReport",
    "SimulatedDisk",
    "Violation",
    "error_loop",
    "explore",
    "replay",
]
