"""The progress file: its bytes, what it keeps, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.checksum import crc32
from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    InvalidBundle,
    InvalidName,
    LimitExceeded,
    QuiverError,
    Truncated,
    UnsupportedVersion,
)
from quiver.subscriber import progress as progress_module
from quiver.subscriber.progress import (
    Progress,
    SegmentProgress,
    check_subscriber_id,
    decode_progress,
    encode_progress,
    load_progress,
    progress_path,
    store_progress,
)
from quiver.testing import SimulatedDisk, explore

EMPTY = "51554956535542000100200000000000000000000000000000000000000000005d29f376"


def _with_sum(body: bytes) -> bytes:
    return body + crc32(body).to_bytes(4, "little")


def _changed(data: bytes, offset: int, value: bytes) -> bytes:
    body = bytearray(data[:-4])
    body[offset : offset + len(value)] = value
    return _with_sum(bytes(body))


@st.composite
def segments(draw: st.DrawFn) -> SegmentProgress:
    count = draw(st.integers(0, 200) | st.just(65_536))
    resolved = draw(st.integers(0, 2 ** min(count, 500)) | st.just(2**count - 1))
    return SegmentProgress(draw(st.integers(0, 2**64 - 1)), count, resolved & (2**count - 1))


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    entries = draw(st.lists(segments(), max_size=5, unique_by=lambda entry: entry.segment))
    return Progress(
        tuple(sorted(entries, key=lambda entry: entry.segment)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**16 - 1)),
        draw(st.binary(max_size=20)),
    )


def test_an_empty_file_has_the_bytes_of_the_reference() -> None:
    assert encode_progress(Progress()).hex() == EMPTY


@given(progresses())
def test_round_trip(progress: Progress) -> None:
    assert decode_progress(encode_progress(progress), source="f") == progress


@given(progresses(), st.data())
def test_any_changed_bit_is_noticed(progress: Progress, data: st.DataObject) -> None:
    encoded = bytearray(encode_progress(progress))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_progress(encoded, source="f")


def test_flags_without_a_name_are_kept_and_shown() -> None:
    progress = decode_progress(encode_progress(Progress(flags=0b1010)), source="f")
    assert progress.flags == 0b1010
    assert progress.flag_names() == ["bit 1", "bit 3"]


def test_a_flag_gets_a_name_by_adding_it_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "KNOWN_FLAGS", {3: "completed_through"})
    assert Progress(flags=0b1010).flag_names() == ["bit 1", "completed_through"]


def test_bytes_behind_the_last_entry_are_ignored() -> None:
    progress = Progress((SegmentProgress(1, 2, 0b10),))
    data = _with_sum(encode_progress(progress)[:-4] + b"from the future")
    assert decode_progress(data, source="f") == progress


def test_bits_behind_the_last_bundle_are_ignored() -> None:
    data = encode_progress(Progress((SegmentProgress(1, 2, 0b10),)))
    assert decode_progress(_changed(data, 46, b"\xfe"), source="f").entries[0].resolved == 0b10


_ONE = encode_progress(Progress((SegmentProgress(1, 65, 0),)))
_TWO = encode_progress(Progress((SegmentProgress(1, 0), SegmentProgress(2, 0))))


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        (b"", Truncated, "needs 36 bytes"),
        (_ONE[:35], Truncated, "needs 36 bytes"),
        (_changed(_ONE, 0, b"X"), FormatError, "starts with"),
        (_changed(_ONE, 8, b"\x02"), UnsupportedVersion, "version 2"),
        (_changed(_ONE, 10, b"\x1f"), FormatError, "header_size 31"),
        (_changed(_ONE, 10, b"\xff\xff"), FormatError, "header_size 65535"),
        (_changed(_ONE, 22, b"\xff\xff\xff\xff"), LimitExceeded, "4294967295 segments"),
        (_changed(_ONE, 22, b"\x02"), Truncated, "a segment's entry"),
        (_changed(_ONE, 44, b"\x01"), FormatError, "1 bitmap words for 65 bundles"),
        (_changed(_ONE, 40, (70_000).to_bytes(4, "little")), FormatError, "at most 65536 bundles"),
        (_changed(_ONE, 40, (193).to_bytes(4, "little") + b"\x04"), Truncated, "a bitmap"),
        (_changed(_TWO, 46, b"\x01"), FormatError, "listed after segment 1"),
        (_ONE[:-1] + bytes([_ONE[-1] ^ 1]), ChecksumMismatch, "the progress file has checksum"),
    ],
)
def test_files_that_are_refused(data: bytes, error: type[FormatError], reason: str) -> None:
    with pytest.raises(error, match=reason) as caught:
        decode_progress(data, source="some.file")
    assert caught.value.source == "some.file"
    assert 0 <= caught.value.offset <= len(data)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SegmentProgress(-1, 0),
        lambda: SegmentProgress(2**64, 0),
        lambda: SegmentProgress(0, 65_537),
        lambda: SegmentProgress(0, 2, 0b100),
        lambda: SegmentProgress(0, 2, -1),
        lambda: encode_progress(Progress((SegmentProgress(2, 0), SegmentProgress(1, 0)))),
        lambda: encode_progress(Progress((SegmentProgress(2, 0), SegmentProgress(2, 0)))),
    ],
)
def test_progress_that_cannot_be_written(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidBundle):
        make()


def test_the_largest_segment_fits() -> None:
    progress = Progress((SegmentProgress(0, 65_536, 2**65_536 - 1),))
    back = decode_progress(encode_progress(progress), source="f")
    assert back.entries[0].is_complete
    assert back.entries[0].is_resolved(65_535)


def test_completeness() -> None:
    assert SegmentProgress(0, 0).is_complete
    assert not SegmentProgress(0, 2, 0b01).is_complete
    assert SegmentProgress(0, 2, 0b01).is_resolved(0)
    assert not SegmentProgress(0, 2, 0b01).is_resolved(1)


@pytest.mark.parametrize(
    "name", ["exporter-otlp", "backup_s3", "A" * 64, "console", "com", "com10"]
)
def test_subscriber_ids(name: str) -> None:
    assert progress_path(Path("/s"), name) == Path(f"/s/quiver.sub.{name}")


@pytest.mark.parametrize(
    "name",
    ["", "A" * 65, "a.b", "..", "a/b", "a\\b", "a b", "ä", "a\n", "CON", "nul", "Com1", "LPT9"],
)
def test_subscriber_ids_that_must_not_become_a_path(name: str) -> None:
    with pytest.raises(InvalidName):
        check_subscriber_id(name)


def test_progress_on_disk_survives_a_power_cut_old_or_new() -> None:
    path = progress_path(Path("/"), "x")
    old, new = (Progress((SegmentProgress(0, 2, bits),)) for bits in (0b01, 0b11))

    def script(disk: SimulatedDisk, acknowledge: Callable[[Progress], None]) -> None:
        for progress in (old, new):
            store_progress(disk, path, progress)
            acknowledge(progress)

    def check(disk: SimulatedDisk, stored: Sequence[Progress]) -> None:
        if stored:
            assert load_progress(disk, path) in (stored[-1], new)

    report = explore(script, check, seed=1)
    assert report.violations == [], str(report)
    assert report.states > 20


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimulatedDisk()
    store_progress(disk, Path("/p"), Progress())
    monkeypatch.setattr(progress_module, "MAX_FILE_SIZE", 35)
    with pytest.raises(QuiverError, match="36 bytes; at most 35"):
        load_progress(disk, Path("/p"))
