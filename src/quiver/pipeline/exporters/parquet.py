"""Parquet files in the lake's schema, by signal and date: ``<url>/traces/date=2026-11-15/<ulid>``.

Items are gathered, decoded together, and written when ``max_rows`` or ``max_bytes`` are reached or
the first of them has waited for ``max_delay``; sooner if many wait and no more come, because those
who send may have as many on their way as they are allowed. An item is taken when every file with
rows of it is durable; many wait for one file. A file is whole or not there: directories get it
under a name of its own first, object stores get it with one call.

The date is that of the event, in UTC: the start of a span, the time of a record (when it was seen,
if it has none) or of a point. What has no time is in ``date=1970-01-01``.

An item with a request that cannot be read is refused, and nothing of it is written; the others are
not affected. A file that cannot be written makes its items come back later. Then those that have
rows of another date, too, are there twice.

=======================================  ===========================================================
metric                                   what
=======================================  ===========================================================
``quiver.parquet.files_total``           files written, by ``signal``
``quiver.parquet.rows_total``            their rows, by ``signal``
``quiver.parquet.bytes_total``           their bytes, by ``signal``
``quiver.parquet.flushes_total``         rounds of files by ``reason``: rows, bytes, dates, delay,
                                         silence, stop
``quiver.parquet.failures_total``        files that could not be written
``quiver.parquet.refused_total``         items that found no room: four times ``max_bytes`` wait
``quiver.parquet.waiting_bytes``         bytes of items that wait for their file
``quiver.parquet.write_seconds``         how long it takes to write one file
=======================================  ===========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ulid import ULID

from quiver.bundle import Signal
from quiver.errors import DeliveryError, InvalidConfig, InvalidRequest, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.otlp.convert import decode
from quiver.pipeline.exporters.as_otlp import converted
from quiver.pipeline.exporters.files import Files, open_files
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import ParquetOptions

logger = logging.getLogger(__name__)

_MAX_DATES: Final = 400
"""Of one round of files: more than a year, and few enough not to fill a disk with small files."""
_MAX_DECODED_AT_ONCE: Final = 8 * 1024 * 1024
_WAITING_SHARE: Final = 4
_CROWD: Final = 16
_SILENCE: Final = 1.0
"""So many items wait, and so long none came: nobody else will come before these are done."""
_RETRY_AFTER: Final = 1.0
_DAY: Final = 86_400_000_000
_DAYS_BASE: Final = 2**20
"""More than the days that 63 bits of nanoseconds have."""
_TIME_COLUMNS: Final = {Signal.TRACES: "start_time", Signal.LOGS: "time", Signal.METRICS: "time"}
_COMPRESSIONS: Final = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")


@dataclass(slots=True)
class _Part:
    """An item, and whoever waits for its file."""

    item: Item
    outcome: asyncio.Future[None]
    dates: frozenset[int] = frozenset()

    def tell(self, error: DeliveryError | None) -> None:
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(None)
        else:
            self.outcome.set_exception(error)


@dataclass(slots=True)
class _Round:
    """Rows of one signal, for the next files."""

    began: float
    parts: list[_Part] = field(default_factory=list)
    tables: list[pa.RecordBatch] = field(default_factory=list)
    dates: set[int] = field(default_factory=set)
    rows: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Rows of several items, and those that have none because they cannot be read."""

    parts: list[_Part]
    table: pa.RecordBatch | None
    refused: list[tuple[_Part, Undeliverable]]


