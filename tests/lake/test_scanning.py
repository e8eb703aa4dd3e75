"""Planning a scan: which segments, how far, in which tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver import Store
from quiver.bundle import Signal, Slot
from quiver.disk import RealDisk
from quiver.errors import InvalidConfig
from quiver.lake.scanning import (
    EventTimes,
    Gap,
    Piece,
    StoreDirectory,
    between,
    capped_offset,
    check_root,
    describe_gaps,
    find_stores,
    latest_offset,
    limited_offset,
    list_segments,
    may_hold,
    pack,
    queue_id,
    read_offset,
)
from quiver.segment.tables import StreamEntry

PIECES = st.dictionaries(
    st.sampled_from("abc"),
    st.dictionaries(st.integers(0, 12), st.integers(1, 100), max_size=8),
    max_size=3,
).map(
    lambda stores: [
        piece(store_id, number, size)
        for store_id, segments in stores.items()
        for number, size in segments.items()
    ]
)


def piece(store_id: str, number: int, size: int = 10) -> Piece:
    return Piece(store_id, number, f"/{store_id}/{number}", size)


def stream(slot: int, first: int | None = None, last: int | None = None) -> StreamEntry:
    return StreamEntry(0, slot, b"", 0, 0, 0, 0, None, first, last)


# --- Offsets -----------------------------------------------------------------------------------


def test_the_latest_offset_is_behind_all_and_never_goes_back() -> None:
    pieces = [piece("b", 4), piece("a", 2), piece("a", 7)]
    assert list(latest_offset(pieces, {}).items()) == [("a", 8), ("b", 5)]
    assert latest_offset(pieces, {"a": 9, "gone": 3}) == {"a": 9, "b": 5, "gone": 3}


def test_new_segments_are_not_seen_by_a_query_with_a_target() -> None:
    end = {"a": 9, "b": 4, "new": 2}
    assert capped_offset(end, {}, {"a": 5, "b": 7}) == {"a": 5, "b": 4}
    assert capped_offset(end, {"a": 6, "old": 1}, {"a": 5}) == {"a": 6, "old": 1}


def test_a_limit_lets_one_segment_through_at_least() -> None:
    pieces = [piece("a", 0, 100), piece("a", 1, 100)]
    end = latest_offset(pieces, {})
    assert limited_offset(pieces, {}, end, max_bytes=1) == {"a": 1}
    assert limited_offset(pieces, {}, end, max_segments=1) == {"a": 1}
    assert limited_offset(pieces, {}, end, max_bytes=200) == end
    assert limited_offset(pieces, {}, end) == end


def test_a_busy_store_does_not_starve_the_others() -> None:
    pieces = [*(piece("a", number, 10) for number in range(50)), piece("b", 3, 10)]
    end = latest_offset(pieces, {})
    assert limited_offset(pieces, {}, end, max_segments=4) == {"a": 3, "b": 4}


def test_segments_that_are_gone_do_not_hold_up_the_offset() -> None:
    assert limited_offset([], {"a": 2}, {"a": 9}, max_segments=1) == {"a": 9}
    assert limited_offset([piece("a", 5)], {"a": 2}, {"a": 9}, max_segments=1) == {"a": 9}


@given(pieces=PIECES, max_bytes=st.integers(1, 300), most=st.integers(1, 5))
@settings(max_examples=200)
def test_steps_below_a_limit_come_to_everything_once(
    pieces: list[Piece], max_bytes: int, most: int
) -> None:
    for limits in ({"max_bytes": max_bytes}, {"max_segments": most}):
        end = latest_offset(pieces, {})
        at: dict[str, int] = {}
        seen: list[Piece] = []
        while at != end:
            step = limited_offset(pieces, at, end, **limits)
            assert step != at, "no progress"
            found, _ = between(pieces, at, step)
            assert len(found) <= 1 or sum(one.size for one in found) <= limits.get("max_bytes", 1e9)
            assert len(found) <= limits.get("max_segments", 1e9)
            seen += found
            at = step
        assert sorted(seen) == sorted(pieces)


def test_what_lies_between_two_offsets_and_what_is_missing() -> None:
    pieces = [piece("b", 1), piece("a", 6), piece("a", 3), piece("a", 2)]
    found, gaps = between(pieces, {"a": 1, "b": 0}, {"a": 7, "b": 1, "c": 4})
    assert [(one.store_id, one.segment) for one in found] == [("a", 2), ("a", 3), ("a", 6)]
    assert gaps == [Gap("a", 1, 1), Gap("a", 4, 5), Gap("b", 0, 0)]
    text = "segment 1 of store a, segments 4 to 5 of store a, segment 0 of store b"
    assert describe_gaps(gaps) == text
    assert describe_gaps(gaps * 5).endswith("store b, segment 1 of store a and 5 more ranges")


def test_a_new_store_begins_with_what_it_has() -> None:
    assert between([piece("a", 5)], {}, {"a": 6}) == ([piece("a", 5)], [])
    assert between([], {}, {"a": 6}) == ([], [])


@pytest.mark.parametrize("bad", [{"a": "1"}, {"a": -1}, {"a": True}, {"a": 1.0}, {"a": None}])
def test_an_offset_holds_whole_numbers(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig, match="the checkpoint: 'a' is at"):
        read_offset(bad, "the checkpoint")


def test_offsets_are_sorted() -> None:
    assert list(read_offset({"b": 1, "a": 0}, "")) == ["a", "b"]


def test_a_store_without_an_id_cannot_be_followed() -> None:
    with pytest.raises(InvalidConfig, match="a store without an id"):
        latest_offset([Piece(None, 0, "/x", 1)], {})


# --- Tasks -------------------------------------------------------------------------------------


def test_neighbours_are_packed_into_tasks() -> None:
    def packed(*sizes: int) -> list[list[int]]:
        return list(pack(sizes, 10, lambda size: size))

    assert packed(3, 3, 3, 3, 11, 1, 9, 1) == [[3, 3, 3], [3], [11], [1, 9], [1]]
    assert packed() == []


def test_segments_without_the_signal_are_skipped() -> None:
    streams = [stream(Slot.RESOURCE_ATTRS), stream(Slot.OTLP_LOGS), stream(Slot.SPAN_ATTRS)]
    assert may_hold(streams, Signal.LOGS)
    assert may_hold(streams, Signal.TRACES)
    assert not may_hold(streams, Signal.METRICS)
    assert may_hold(streams, None)


def test_segments_outside_the_event_times_are_skipped() -> None:
    spans = [stream(Slot.SPANS, 5_000_999, 8_000_999), stream(Slot.SPAN_ATTRS)]

    def held(earliest: int, latest: int, streams: list[StreamEntry] = spans) -> bool:
        return may_hold(streams, Signal.TRACES, EventTimes(earliest, latest))

    assert held(8_000, 9_000)
    assert not held(8_001, 9_000)
    assert held(1, 5_000)
    assert not held(1, 4_999)
    assert held(0, 1)  # rows without a time are at 0
    assert held(1, 2, [stream(Slot.SPANS), *spans])  # no statistics
    assert held(1, 2, [stream(Slot.OTLP_TRACES), *spans])  # nor for these
    assert may_hold([stream(Slot.LOGS, 5, 6)], Signal.LOGS, EventTimes(9, 10))


# --- Where stores are --------------------------------------------------------------------------


def test_stores_are_found_below_a_root_or_at_it(tmp_path: Path) -> None:
    disk = RealDisk()
    assert find_stores(disk, tmp_path) == []
    with Store.open(tmp_path / "core_1") as one, Store.open(tmp_path / "core_0") as other:
        ids = [other.store_id, one.store_id]
    (tmp_path / "core_2").mkdir()
    found = find_stores(disk, tmp_path)
    assert found == [
        StoreDirectory(store_id, tmp_path / f"core_{number}") for number, store_id in enumerate(ids)
    ]
    assert find_stores(disk, tmp_path / "core_1") == found[1:]
    assert list_segments(disk, found[0]) == []
    with pytest.raises(InvalidConfig, match="there is no directory"):
        find_stores(disk, tmp_path / "nothing")


def test_a_copy_of_a_store_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "core_0").close()
    (tmp_path / "core_1" / "segments").mkdir(parents=True)
    (tmp_path / "core_1" / "quiver.ledger").write_bytes(
        (tmp_path / "core_0" / "quiver.ledger").read_bytes()
    )
    with pytest.raises(InvalidConfig, match="one is a copy"):
        find_stores(RealDisk(), tmp_path)


def test_segments_are_listed_by_number(tmp_path: Path) -> None:
    directory = tmp_path / "segments"
    directory.mkdir()
    for name in ("0000000000000010.qseg", "0000000000000002.qseg", "3.qseg.tmp", "notes"):
        (directory / name).write_bytes(b"12345")
    pieces = list_segments(RealDisk(), StoreDirectory("s", tmp_path))
    assert [(one.segment, one.size) for one in pieces] == [(2, 5), (10, 5)]


@pytest.mark.parametrize(
    ("text", "path"), [("/a/b", "/a/b"), ("file:///a%20b", "/a b"), ("file:/a", "/a")]
)
def test_roots_that_are_taken(text: str, path: str) -> None:
    assert check_root(text) == Path(path)


@pytest.mark.parametrize("text", [None, "", "a/b", "s3://b/c", "file://host/a", "/a\0b", "file:a"])
def test_roots_that_are_not(text: str | None) -> None:
    with pytest.raises(InvalidConfig, match="option path"):
        check_root(text)


def test_the_name_of_a_queue_does_not_depend_on_how_it_is_reached() -> None:
    name = queue_id("s3://b/p?endpoint=http://x", "ingest/manifest")
    assert name == queue_id("s3://b/p/", "ingest/manifest")
    assert name != queue_id("s3://b/p", "other/manifest")
    assert len(name) == 32
