"""Tools to test Quiver, and what is built on it: a disk that loses power, telemetry to keep."""

from __future__ import annotations

from quiver.testing.calls import Call
from quiver.testing.crash import ExplorationReport, Violation, error_loop, explore, replay
from quiver.testing.disk import SimulatedDisk
from quiver.testing.telemetry import Shape, Telemetry

__all__ = [
    "Call",
    "ExplorationReport",
    "Shape",
    "SimulatedDisk",
    "Telemetry",
    "Violation",
    "error_loop",
    "explore",
    "replay",
]
