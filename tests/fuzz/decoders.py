"""Every decoder, called the way Quiver calls it, and held to the one promise about bad input:

bytes end in a value or in a ``FormatError`` that names source, offset and reason. Values that
``Validation.FULL`` let through can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa

from quiver.disk import Disk
from quiver.errors import FormatError
from quiver.ipc import IpcFile, Validation, decode_stream
from quiver.segment.layout import decode_envelope
from quiver.segment.reader import SegmentReader
from quiver.subscriber.progress import decode_progress, encode_progress
from quiver.wal.cursor import decode_cursor, encode_cursor
from quiver.wal.entry import decode_body
from quiver.wal.files import find_files
from quiver.wal.header import HEADER_SIZE, decode_header
from quiver.wal.replay import DamagedRange, replay
from quiver.wal.scan import Found, scan

SOURCE: Final = "somewhere/file"
MAX_ROWS_USED = 40
MAX_ITEMS_USED = 5_000
MAX_BUNDLES_USED = 50


class Contract:
    """Collects how the calls of one case ended, and fails when one ended as none may."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    @contextmanager
    def decoding(self) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            check_error(error)
            self.outcomes.append(type(error).__name__)
        else:
            self.outcomes.append("value")


def check_error(error: FormatError, source: str = SOURCE) -> None:
    assert error.source == source
    assert error.offset >= 0
    assert error.reason
    assert not isinstance(error.__cause__, MemoryError), "tried to allocate before it refused"


# --- using what was decoded --------------------------------------------------------------------


def use(batch: pa.RecordBatch) -> None:
    """Touch the values: the first rows and the last, printed, converted and written again."""
    for column in batch.columns:
        for start in (0, max(0, len(column) - MAX_ROWS_USED)):
            rows: pa.Array[Any] = column.slice(start, MAX_ROWS_USED)
            if item_count(rows) <= MAX_ITEMS_USED:
                _quietly(rows.to_string)
                _quietly(rows.to_pylist)
    if batch.get_total_buffer_size() <= 2**20:
        _quietly(batch.serialize)


def _quietly(call: Callable[[], object]) -> None:
    """Call it: a time or a zone that Python cannot express is an exception there, and fine here."""
    with suppress(Exception):
        call()


def item_count(array: pa.Array[Any]) -> int:
    """At most how many Python objects the array becomes: a few bytes can stand for very many."""
    count = len(array)
    if isinstance(array, pa.ExtensionArray):
        return item_count(array.storage)
    if isinstance(array, pa.DictionaryArray):
        return count * _items_each(array.dictionary)
    if isinstance(array, pa.RunEndEncodedArray | pa.ListViewArray | pa.LargeListViewArray):
        return count * item_count(array.values)
    if isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        return count + item_count(array.values)
    if isinstance(array, pa.StructArray | pa.UnionArray):
        return count + sum(item_count(array.field(i)) for i in range(array.type.num_fields))
    return count


def _items_each(values: pa.Array[Any]) -> int:
    return 1 if values.type.num_fields == 0 else item_count(values)


# --- the decoders ------------------------------------------------------------------------------


def header(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        decoded = decode_header(data, source=SOURCE)
        assert HEADER_SIZE <= decoded.header_size <= len(data)
        assert 0 <= decoded.wal_position_start < 2**64


def cursor(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        position = decode_cursor(data, source=SOURCE)
        assert decode_cursor(encode_cursor(position), source=SOURCE) == position


def progress(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        decoded = decode_progress(data, source=SOURCE)
        assert decode_progress(encode_progress(decoded), source=SOURCE) == decoded
        decoded.flag_names()


def wal(data: bytes, contract: Contract) -> None:
    """The header, then a scan, which must cover every byte once and in order, then a replay."""
    header(data, contract)
    start = HEADER_SIZE
    if contract.outcomes[-1] == "value":
        start = decode_header(data, source=SOURCE).header_size
    position = min(start, len(data))
    buffer = pa.py_buffer(data)
    for item in scan(buffer, start, source=SOURCE):
        assert item.offset == position < item.end <= len(data)
        position = item.end
        if isinstance(item, Found):
            for validation in Validation:
                with contract.decoding():
                    bundle = item.entry.bundle(validation)
                    if validation is Validation.FULL:
                        for payload in bundle.payloads.values():
                            use(payload.batch)
    assert position == len(data)
    log({"quiver.wal.1": data, "quiver.wal": data}, len(data) // 2)


def body(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        decode_body(pa.py_buffer(data), 0, len(data), source=SOURCE).bundle()


def stream(data: bytes, contract: Contract) -> None:
    for validation in Validation:
        with contract.decoding():
            batch = decode_stream(
                pa.py_buffer(data), source=SOURCE, offset=7, validation=validation
            )
            if validation is Validation.FULL:
                use(batch)


def file(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        opened = IpcFile(pa.py_buffer(data), source=SOURCE, offset=7)
        for index in range(min(opened.batch_count, MAX_BUNDLES_USED)):
            for validation in Validation:
                with contract.decoding():
                    batch = opened.batch(index, validation)
                    if validation is Validation.FULL:
                        use(batch)


def envelope(data: bytes, contract: Contract) -> None:
    with contract.decoding():
        decoded = decode_envelope(data, source=SOURCE)
        for region in (decoded.directory, decoded.manifest, decoded.footer):
            assert 0 <= region.offset <= region.end <= len(data)


def segment(data: bytes, contract: Contract) -> None:
    """Open, then the manifest, every bundle and the sum, each of which may fail on its own."""
    envelope(data, contract)
    for validation in Validation:
        with contract.decoding():
            reader = SegmentReader(pa.py_buffer(data), source=SOURCE, validation=validation)
            with contract.decoding():
                reader.verify()
            with contract.decoding():
                count = len(reader.manifest)
                for index in range(min(count, MAX_BUNDLES_USED)):
                    with contract.decoding():
                        bundle = reader.bundle(index)
                        if validation is Validation.FULL:
                            for payload in bundle.payloads.values():
                                use(payload.batch)


class _Buffers:
    """As much of a disk as reading a log takes: files in memory, in one directory."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def list_directory(self, path: Path) -> list[str]:
        return sorted(self._files)

    def size(self, path: Path) -> int:
        return len(self._files[path.name])

    def read(self, path: Path, offset: int = 0, length: int | None = None) -> pa.Buffer:
        end = None if length is None else offset + length
        return pa.py_buffer(self._files[path.name][offset:end])

    def map(self, path: Path) -> pa.Buffer:
        return pa.py_buffer(self._files[path.name])


def log(files: dict[str, bytes], from_position: int) -> None:
    """Replay these files as one log. Damage is reported, never raised."""
    disk = cast("Disk", _Buffers(files))
    position = -1
    for item in replay(disk, find_files(disk, Path("log")), from_position):
        assert item.position >= position
        if isinstance(item, DamagedRange):
            assert len(item.data) > 0
            position = item.position + len(item.data)
        else:
            assert item.end_position > item.position
            position = item.end_position


DECODERS: Final[dict[str, Callable[[bytes, Contract], None]]] = {
    "header": header,
    "cursor": cursor,
    "progress": progress,
    "wal": wal,
    "body": body,
    "stream": stream,
    "file": file,
    "envelope": envelope,
    "segment": segment,
}


def exercise(kind: str, data: bytes) -> list[str]:
    """Give the bytes to the decoders of a kind of file; how each call ended."""
    contract = Contract()
    DECODERS[kind](data, contract)
    return contract.outcomes
