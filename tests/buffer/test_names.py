"""Names of batches: written one way, read in either case, and nothing below another prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from quiver.buffer.names import batch_location, ulid_time_ms

TEXT = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
TIME_MS = 1_469_922_850_259


def test_a_batch_is_named_in_upper_case_directly_below_the_prefix() -> None:
    assert batch_location("a/b", ULID.from_str(TEXT.lower())) == f"a/b/{TEXT}.batch"


@given(st.integers(0, 2**128 - 1))
def test_the_time_is_read_back(value: int) -> None:
    location = batch_location("ingest", ULID.from_int(value))
    assert ulid_time_ms(location, "ingest") == value >> 80
    assert ulid_time_ms(f"ingest/{location[7:33].lower()}.batch", "ingest") == value >> 80


@pytest.mark.parametrize("name", [TEXT, TEXT.lower(), TEXT[:13] + TEXT[13:].lower()])
def test_either_case_is_read(name: str) -> None:
    assert ulid_time_ms(f"ingest/{name}.batch", "ingest") == TIME_MS


@pytest.mark.parametrize(
    "location",
    [
        "",
        "ingest",
        "ingest/",
        "ingest/manifest",
        TEXT + ".batch",
        f"/ingest/{TEXT}.batch",
        f"ingest//{TEXT}.batch",
        f"ingest/other/{TEXT}.batch",
        f"ingest/{TEXT}/0000000000000001",
        f"ingest/{TEXT}.batch/{TEXT}.batch",
        f"ingest2/{TEXT}.batch",
        f"ingest-{TEXT}.batch",
        f"Ingest/{TEXT}.batch",
        f"ingest/{TEXT}",
        f"ingest/{TEXT}.BATCH",
        f"ingest/{TEXT}.batch\n",
        f"ingest/{TEXT}.batch.tmp",
        f"ingest/{TEXT[:-1]}.batch",
        f"ingest/{TEXT}0.batch",
        f"ingest/{TEXT[:-1]}U.batch",
        f"ingest/{TEXT[:-1]}I.batch",
        f"ingest/{TEXT[:-1]}l.batch",
        f"ingest/{TEXT[:-1]}o.batch",
        f"ingest/{TEXT[:-1]}\u017f.batch",  # upper case of which is an S
        f"ingest/{TEXT[:-1]}\u0663.batch",  # a digit, but not one of ours
        f"ingest/8{TEXT[1:]}.batch",
    ],
)
def test_other_names_have_no_time(location: str) -> None:
    assert ulid_time_ms(location, "ingest") is None
