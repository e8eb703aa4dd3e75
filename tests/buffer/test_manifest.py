"""The manifest: the bytes of the other implementation, what is kept, and what is refused."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.buffer import manifest as codec
from quiver.buffer.manifest import EMPTY, Footer, coalesce, next_epoch
from quiver.buffer.types import Facts, Metadata, NewEntry, QueueEntry
from quiver.errors import FormatError, LimitExceeded, Truncated, UnsupportedVersion

GOLDEN = Path(__file__).parents[1] / "golden" / "buffer"
SOURCE = "ingest/manifest"
PLACE = "ingest/01ARZ3NDEKTSV4RRFFQ69G5FA"
ONE = NewEntry(f"{PLACE}V.batch", (Metadata(0, 1_700_000_000_000, b"\1\1\1\0"),))
TWO = NewEntry(f"{PLACE}W.batch", (Metadata(0, -1, b""), Metadata(2, 1_700_000_000_001, b"ab")))
FACTS = Facts(2**64 - 1, 2**32 - 1, 0xE3069283, "producer-7")


def append(manifest: bytes, *new: NewEntry) -> bytes:
    return codec.append(manifest, new, source=SOURCE)


def dequeue(manifest: bytes, through: int) -> bytes:
    return codec.dequeue(manifest, through, source=SOURCE)


def entries(manifest: bytes) -> tuple[QueueEntry, ...]:
    return codec.entries(manifest, source=SOURCE)


def footer(count: int, next_sequence: int, epoch: int = 0, version: int = 1) -> bytes:
    return struct.pack("<IQQH", count, next_sequence, epoch, version)


def item(index: int, payload: bytes = b"p", size: int | None = None, time_ms: int = 5) -> bytes:
    return struct.pack("<IqI", index, time_ms, len(payload) if size is None else size) + payload


def entry(
    sequence: int,
    location: bytes = b"",
    items: Sequence[bytes] = (),
    *,
    count: int | None = None,
    length: int | None = None,
    extra: bytes = b"",
) -> bytes:
    """An entry by hand, with any of its numbers as wanted."""
    location = location or b"at/%d" % sequence
    body = struct.pack("<QH", sequence, len(location)) + location
    body += struct.pack("<I", len(items) if count is None else count) + b"".join(items) + extra
    return struct.pack("<I", len(body) if length is None else length) + body


# --- the bytes of the other implementation -----------------------------------------------------


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


def test_the_other_implementation_writes_the_same() -> None:
    two = append(append(EMPTY, ONE), TWO)
    owned = codec.set_epoch(two, 1, source=SOURCE)
    assert golden("M0_empty") == EMPTY
    assert append(EMPTY, ONE) == golden("M1_one")
    assert two == append(EMPTY, ONE, TWO) == golden("M2_two")
    assert owned == golden("M3_epoch1")
    assert dequeue(owned, 0) == golden("M4_dequeue0")
    assert dequeue(owned, 99) == golden("M5_dequeue99")


@pytest.mark.parametrize(
    ("name", "footer_", "sequences"),
    [
        ("M0_empty", Footer(0, 0, 0), []),
        ("M1_one", Footer(1, 1, 0), [0]),
        ("M2_two", Footer(2, 2, 0), [0, 1]),
        ("M3_epoch1", Footer(2, 2, 1), [0, 1]),
        ("M4_dequeue0", Footer(1, 2, 1), [1]),
        ("M5_dequeue99", Footer(0, 2, 1), []),
    ],
)
def test_what_the_other_implementation_wrote_is_read(
    name: str, footer_: Footer, sequences: list[int]
) -> None:
    data = golden(name)
    assert codec.decode_footer(data[-22:], source=SOURCE) == footer_
    assert codec.check(data, source=SOURCE) == footer_
    assert entries(data) == tuple(QueueEntry(n, *(ONE, TWO)[n]) for n in sequences)
    assert codec.locations(data, source=SOURCE) == {(ONE, TWO)[n].location: n for n in sequences}


def test_the_empty_manifest() -> None:
    assert bytes(20) + b"\1\0" == EMPTY


# --- a model -----------------------------------------------------------------------------------

facts = st.builds(
    Facts,
    st.none() | st.integers(0, 2**64 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | st.text(st.characters(codec="ascii"), min_size=1, max_size=64),
)
payloads = st.binary(max_size=6)


@st.composite
def metadata(draw: st.DrawFn) -> tuple[Metadata, ...]:
    above = draw(st.sets(st.integers(1, 2**32 - 1), max_size=3))
    indices = [0, *sorted(above)][: draw(st.integers(0, 4))]
    times = st.integers(-(2**63), 2**63 - 1)
    return tuple(Metadata(index, draw(times), draw(payloads)) for index in indices)


steps = st.lists(
    st.lists(st.tuples(metadata(), facts), max_size=4) | st.integers(-2, 3) | st.just("epoch"),
    max_size=12,
)


@given(steps, st.text(st.characters(codec="utf-8"), max_size=5))
def test_a_manifest_is_a_list(steps_: list[object], stem: str) -> None:
    manifest, model, given_, epoch = EMPTY, list[QueueEntry](), 0, 0
    for step in steps_:
        if step == "epoch":
            epoch = next_epoch(epoch)
            manifest = codec.set_epoch(manifest, epoch, source=SOURCE)
        elif isinstance(step, int):
            through = (model[0].sequence if model else given_) + step
            manifest = dequeue(manifest, through)
            model = [one for one in model if one.sequence > through]
        elif isinstance(step, list):
            new = [NewEntry(f"{stem}{given_ + n}", *told) for n, told in enumerate(step)]
            manifest = append(manifest, *new)
            model += [QueueEntry(given_ + n, *one) for n, one in enumerate(new)]
            given_ += len(new)
        assert codec.check(manifest, source=SOURCE) == Footer(len(model), given_, epoch)
        assert entries(manifest) == tuple(model)
        assert codec.locations(manifest, source=SOURCE) == {
            one.location: one.sequence for one in model
        }


def test_some_of_the_entries() -> None:
    manifest = dequeue(append(EMPTY, *(NewEntry(str(n), ()) for n in range(10))), 3)

    def found(after: int, at_most: int | None) -> list[int]:
        some = codec.entries(manifest, source=SOURCE, after=after, at_most=at_most)
        assert all(one.location == str(one.sequence) for one in some)
        return [one.sequence for one in some]

    assert found(-1, None) == found(3, None) == [4, 5, 6, 7, 8, 9]
    assert found(4, 2) == [5, 6]
    assert found(8, 5) == [9]
    assert found(9, None) == found(2**64, None) == found(0, 0) == []


# --- what stays as it is -----------------------------------------------------------------------


def test_what_others_put_into_an_entry_is_kept() -> None:
    entries_ = [
        entry(6, items=[item(0)], extra=b"somebody else's"),
        entry(7, extra=b"Q"),
        entry(8, extra=codec.encode_facts(FACTS) + b"\x63\x02\x00hi"),
        entry(9),
    ]
    manifest = b"".join(entries_) + footer(4, 10, 3)
    assert [one.facts for one in entries(manifest)] == [Facts(), Facts(), FACTS, Facts()]
    assert entries(manifest)[0].metadata == (Metadata(0, 5, b"p"),)
    longer = append(manifest, ONE)
    assert longer.startswith(b"".join(entries_))
    assert dequeue(longer, 6)[:-22] == longer[len(entries_[0]) : -22]
    assert codec.set_epoch(longer, 9, source=SOURCE)[:-22] == longer[:-22]


def test_nothing_to_do_changes_nothing() -> None:
    manifest = dequeue(append(EMPTY, ONE, TWO), 0)
    assert append(manifest) == manifest
    assert dequeue(manifest, 0) == manifest
    assert dequeue(manifest, -5) == manifest


def test_sequences_go_on_after_all_entries_are_gone() -> None:
    manifest = append(dequeue(append(EMPTY, ONE), 0), TWO)
    assert [one.sequence for one in entries(manifest)] == [1]


def test_epochs_wrap_around_and_leave_the_last_number_out() -> None:
    assert next_epoch(0) == 1
    assert next_epoch(2**64 - 3) == 2**64 - 2
    assert next_epoch(2**64 - 2) == 0
    assert next_epoch(2**64 - 1) == 0
    for epoch in (-1, 2**64 - 1, 2**64):
        with pytest.raises(LimitExceeded):
            codec.set_epoch(EMPTY, epoch, source=SOURCE)


# --- facts -------------------------------------------------------------------------------------


@given(facts, st.sampled_from([b"", b"\x05\0\0", b"\xff\x03\0abc\x07\x01\0x"]))
def test_facts_come_back_whatever_else_is_said(told: Facts, unknown: bytes) -> None:
    encoded = codec.encode_facts(told)
    assert bool(encoded) == (told != Facts())
    if encoded:
        assert codec.decode_facts(encoded + unknown) == told
        assert codec.decode_facts(encoded[:5] + unknown + encoded[5:]) == told


def test_facts_byte_for_byte() -> None:
    assert codec.encode_facts(Facts(0x0102, 3, 4, "me")).hex(" ") == (
        "51 76 45 46 01 "
        "01 08 00 02 01 00 00 00 00 00 00 "
        "02 04 00 03 00 00 00 "
        "03 04 00 04 00 00 00 "
        "04 02 00 6d 65"
    )
    assert codec.encode_facts(Facts(crc32c=9)) == b"QvEF\x01\x03\x04\0\x09\0\0\0"


HEAD = b"QvEF\x01"


@pytest.mark.parametrize(
    "extra",
    [
        b"",
        b"QvEF",
        b"QvEF\x02\x03\x04\0\x09\0\0\0",  # another version
        b"qvEF\x01\x03\x04\0\x09\0\0\0",  # another magic
        b"\0" + HEAD + b"\x03\x04\0\x09\0\0\0",  # somewhere else
        HEAD,
        HEAD + b"\x03\x04\0\x09\0\0",  # cut
        HEAD + b"\x03\x04\0\x09\0\0\0\x01",
        HEAD + b"\x03\x04\0\x09\0\0\0\xff\xff\xff",  # an unknown fact that is cut
        HEAD + b"\x03\x02\0\x09\0",  # the wrong length
        HEAD + b"\x03\x04\0\x09\0\0\0" * 2,  # twice
        HEAD + b"\x04\x01\0a" * 2,
        HEAD + b"\x04\0\0",
        HEAD + b"\x04\x01\0\xe4",
        HEAD + b"\x04\x41\0" + b"a" * 65,
    ],
)
def test_extras_that_are_not_ours_tell_nothing_and_do_no_harm(extra: bytes) -> None:
    assert codec.decode_facts(extra) == Facts()
    manifest = entry(0, items=[item(0)], extra=extra) + footer(1, 1)
    assert entries(manifest) == (QueueEntry(0, "at/0", (Metadata(0, 5, b"p"),)),)
    assert append(manifest, ONE)[: len(manifest) - 22] == manifest[:-22]


# --- what is refused ---------------------------------------------------------------------------

READERS: list[Callable[[bytes], object]] = [
    lambda data: codec.check(data, source=SOURCE),
    lambda data: codec.locations(data, source=SOURCE),
    entries,
    lambda data: append(data, ONE),
    append,
    lambda data: dequeue(data, 0),
    lambda data: dequeue(data, -1),
    lambda data: dequeue(data, 2**64),
    lambda data: codec.set_epoch(data, 1, source=SOURCE),
]
E0, E1 = entry(0), entry(1)  # 22 bytes each
BAD: dict[str, tuple[bytes, type[FormatError], int]] = {
    "nothing": (b"", Truncated, 0),
    "short footer": (EMPTY[1:], Truncated, 0),
    "version 0": (footer(0, 0, version=0), UnsupportedVersion, 20),
    "version 2": (E0 + footer(1, 1, version=2), UnsupportedVersion, 42),
    "uncounted entry": (E0 + E1 + footer(1, 1), FormatError, 22),
    "uncounted entry, counted as given": (E0 + E1 + footer(1, 2), FormatError, 4),
    "uncounted only entry": (E0 + footer(0, 1), FormatError, 0),
    "counted entry is missing": (E0 + footer(2, 2), LimitExceeded, 22),
    "counted entry is cut": (E0 + E1[:-1] + footer(2, 2), Truncated, 22),
    "counted entry is half": (
        entry(0, b"x" * 40) + E1[:10] + footer(2, 2), Truncated, 58,
    ),
    "very many entries": (E0 + footer(2**32 - 1, 2**32), LimitExceeded, 22),
    "more entries than sequences": (E0 + footer(1, 0), FormatError, 22),
    "garbage": (b"\xa5" * 100 + footer(1, 1), Truncated, 0),
    "zeros": (bytes(100) + footer(1, 1), FormatError, 12),
    "gap": (E0 + entry(2) + footer(2, 3), FormatError, 4),
    "gap in the middle": (E0 + entry(2) + footer(2, 2), FormatError, 26),
    "gap at the end": (E0 + E1 + footer(2, 3), FormatError, 4),
    "descending": (E1 + E0 + footer(2, 2), FormatError, 4),
    "same sequence": (E0 + entry(0, b"else") + footer(2, 2), FormatError, 26),
    "empty location": (
        struct.pack("<IQHI", 14, 0, 0, 0) + b"more" + footer(1, 1), FormatError, 12,
    ),
    "location is not UTF-8": (entry(0, b"at/\xff") + footer(1, 1), FormatError, 17),
    "location is half a letter": (entry(0, b"at/\xc3") + footer(1, 1), FormatError, 17),
    "location into the next entry": (
        entry(0, length=17) + E1 + footer(2, 2), Truncated, 0,
    ),
    "entry_len 0": (entry(0, length=0) + footer(1, 1), Truncated, 0),
    "entry_len too small": (entry(0, items=[item(0)], length=34) + footer(1, 1), Truncated, 38),
    "entry_len too large": (entry(0, length=19) + footer(1, 1), Truncated, 0),
    "entry_len over the next entry": (entry(0, length=18 + 22) + E1 + footer(2, 2), Truncated, 44),
    "entry_len largest": (entry(0, length=2**32 - 1) + footer(1, 1), Truncated, 0),
    "count without items": (entry(0, count=1) + E1 + footer(2, 2), LimitExceeded, 18),
    "very many items": (
        entry(0, items=[item(0)], count=2**32 - 1) + footer(1, 1), LimitExceeded, 18,
    ),
    "one item too many": (
        entry(0, items=[item(0, b"p" * 20)], count=2) + E1 + footer(2, 2), Truncated, 58,
    ),
    "payload into the next entry": (
        entry(0, items=[item(0, size=2)]) + E1 + footer(2, 2), Truncated, 38,
    ),
    "second payload into the next entry": (
        entry(0, items=[item(0), item(1, size=9)]) + E1 + footer(2, 2), Truncated, 55,
    ),
    "payload into the footer": (
        entry(0, items=[item(0, size=2**32 - 1)]) + footer(1, 1), Truncated, 38,
    ),
    "start_index from 1": (entry(0, items=[item(1)]) + footer(1, 1), FormatError, 22),
    "two items from 1": (entry(0, items=[item(1), item(2)]) + footer(1, 1), FormatError, 22),
    "same start_index": (entry(0, items=[item(0), item(0)]) + footer(1, 1), FormatError, 39),
    "start_index descends": (
        entry(0, items=[item(0), item(5), item(4)]) + footer(1, 1), FormatError, 56,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_damage_is_refused_by_everyone(name: str) -> None:
    data, error, offset = BAD[name]
    for read in READERS:
        with pytest.raises(error) as caught:
            read(data)
        assert type(caught.value) is error
        assert (caught.value.source, caught.value.offset) == (SOURCE, offset), caught.value


def test_the_entries_by_hand_are_good_otherwise() -> None:
    good = E0 + entry(1, items=[item(0), item(7, time_ms=-1)]) + entry(2) + footer(3, 3)
    for read in READERS:
        read(good)
    last = entry(2**64 - 2) + footer(1, 2**64 - 1)
    assert codec.locations(last, source=SOURCE) == {f"at/{2**64 - 2}": 2**64 - 2}


def test_a_footer_alone_is_refused_for_what_it_says() -> None:
    for tail, error in (
        (EMPTY[1:], Truncated),
        (footer(0, 0, version=3), UnsupportedVersion),
        (footer(2, 1), FormatError),
    ):
        with pytest.raises(error):
            codec.decode_footer(tail, source=SOURCE)
    assert codec.decode_footer(footer(7, 9, 2**64 - 1), source=SOURCE) == Footer(7, 9, 2**64 - 1)


def metadata_of(*starts: int) -> tuple[Metadata, ...]:
    return tuple(Metadata(start, 0, b"") for start in starts)


@pytest.mark.parametrize(
    ("new", "error"),
    [
        ([NewEntry("", ())], LimitExceeded),
        ([NewEntry("x" * 65_536, ())], LimitExceeded),
        ([NewEntry("ä" * 32_768, ())], LimitExceeded),
        ([NewEntry("\ud800", ())], FormatError),
        ([ONE], FormatError),
        ([TWO, TWO], FormatError),
        ([NewEntry("x", metadata_of(1))], FormatError),
        ([NewEntry("x", metadata_of(0, 0))], FormatError),
        ([NewEntry("x", metadata_of(0, 2, 1))], FormatError),
        ([NewEntry("x", metadata_of(-1))], FormatError),
        ([NewEntry("x", metadata_of(0, 2**32))], LimitExceeded),
        ([NewEntry("x", (Metadata(0, 2**63, b""),))], LimitExceeded),
        ([NewEntry("x", (), Facts(object_size=-1))], LimitExceeded),
        ([NewEntry("x", (), Facts(object_size=2**64))], LimitExceeded),
        ([NewEntry("x", (), Facts(record_count=2**32))], LimitExceeded),
        ([NewEntry("x", (), Facts(crc32c=2**32))], LimitExceeded),
        ([NewEntry("x", (), Facts(producer_id=""))], LimitExceeded),
        ([NewEntry("x", (), Facts(producer_id="a" * 65))], LimitExceeded),
        ([NewEntry("x", (), Facts(producer_id="ä"))], LimitExceeded),
    ],
)
def test_what_would_be_refused_is_not_written(
    new: list[NewEntry], error: type[FormatError]
) -> None:
    with pytest.raises(error) as caught:
        append(append(EMPTY, ONE), *new)
    assert type(caught.value) is error
    assert caught.value.source == SOURCE
    assert len(str(caught.value)) < 400


def test_the_largest_that_fits_is_written() -> None:
    new = NewEntry("x" * 65_535, (Metadata(0, 2**63 - 1, b""), Metadata(2**32 - 1, -(2**63), b"")))
    assert entries(append(EMPTY, new)) == (QueueEntry(0, *new),)


def test_sequences_do_not_overflow() -> None:
    last = footer(0, 2**64 - 2)
    assert codec.check(append(last, ONE), source=SOURCE).next_sequence == 2**64 - 1
    with pytest.raises(LimitExceeded):
        append(last, ONE, TWO)


# --- metadata ----------------------------------------------------------------------------------


def test_neighbours_with_the_same_payload_are_merged() -> None:
    items = [Metadata(n, 100 + n, payload) for n, payload in enumerate([b"a", b"a", b"b", b"a"])]
    assert coalesce(items) == (items[0], items[2], items[3])
    assert coalesce([]) == ()
    assert coalesce(items[:1]) == (items[0],)


@given(st.lists(st.sampled_from([b"", b"a", b"b"]), max_size=30))
def test_merging_changes_no_records_payload(payloads_: list[bytes]) -> None:
    merged = coalesce([Metadata(2 * n, n, payload) for n, payload in enumerate(payloads_)])
    assert all(a.payload != b.payload for a, b in pairwise(merged))
    for n, payload in enumerate(payloads_):
        assert [one for one in merged if one.start_index <= 2 * n][-1].payload == payload


# --- speed -------------------------------------------------------------------------------------


def test_an_hour_of_batches_is_checked_quickly() -> None:
    rng = random.Random(1)
    new = [
        NewEntry(f"ingest/{rng.getrandbits(104):026x}.batch", ONE.metadata) for _ in range(36_000)
    ]
    manifest = append(EMPTY, *new)
    assert len(manifest) == 36_000 * 77 + 22
    took = []
    for _ in range(5):
        start = time.process_time()
        codec.check(manifest, source=SOURCE)
        codec.locations(manifest, source=SOURCE)
        took.append(time.process_time() - start)
    assert min(took) < 0.5  # a tenth of it, on a machine with nothing else to do


def test_a_location_that_another_producer_added_twice_is_read_twice() -> None:
    manifest = E0 + entry(1, b"at/0") + footer(2, 2)
    found = codec.entries(manifest, source=SOURCE)
    assert [(one.sequence, one.location) for one in found] == [(0, "at/0"), (1, "at/0")]
    assert codec.locations(manifest, source=SOURCE) == {"at/0": 0}
    assert codec.dequeue(manifest, 0, source=SOURCE) == entry(1, b"at/0") + footer(1, 2)