class ParquetExporter:
    """Writes Parquet files. ``files`` is where to, when it is not what ``url`` says."""

    max_in_flight = 65_536
    """Items that may wait at the same time. With a sender that keeps fewer on their way files are
    small, and each of them waits for a silence or ``max_delay``."""

    def __init__(
        self,
        name: str,
        options: ParquetOptions,
        *,
        metrics: Metrics | None = None,
        files: Files | None = None,
    ) -> None:
        if options.max_rows < 1 or options.max_bytes < 1 or options.max_delay <= 0:
            raise InvalidConfig(
                f"{name}: max_rows and max_bytes must be at least 1, max_delay above 0"
            )
        if options.compression not in _COMPRESSIONS:
            raise InvalidConfig(
                f"{name}: compression is {options.compression!r}; it can be "
                f"{', '.join(_COMPRESSIONS)}"
            )
        self.name = name
        self._options = options
        self._metrics = metrics or Metrics()
        self._files = files or open_files(options.url)
        self._arrived: dict[Signal, list[_Part]] = {signal: [] for signal in _TIME_COLUMNS}
        self._rounds: dict[Signal, _Round] = {}
        self._changed = asyncio.Event()
        self._waiting_bytes = 0
        self._last_came = 0.0
        self._is_stopping = False
        self._worker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to decode and write."""
        self._is_stopping = False
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def take(self, item: Item) -> None:
        """Return when all rows of the item are in files that last."""
        if self._worker is None or self._is_stopping:
            raise TryLater(f"{self.name} is not running")
        size = item.size
        limit = _WAITING_SHARE * self._options.max_bytes
        if self._waiting_bytes and self._waiting_bytes + size > limit:
            self._metrics.count("quiver.parquet.refused_total", node=self.name)
            raise TryLater(f"{self.name}: {self._waiting_bytes} bytes wait already", _RETRY_AFTER)
        part = _Part(item, asyncio.get_running_loop().create_future())
        self._arrived[item.signal].append(part)
        self._last_came = _now()
        self._changed.set()
        self._waits(size)
        try:
            await part.outcome
        finally:
            self._waits(-size)

    def _waits(self, change: int) -> None:
        self._waiting_bytes += change
        self._metrics.set("quiver.parquet.waiting_bytes", self._waiting_bytes, node=self.name)

    async def stop(self, deadline: float) -> None:
        """Write what is there, until the deadline; the rest comes back later."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._is_stopping = True
        self._changed.set()
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait([worker], timeout=left)
        worker.cancel()
        await asyncio.wait([worker])
        waiting = [part for parts in self._arrived.values() for part in parts]
        waiting += [part for gathered in self._rounds.values() for part in gathered.parts]
        for part in waiting:
            part.tell(TryLater(f"{self.name} was stopped before the file was written"))

    # --- one worker: decode what came, write what is due ------------------------------------------

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            for signal, arrived in self._arrived.items():
                while arrived:
                    await self._gather(signal, _first(arrived))
                    await self._write_due()
            await self._write_due()
            if self._is_stopping and not self._rounds and not any(self._arrived.values()):
                return
            if self._changed.is_set():
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(
                    min(map(self._due, self._rounds.values()), default=None)
                ):
                    await self._changed.wait()

    def _due(self, gathered: _Round) -> float:
        """When a round is written, if nothing comes that fills it."""
        due = gathered.began + self._options.max_delay
        return min(due, self._last_came + _SILENCE) if len(gathered.parts) >= _CROWD else due

    async def _gather(self, signal: Signal, parts: list[_Part]) -> None:
        """Decode items and add their rows to the round."""
        try:
            decoded = await asyncio.to_thread(_decode, signal, parts)
        except asyncio.CancelledError:
            self._arrived[signal][:0] = parts
            raise
        except Exception as error:
            logger.exception("%s: decoding failed", self.name)
            for part in parts:
                part.tell(TryLater(f"{self.name}: decoding failed: {error!r}"))
            return
        for part, refusal in decoded.refused:
            part.tell(refusal)
        if decoded.table is None:
            return
        gathered = self._rounds.get(signal)
        if gathered is None:
            gathered = self._rounds[signal] = _Round(_now())
        gathered.parts += decoded.parts
        gathered.tables.append(decoded.table)
        gathered.dates.update(*(part.dates for part in decoded.parts))
        gathered.rows += decoded.table.num_rows
        gathered.size += decoded.table.nbytes

    def _reason(self, gathered: _Round) -> str | None:
        if gathered.rows >= self._options.max_rows:
            return "rows"
        if gathered.size >= self._options.max_bytes:
            return "bytes"
        if len(gathered.dates) >= _MAX_DATES:
            return "dates"
        if _now() >= gathered.began + self._options.max_delay:
            return "delay"
        if _now() >= self._due(gathered):
            return "silence"
        return "stop" if self._is_stopping else None

    async def _write_due(self) -> None:
        for signal, gathered in list(self._rounds.items()):
            reason = self._reason(gathered)
            if reason is not None:
                self._metrics.count("quiver.parquet.flushes_total", node=self.name, reason=reason)
                try:
                    await self._write(signal, gathered)
                except Exception as error:
                    logger.exception("%s: writing failed", self.name)
                    for part in gathered.parts:
                        part.tell(TryLater(f"{self.name}: writing failed: {error!r}"))
                del self._rounds[signal]

    async def _write(self, signal: Signal, gathered: _Round) -> None:
        """One file for each date; whoever has rows in one that failed comes back."""
        table = pa.Table.from_batches(gathered.tables)
        days = _days(signal, table)
        failed: dict[int, Exception] = {}
        for day in sorted(gathered.dates):
            try:
                await self._write_file(signal, table, days, day)
            except Exception as error:  # noqa: BLE001 - whatever it is, the items come back
                failed[day] = error
                self._metrics.count("quiver.parquet.failures_total", node=self.name)
                logger.warning("%s: a file was not written: %s", self.name, error)
        for part in gathered.parts:
            errors = [failed[day] for day in part.dates if day in failed]
            part.tell(TryLater(f"{self.name}: {errors[0]}") if errors else None)

    async def _write_file(
        self, signal: Signal, table: pa.Table, days: np.ndarray[Any, Any], day: int
    ) -> None:
        began = time.perf_counter()
        compression = self._options.compression
        rows, data = await asyncio.to_thread(_parquet, table, days, day, compression)
        path = f"{signal}/date={np.datetime64(day, 'D')}/{ULID()}.parquet"
        await self._files.write(path, data)
        names: dict[str, Any] = {"node": self.name, "signal": str(signal)}
        self._metrics.count("quiver.parquet.files_total", **names)
        self._metrics.count("quiver.parquet.rows_total", rows, **names)
        self._metrics.count("quiver.parquet.bytes_total", data.size, **names)
        self._metrics.observe("quiver.parquet.write_seconds", time.perf_counter() - began)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _first(arrived: list[_Part]) -> list[_Part]:
    """Takes as many as are decoded in one call; at least one."""
    size = count = 0
    for part in arrived:
        size += part.item.size
        if count and size > _MAX_DECODED_AT_ONCE:
            break
        count += 1
    taken = arrived[:count]
    del arrived[:count]
    return taken


