"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.errors import InvalidConfig
from quiver.pipeline.settings.units import (
    MAX_DURATION,
    MAX_SIZE,
    duration_text,
    parse_duration,
    parse_size,
    size_text,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("32", 32),
        ("32B", 32),
        ("32MB", 32_000_000),
        ("32MiB", 32 * 2**20),
        ("4GB", 4 * 10**9),
        ("4GiB", 4 * 2**30),
        ("500GB", 500 * 10**9),
        ("10 GiB", 10 * 2**30),
        ("64k", 64_000),
        ("64Ki", 65_536),
        ("1.5KiB", 1536),
        ("32mb", 32_000_000),
        (" 2TB ", 2 * 10**12),
        ("1PiB", 2**50),
        ("9223372036854775807", MAX_SIZE),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MB",
        "-1",
        "-1MB",
        "1.5B",
        "32MX",
        "3 2MB",
        "1e3MB",
        "nan",
        "inf",
        "\u0661MB",
        "0x10",
        "1_000",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidConfig, match="a size is"):
        parse_size(text)


def test_a_size_has_an_end() -> None:
    with pytest.raises(InvalidConfig, match="less than"):
        parse_size("9223372036854775808")
    with pytest.raises(InvalidConfig, match="a size is"):
        parse_size("9" * 10_000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("5", 5),
        ("2.5", 2.5),
        ("1e-3", 0.001),
        ("25ms", 0.025),
        ("100us", 0.0001),
        ("100µs", 0.0001),
        ("7ns", 7e-9),
        ("15s", 15),
        ("5m", 300),
        ("72h", 259_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1h 30m", 5400),
        ("1h30m15s", 5415),
        ("2 days", 172_800),
        ("1.5h", 5400),
        ("10 sec", 10),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "25mz", "1h 30", "1 h m", "nan", "1y", "1e3s", "+5"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidConfig, match="a duration is a number"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["5300w", "1e99", f"{MAX_DURATION + 1}"])
def test_a_duration_has_an_end(text: str) -> None:
    with pytest.raises(InvalidConfig, match="hundred years"):
        parse_duration(text)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, MAX_SIZE) | st.sampled_from([2**20, 32 * 10**6, 10 * 2**30, 1000, 1024]))
def test_a_size_as_text_is_that_size(size: int) -> None:
    assert parse_size(size_text(size)) == size


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_a_duration_as_text_is_that_duration(milliseconds: int) -> None:
    text = duration_text(milliseconds / 1000)
    assert parse_duration(text) == pytest.approx(milliseconds / 1000, rel=1e-9)


def test_defaults_are_written_shortly() -> None:
    assert [size_text(n) for n in (0, 7, 32 * 2**20, 500 * 10**9)] == ["0B", "7B", "32MiB", "500GB"]
    assert [duration_text(n) for n in (0.025, 0.2, 1.0, 60.0, 7200.0)] == [
        "25ms",
        "200ms",
        "1s",
        "60s",
        "2h",
    ]
