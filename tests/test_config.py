"""Settings are checked when they are made."""

from __future__ import annotations

import pytest

from quiver import InvalidConfig, WalConfig
from quiver.config import QueueConfig


def test_defaults_are_valid() -> None:
    assert WalConfig().rotation_target == 64 * 1024 * 1024


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_rotated_files": 0}, "wal.max_rotated_files is 0"),
        ({"rotation_target": 0}, "wal.rotation_target is 0"),
        ({"max_quarantine": -1}, "wal.max_quarantine is -1"),
        ({"max_size": 10, "rotation_target": 11}, "larger than wal.max_size"),
    ],
)
def test_settings_outside_their_range(settings: dict[str, int], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        WalConfig(**settings)


def test_a_grace_period_that_is_too_short_for_one_attempt() -> None:
    assert QueueConfig(gc_grace_period=61).max_upload_age == 30.5
    with pytest.raises(InvalidConfig, match=r"more than twice queue\.attempt_timeout"):
        QueueConfig(gc_grace_period=60)