# --- in threads -----------------------------------------------------------------------------------


def _decode(signal: Signal, parts: Sequence[_Part]) -> _Decoded:
    """The rows of items. Those that cannot be read are found, and the others decoded again."""
    refused: list[tuple[_Part, Undeliverable]] = []
    good: list[_Part] = []
    requests: list[bytes] = []
    part_of_request: list[int] = []
    for part in parts:
        try:
            own = converted(part.item)
        except Undeliverable as error:
            refused.append((part, error))
            continue
        part_of_request += [len(good)] * len(own)
        requests += own
        good.append(part)
    if not good:
        return _Decoded([], None, refused)
    try:
        decoded = decode(signal, requests)
        failures = {part_of_request[error.request]: error for error in decoded.failures}
    except InvalidRequest as error:  # of all of them together, or of the only one
        if len(good) > 1:
            return _decode_halves(signal, good, refused)
        failures = {0: error}
    if failures:
        refused += [(good[place], Undeliverable(str(error))) for place, error in failures.items()]
        rest = [part for place, part in enumerate(good) if place not in failures]
        again = _decode(signal, rest)
        return _Decoded(again.parts, again.table, refused + again.refused)
    table: Any = decoded.table
    days = _days(signal, table)
    owner = np.array(part_of_request, np.int64)[decoded.requests.to_numpy()]
    found = np.unique(owner * _DAYS_BASE + days)
    ends = np.searchsorted(found, np.arange(len(good) + 1) * _DAYS_BASE)
    for place, part in enumerate(good):
        part.dates = frozenset((found[ends[place] : ends[place + 1]] % _DAYS_BASE).tolist())
    crowded = [part for part in good if len(part.dates) > _MAX_DATES]
    if crowded:
        reason = f"it has items of more than {_MAX_DATES} days: send them in several requests"
        refused += [(part, Undeliverable(reason)) for part in crowded]
        again = _decode(signal, [part for part in good if part not in crowded])
        return _Decoded(again.parts, again.table, refused + again.refused)
    return _Decoded(good, table, refused)


def _decode_halves(
    signal: Signal, parts: list[_Part], refused: list[tuple[_Part, Undeliverable]]
) -> _Decoded:
    half = len(parts) // 2
    first, second = _decode(signal, parts[:half]), _decode(signal, parts[half:])
    refused = refused + first.refused + second.refused
    tables = [found.table for found in (first, second) if found.table is not None]
    table = pa.concat_batches(tables) if tables else None  # type: ignore[attr-defined]  # is there
    return _Decoded(first.parts + second.parts, table, refused)


def _days(signal: Signal, table: pa.Table | pa.RecordBatch) -> np.ndarray[Any, Any]:
    """For each row the days since 1970."""
    column: Any = table.column(_TIME_COLUMNS[signal])
    micros = column.cast(pa.int64()).fill_null(0).to_numpy()
    return np.asarray(micros // _DAY, np.int64)


def _parquet(
    table: pa.Table, days: np.ndarray[Any, Any], day: int, compression: str
) -> tuple[int, pa.Buffer]:
    """The rows of a day: how many, and the file."""
    chosen = days == day
    rows = table if chosen.all() else table.filter(pa.array(chosen))
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression=cast("Any", compression))  # one of those above
    return rows.num_rows, sink.getvalue()
