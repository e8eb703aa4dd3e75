"""OTAP over gRPC, to another server: one long-lived stream for each signal.

Items with OTAP tables go out as they are, OTLP requests are converted. An item is delivered when
the status of each of its batches is OK.

A stream begins with the first item, and again with the next one after it ended. When it ends, the
batches that have no status yet are refused with ``TryLater``. If it ends because of one of them
(INVALID_ARGUMENT, or a message that is too large), nobody says which: then batches are sent one at
a time until one is answered, so that the one to blame is found and refused for good.

A batch that has no status after ``timeout`` is refused with ``TryLater``. The stream is ended then,
unless other statuses came since the batch was sent.

``compression_method`` is that of gRPC. It has no zstd here: ``zstd`` stands for compressing the
Arrow data with it, as ``arrow.payload_compression: zstd`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
import pyarrow as pa

from quiver.bundle import Signal, Slot
from quiver.errors import DeliveryError, InvalidConfig, InvalidRequest, TryLater, Undeliverable
from quiver.metrics import Metrics
from quiver.otlp.convert import Converted, to_otap
from quiver.pipeline.exporters.answers import grpc_refusal
from quiver.pipeline.exporters.otlp_grpc import grpc_target, open_channel
from quiver.pipeline.exporters.sending import Outcomes, checked_headers
from quiver.pipeline.item import Item
from quiver.pipeline.otap_streams import OtapEncoder
from quiver.pipeline.otap_wire import (
    METHODS,
    BatchArrowRecords,
    BatchCode,
    BatchStatus,
    read_status,
    write_records,
)
from quiver.pipeline.settings.options import OtapExporterOptions

_AT_ONCE: Final = 32 * 1024
"""Bytes of an item that is converted and written without a thread."""
_GRPC_COMPRESSIONS: Final = ("none", "gzip", "deflate")
_PAYLOAD_COMPRESSIONS: Final = ("none", "zstd", "lz4")
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_BLAMES_A_BATCH: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)

Tables = Mapping[Slot, pa.RecordBatch]


class OtapExporter:
    """Sends items to an OTAP server."""

    def __init__(
        self, name: str, options: OtapExporterOptions, *, metrics: Metrics | None = None
    ) -> None:
        grpc_target(options.grpc_endpoint, options.tls)
        self.name = name
        self._options = options
        self._compression, self._payload_compression = _compressions(name, options)
        if options.max_in_flight < 1:
            raise InvalidConfig(f"{name}: max_in_flight must be at least 1")
        self._metadata = tuple(checked_headers(name, options.headers).items())
        self._outcomes = Outcomes(name, metrics or Metrics())
        self._places = asyncio.Semaphore(options.max_in_flight)
        self._channel: grpc.aio.Channel | None = None
        self._streams: Mapping[Signal, _Stream] = {}

    async def start(self) -> None:
        """Open the channel; it connects with the first item."""
        options = self._options
        channel = open_channel(options.grpc_endpoint, options.tls, self._compression)
        self._streams = {
            signal: _Stream(
                channel.stream_stream(method),
                self._metadata,
                options.grpc_endpoint,
                options.timeout,
                self._payload_compression,
                self._outcomes,
            )
            for signal, method in METHODS.items()
        }
        self._channel = channel

    async def take(self, item: Item) -> None:
        """Return when the server has taken all batches of the item."""
        batches, mistake = await _as_otap(item)
        errors = await asyncio.gather(*(self._outcome(item.signal, tables) for tables in batches))
        if mistake is not None:
            errors.append(mistake)
        later = [error for error in errors if isinstance(error, TryLater)]
        for error in (*later, *errors):
            if error is not None:
                raise error
        self._outcomes.delivered(item)

    async def _outcome(self, signal: Signal, tables: Tables) -> DeliveryError | None:
        outcomes = self._outcomes
        outcomes.waits(1)
        try:
            await self._places.acquire()
        finally:
            outcomes.waits(-1)
        outcomes.is_sent(1)
        began = time.perf_counter()
        try:
            if self._channel is None:
                raise TryLater(f"{self.name} is not running")
            await self._streams[signal].send(tables)
        except DeliveryError as error:
            outcomes.request("later" if isinstance(error, TryLater) else "never")
            return error
        finally:
            self._places.release()
            outcomes.is_sent(-1)
            outcomes.metrics.observe("quiver.exporter.send_seconds", time.perf_counter() - began)
        outcomes.request("delivered")
        return None

    async def stop(self, deadline: float) -> None:
        """Let batches be answered until the deadline, then cut the streams short."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._outcomes.is_quiet()
        for stream in self._streams.values():
            await stream.close()
        await channel.close()


