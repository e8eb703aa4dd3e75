"""Requests to batches: groups, sizes, and what cannot be read among what can."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from quiver.bundle import Signal
from quiver.config import OtlpConfig
from quiver.errors import InvalidRequest, LakeError
from quiver.lake import batches
from quiver.lake.batches import Place, Request, Scan
from quiver.lake.source_options import Given, Wanted, read_wanted
from quiver.otlp import Source, decode
from quiver.otlp.convert import Decoded
from quiver.testing import Shape, Telemetry


def wanted(**options: str) -> Wanted:
    return read_wanted(Given({"signal": "traces", **options}, ["signal", *options]), "none")


def scan(**options: str) -> Scan:
    asked = wanted(columns="span_id,source_segment,ingested_time", **options)
    return Scan(asked, asked.schema, fail_on_loss=True)


def requests(data: list[bytes], *, in_log: int = 0) -> Iterator[Request]:
    for number, one in enumerate(data):
        segment = None if number < in_log else number
        place = Place("s", segment, 0, f"place {number}")
        yield Request(place, Signal.TRACES, 0, one, 1_000 * number)


DATA = Telemetry(3, Shape(items_per_request=10)).take(Signal.TRACES, 8)
SPANS = decode(Signal.TRACES, DATA).table.column("span_id").to_pylist()


@pytest.mark.parametrize("group_bytes", [1, len(DATA[0]) * 3, 10**9])
@pytest.mark.parametrize("in_log", [0, 3, 8])
def test_groups_and_sizes_change_no_row(
    monkeypatch: pytest.MonkeyPatch, group_bytes: int, in_log: int
) -> None:
    monkeypatch.setattr(batches, "MAX_ROWS", 7)
    monkeypatch.setattr(batches, "GROUP_BYTES", group_bytes)
    found = list(scan().requests(requests(DATA, in_log=in_log)))
    assert all(0 < batch.num_rows <= 7 for batch in found)
    table = pa.Table.from_batches(found)
    assert table.column("span_id").to_pylist() == SPANS
    segments = [None if number < in_log else number for number in range(8)]
    assert table.column("source_segment").to_pylist() == [
        number for number in segments for _ in range(10)
    ]
    came = [number or None for number in range(8) for _ in range(10)]  # 0: nobody knows
    assert table.column("ingested_time").cast(pa.int64()).to_pylist() == came


def test_a_group_that_cannot_be_one_table_becomes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(
        signal: Signal, data: list[bytes], config: OtlpConfig, sources: list[Source]
    ) -> Decoded:
        if len(data) > 1 or data[0] == DATA[2]:
            raise InvalidRequest("too much is repeated")
        return decode(signal, data, config, sources)

    monkeypatch.setattr(batches, "decode", strict)
    with pytest.raises(LakeError, match=r"place 2, request 0 cannot be read.*too much"):
        list(scan().requests(requests(DATA)))
    rows = pa.Table.from_batches(list(scan(malformed="skip").requests(requests(DATA))))
    assert rows.column("span_id").to_pylist() == SPANS[:20] + SPANS[30:]


def test_what_cannot_be_read_does_not_move_what_can() -> None:
    data = [*DATA[:2], b"\xff\xff", *DATA[2:]]
    rows = pa.Table.from_batches(list(scan(malformed="skip").requests(requests(data))))
    assert rows.column("span_id").to_pylist() == SPANS
    assert rows.column("source_segment").to_pylist()[20:30] == [3] * 10
    assert rows.column("ingested_time").cast(pa.int64()).to_pylist()[20:30] == [3] * 10