def _compressions(name: str, options: OtapExporterOptions) -> tuple[str, str]:
    """That of gRPC, and that of the payloads."""
    method, payload = options.compression_method, options.arrow.payload_compression
    if payload not in _PAYLOAD_COMPRESSIONS:
        raise InvalidConfig(
            f"{name}: arrow.payload_compression is {payload!r}; it can be "
            f"{', '.join(_PAYLOAD_COMPRESSIONS)}"
        )
    if method == "zstd":
        if payload == "lz4":
            raise InvalidConfig(
                f"{name}: compression_method zstd compresses the payloads, and "
                "arrow.payload_compression says lz4: choose one of them"
            )
        return "none", "zstd"
    if method not in _GRPC_COMPRESSIONS:
        raise InvalidConfig(
            f"{name}: compression_method is {method!r}; it can be "
            f"{', '.join(_GRPC_COMPRESSIONS)} or zstd"
        )
    return method, payload


async def _as_otap(item: Item) -> tuple[list[Tables], Undeliverable | None]:
    """The batches of an item, and what is wrong with those of its requests that are not there."""
    if item.tables:
        return [item.tables], None
    if item.size <= _AT_ONCE:
        made = _converted(item)
    else:
        made = await asyncio.to_thread(_converted, item)
    if not made.failures:
        return list(made.batches), None
    reason = f"{len(made.failures)} of {len(item.requests)} requests cannot be OTAP"
    return list(made.batches), Undeliverable(f"{reason}: {made.failures[0]}")


def _converted(item: Item) -> Converted:
    try:
        return to_otap(item.signal, item.requests)
    except InvalidRequest as error:
        return Converted([], [error])


# --- streams --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One gRPC stream, and the batches in it that have no status yet."""

    call: Any
    encoder: OtapEncoder
    waiting: dict[int, asyncio.Future[BatchStatus]] = field(default_factory=dict)
    next_id: int = 0
    heard: float = 0.0
    """When the last status came, by the clock of the loop."""
    listener: asyncio.Task[None] | None = None
    has_ended: bool = False
    error: DeliveryError | None = None
    """What those are told who come after its end."""


class _Stream:
    """The stream of one signal, made again when it is needed."""

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        method: Any,  # noqa: ANN401 - grpcio's types want serialisers
        metadata: tuple[tuple[str, str], ...],
        where: str,
        timeout: float,
        compression: str,
        outcomes: Outcomes,
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._where = where
        self._timeout = timeout
        self._compression = compression
        self._outcomes = outcomes
        self._writing = asyncio.Lock()
        self._alone = asyncio.Lock()
        self._is_cautious = False
        self._call: _Call | None = None

    async def send(self, tables: Tables) -> None:
        """Return when the status of the batch is OK."""
        if self._is_cautious:
            async with self._alone:
                await self._send(tables)
        else:
            await self._send(tables)

    async def _send(self, tables: Tables) -> None:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        answer: asyncio.Future[BatchStatus] = loop.create_future()
        call: _Call | None = None
        try:
            async with asyncio.timeout(self._timeout):
                call = await self._write(tables, answer)
                told = await answer
        except TimeoutError:
            if call is None or call.heard < sent:
                await self._close(f"a batch had no answer in {self._timeout} s")
            raise TryLater(f"{self._where}: no answer in {self._timeout} s") from None
        if told.code != BatchCode.OK:
            code = _CODES.get(told.code, grpc.StatusCode.UNKNOWN)
            raise grpc_refusal(code, told.message, (), self._where)

    async def _write(self, tables: Tables, answer: asyncio.Future[BatchStatus]) -> _Call:
        async with self._writing:
            call = self._call
            if call is None or call.has_ended:
                call = self._call = self._begin()
            batch_id = call.next_id
            call.next_id += 1
            answer.add_done_callback(lambda _: call.waiting.pop(batch_id, None))
            try:
                if sum(table.nbytes for table in tables.values()) <= _AT_ONCE:
                    message = _message(call.encoder, batch_id, tables)
                else:
                    message = await asyncio.to_thread(_message, call.encoder, batch_id, tables)
                call.waiting[batch_id] = answer
                await call.call.write(message)
            except InvalidRequest as error:
                raise Undeliverable(str(error)) from error
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                # The listener knows why the stream ended, and tells all who wait. It may be done.
                call.has_ended = True
                if call.error is not None and not answer.done():
                    answer.set_exception(call.error)
            except asyncio.CancelledError:
                # Nobody knows how much of the message was written.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    answer.cancel()
                    await self._close("a batch was given up")
                    raise
                await self._close("the call was cut short")
                if not answer.done():
                    answer.set_exception(TryLater(f"{self._where}: the call was cut short"))
            return call

    def _begin(self) -> _Call:
        metrics, node = self._outcomes.metrics, self._outcomes.node
        metrics.count("quiver.exporter.streams_total", node=node)
        try:
            made = self._method(metadata=self._metadata)
        except grpc.aio.UsageError as error:  # the channel was closed meanwhile
            raise TryLater(f"{self._where}: shutting down") from error
        call = _Call(made, OtapEncoder(self._compression))
        call.listener = asyncio.create_task(self._listen(call))
        return call

    async def _listen(self, call: _Call) -> None:
        """Hand out statuses until the stream ends, then tell those who still wait."""
        loop = asyncio.get_running_loop()
        error: DeliveryError = TryLater(f"{self._where}: the stream was ended")
        blames = False
        try:
            async for data in call.call:
                told = read_status(data)
                call.heard = loop.time()
                self._is_cautious = False
                answer = call.waiting.pop(told.batch_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(told)
        except grpc.aio.AioRpcError as ended:
            error, blames = self._why(ended)
        except InvalidRequest as wrong:
            error = TryLater(f"{self._where}: {wrong.reason}: is that an OTAP server?")
            call.call.cancel()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._end(call, error, blames=blames)

    def _why(self, ended: grpc.aio.AioRpcError) -> tuple[DeliveryError, bool]:
        """What the end of a stream means, and whether a batch is to blame for it."""
        trailers: Any = [(str(key), value) for key, value in ended.trailing_metadata() or ()]
        error = grpc_refusal(ended.code(), ended.details(), trailers, self._where)
        blames = isinstance(error, Undeliverable) and ended.code() in _BLAMES_A_BATCH
        if isinstance(error, Undeliverable) and not blames:
            error = TryLater(str(error))
        return error, blames

    def _end(self, call: _Call, error: DeliveryError, *, blames: bool) -> None:
        call.has_ended = True
        call.error = call.error or (TryLater(str(error)) if blames else error)
        waiting = [answer for answer in call.waiting.values() if not answer.done()]
        call.waiting.clear()
        if blames and len(waiting) > 1:
            self._is_cautious = True
            error = TryLater(f"{error}: sending one at a time, to see which")
        for answer in waiting:
            answer.set_exception(error)

    async def close(self) -> None:
        """End the stream; who still waits for a status is told to try later."""
        await self._close("shutting down")

    async def _close(self, reason: str) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        self._end(call, TryLater(f"{self._where}: {reason}"), blames=False)
        call.call.cancel()
        if call.listener is not None and call.listener is not asyncio.current_task():
            call.listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call.listener


def _message(encoder: OtapEncoder, batch_id: int, tables: Tables) -> bytes:
    return write_records(BatchArrowRecords(batch_id, encoder.encode(tables)))
