"""OTAP over gRPC: three methods with streams both ways, and the health service.

A sender opens a stream and sends batches; each gets a status when the next node has taken it, which
means that it is durable if that is a persistence node. Up to ``response_stream_channel_size``
batches of a stream are on their way at the same time, and their statuses come in any order.

===================  ====================  =========================================================
status of a batch    stream                when
===================  ====================  =========================================================
OK                   goes on               it was taken; a message says if some items were not
INVALID_ARGUMENT     goes on               it is no OTAP, or the next node refused it for ever
RESOURCE_EXHAUSTED   goes on               not now: too much waits, or the next node is full
UNAVAILABLE          goes on               not now: we stop, or the next node has a defect
INVALID_ARGUMENT     ABORTED               its Arrow data cannot be read, or is too large
UNAVAILABLE          ABORTED               a defect of ours while it was read
RESOURCE_EXHAUSTED   RESOURCE_EXHAUSTED    the stream remembers too much, or memory is short
none                 INVALID_ARGUMENT      a message that is no BatchArrowRecords
none                 UNAUTHENTICATED       the key is not valid, or not any more
===================  ====================  =========================================================

A stream that ends does so after the statuses of the batches before. A sender then begins a new one,
and sends again what has no status. Streams above ``max_streams`` are refused.

Arrow data that is compressed with zstd or lz4 is read. Messages that gRPC itself compresses may be
gzip or deflate; the library refuses zstd, which some senders have as their default: they must be
told to compress with gzip or not at all (``compression_method``), as the payloads are compressed.

Batches are checked for what makes them safe and storable, see ``otap_streams``, not for whether
their ids add up: that would cost more than all the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeAlias

import grpc
import grpc.aio
import pyarrow as pa

from quiver.bundle import Signal, Slot
from quiver.errors import InvalidRequest
from quiver.metrics import Metrics
from quiver.otlp.otap.schema import ROOTS
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.otap_streams import OtapDecoder, StreamBroken, count_rows
from quiver.pipeline.otap_wire import (
    METHODS,
    SERVICES,
    BatchArrowRecords,
    BatchCode,
    BatchStatus,
    read_records,
    write_status,
)
from quiver.pipeline.receivers.admission import (
    ALL_TAKEN,
    Admission,
    Headers,
    PartlyRefused,
    Taken,
)
from quiver.pipeline.receivers.answers import Reason, Refusal, status
from quiver.pipeline.receivers.grpc_server import (
    CODES,
    LAST_ANSWERS,
    GrpcServer,
    lookup,
    peer_address,
)
from quiver.pipeline.settings.options import OtapOptions

logger = logging.getLogger(__name__)

_SIGNALS: Final = {method: signal for signal, method in METHODS.items()}
_AT_ONCE: Final = 8 * 1024
"""Bytes of a message that is decoded without a thread: about a millisecond."""
_WORTH_FREEING: Final = 1024 * 1024
"""Bytes that a stream remembers, above which it is ended when memory is short."""

Context: TypeAlias = Any
"""``grpc.aio.ServicerContext``: its messages are bytes here, which its types do not know."""


class OtapReceiver:
    """Listens between ``start`` and ``stop``."""

    def __init__(
        self,
        name: str,
        options: OtapOptions,
        port: Port,
        *,
        metrics: Metrics,
        pressure: Callable[[], bool],
        now_ns: Callable[[], int],
    ) -> None:
        self.name = name
        self._options = options
        self._admission = _Admission(
            name, options, port, metrics=metrics, pressure=pressure, now_ns=now_ns
        )
        self._streams = _Streams(name, options, self._admission, metrics, pressure)
        self._listener = GrpcServer(name, options)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, after ``start``."""
        return self._listener.address

    async def start(self) -> None:
        """Listen."""
        await self._admission.start()
        try:
            self._streams.closing = asyncio.get_running_loop().create_future()
            await self._listener.start(self._streams, SERVICES, self._options.max_streams)
        except BaseException:
            await self._admission.end()
            raise

    async def stop(self, deadline: float) -> None:
        """Take no more, answer what was received, end."""
        self._admission.is_stopping = True
        server = await self._listener.begin_stopping()
        if server is None:
            return
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        ending = asyncio.create_task(server.stop(left))  # nobody connects any more
        self._streams.close()
        await self._streams.drain(deadline)
        await server.stop(min(LAST_ANSWERS, left))
        await ending
        await self._admission.end()


class _Admission(Admission):
    """The limits of a receiver, for items that are tables already."""

    async def submit_item(self, item: Item, size: int) -> Taken:
        """Hand an item on; ``Refusal`` when it is not taken. ``size`` is that of its message."""
        if self.waiting_requests >= self._options.max_waiting_requests:
            raise self._come_later(Reason.OVERLOADED, "too many requests wait for an answer")
        held = item.size
        self.hold(held)
        self.waiting_requests += 1
        self._nothing_waits.clear()
        self._gauges()
        taken = ALL_TAKEN
        try:
            await self._port.send(item)
        except PartlyRefused as error:
            self._count("quiver.receiver.rejected_items_total", error.rejected, signal=item.signal)
            taken = Taken(error.rejected, str(error))
        except Exception as error:
            raise self.refusal(error) from error
        finally:
            self.let_go(held)
            self.waiting_requests -= 1
            if not self.waiting_requests:
                self._nothing_waits.set()
            self._gauges()
        count = (item.count or 0) - taken.rejected
        self._count("quiver.receiver.items_total", count, signal=item.signal)
        self._count("quiver.receiver.bytes_total", size, signal=item.signal)
        self._count("quiver.receiver.requests_total", signal=item.signal)
        return taken

    def item(
        self, signal: Signal, tables: Mapping[Slot, pa.RecordBatch], context: Mapping[str, str]
    ) -> Item:
        """The item of a batch."""
        return Item(
            signal=signal,
            tables=tables,
            count=count_rows(signal, tables),
            received_ns=self._now_ns(),
            context=context,
        )


class _StreamEnds(Exception):
    """A stream must end, with this status, when the batches before are answered."""

    def __init__(self, code: int, message: str) -> None:
        self.code = CODES[code]
        super().__init__(message)


@dataclass(eq=False)
class _Stream:
    """One call."""

    signal: Signal
    context: Context
    headers: Headers
    decoder: OtapDecoder
    places: asyncio.Semaphore
    answers: set[asyncio.Task[None]] = field(default_factory=set)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    remembered: int = 0


class _Streams(grpc.GenericRpcHandler):
    """All calls of a receiver."""

    def __init__(
        self,
        name: str,
        options: OtapOptions,
        admission: _Admission,
        metrics: Metrics,
        pressure: Callable[[], bool],
    ) -> None:
        self._name = name
        self._options = options
        self._admission = admission
        self._metrics = metrics
        self._pressure = pressure
        self._open: set[_Stream] = set()
        self._remembered = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self.closing: asyncio.Future[None] | None = None

    def close(self) -> None:
        """End all streams as soon as what they sent is answered."""
        if self.closing is not None and not self.closing.done():
            self.closing.set_result(None)

    async def drain(self, deadline: float) -> None:
        """Wait until all have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._none_open.wait()

    # --- calls ----------------------------------------------------------------------------------

    def service(self, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - as it is declared
        """The handler of a call. One who may not send gets one that does not read anything."""
        signal = _SIGNALS.get(details.method)
        if signal is None:
            return None
        headers = lookup(details.invocation_metadata)
        try:
            self._admission.screen(headers)
        except Exception as error:  # noqa: BLE001 - every one gets an answer
            refusal = self._admission.refusal(error)
            return grpc.stream_stream_rpc_method_handler(self._refusing(refusal))

        async def serve(_: object, context: Context) -> None:
            if len(self._open) >= self._options.max_streams:
                self._admission.count("quiver.receiver.streams_refused_total")
                too_many = self._admission.come_later("too many streams are open")
                await self._refusing(too_many)(None, context)
            await self._serve(signal, context, headers)

        return grpc.stream_stream_rpc_method_handler(serve)

    def _refusing(self, refusal: Refusal) -> Callable[[object, Context], Awaitable[None]]:
        async def refuse(_: object, context: Context) -> None:
            self._admission.refused(refusal)
            await context.abort(
                CODES[refusal.reason.grpc_code],
                refusal.message,
                trailing_metadata=(("grpc-status-details-bin", status(refusal)),),
            )

        return refuse

    async def _serve(self, signal: Signal, context: Context, headers: Headers) -> None:
        options = self._options
        stream = _Stream(
            signal,
            context,
            headers,
            OtapDecoder(
                signal,
                max_batch_bytes=options.max_request_bytes,
                max_stream_bytes=options.max_stream_bytes,
            ),
            asyncio.Semaphore(options.response_stream_channel_size),
        )
        self._open.add(stream)
        self._none_open.clear()
        self._measure(stream, 0)
        try:
            try:
                await self._read(stream)
            except _StreamEnds as end:
                await asyncio.gather(*stream.answers)
                await context.abort(end.code, str(end))
            await asyncio.gather(*stream.answers)
        finally:
            for answer in stream.answers:
                answer.cancel()
            self._open.discard(stream)
            if not self._open:
                self._none_open.set()
            self._measure(stream, 0)

    async def _read(self, stream: _Stream) -> None:
        while True:
            await stream.places.acquire()
            data = await self._next(stream)
            if data is None:
                return
            try:
                batch = read_records(data)
            except InvalidRequest as error:
                self._admission.refused(Refusal(Reason.MALFORMED, error.reason))
                raise _StreamEnds(BatchCode.INVALID_ARGUMENT, error.reason) from None
            item = await self._item(stream, batch, len(data))
            if item is None:
                continue
            answer = asyncio.create_task(self._answer(stream, batch.batch_id, item, len(data)))
            stream.answers.add(answer)
            answer.add_done_callback(stream.answers.discard)

    async def _next(self, stream: _Stream) -> bytes | None:
        """The next message; None when there will be no more."""
        if self.closing is None:
            return None
        reading = asyncio.ensure_future(stream.context.read())
        try:
            await asyncio.wait((reading, self.closing), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _StreamEnds(BatchCode.UNAVAILABLE, "shutting down: try again later")
            data = await reading
        finally:
            reading.cancel()
        return None if data is grpc.aio.EOF else data

    # --- batches --------------------------------------------------------------------------------

    async def _item(self, stream: _Stream, batch: BatchArrowRecords, size: int) -> Item | None:
        """The item of a batch that may go on; None when it was answered already."""
        admission = self._admission
        try:
            tables = await self._decode(stream, batch, size)
            # Only now: the stream must know this batch to understand the next, taken or not.
            key_id = admission.screen(stream.headers)
        except (InvalidRequest, Refusal) as error:
            await self._refuse(stream, batch.batch_id, admission.refusal(error))
        else:
            if tables[ROOTS[stream.signal]].num_rows:
                peer = peer_address(stream.context.peer())
                context = admission.context(peer, key_id, stream.headers)
                return admission.item(stream.signal, tables, context)
            await self._tell(stream, BatchStatus(batch.batch_id))
        stream.places.release()
        return None

    async def _decode(
        self, stream: _Stream, batch: BatchArrowRecords, size: int
    ) -> dict[Slot, pa.RecordBatch]:
        try:
            if size <= _AT_ONCE:
                return stream.decoder.decode(batch)
            return await asyncio.to_thread(stream.decoder.decode, batch)
        except StreamBroken as broken:
            await self._end_broken(stream, batch.batch_id, broken)
        except InvalidRequest:
            raise
        except Exception as error:
            # A defect of ours. Nobody knows what the decoder remembers now.
            await self._refuse(stream, batch.batch_id, self._admission.refusal(error))
            raise _StreamEnds(BatchCode.ABORTED, "something went wrong here") from error
        finally:
            self._measure(stream, stream.decoder.remembered)

    async def _end_broken(self, stream: _Stream, batch_id: int, broken: StreamBroken) -> NoReturn:
        reason = Reason.OVERLOADED if broken.too_much else Reason.MALFORMED
        self._admission.count("quiver.receiver.streams_broken_total")
        await self._refuse(stream, batch_id, Refusal(reason, broken.reason))
        code = BatchCode.RESOURCE_EXHAUSTED if broken.too_much else BatchCode.ABORTED
        raise _StreamEnds(code, f"batch {batch_id}: {broken.reason}: begin a new stream")

    async def _refuse(self, stream: _Stream, batch_id: int, refusal: Refusal) -> None:
        """Tell why a batch is not taken; end the stream when that is true for all of them."""
        if refusal.reason is Reason.UNAUTHENTICATED:
            self._admission.refused(refusal)
            raise _StreamEnds(refusal.reason.grpc_code, refusal.message)
        await self._answer_no(stream, batch_id, refusal)
        if self._pressure() and stream.decoder.remembered > _WORTH_FREEING:
            raise _StreamEnds(BatchCode.RESOURCE_EXHAUSTED, "memory is short: begin a new stream")

    async def _answer_no(self, stream: _Stream, batch_id: int, refusal: Refusal) -> None:
        self._admission.refused(refusal)
        code = refusal.reason.grpc_code
        await self._tell(stream, BatchStatus(batch_id, code, refusal.message))

    async def _answer(self, stream: _Stream, batch_id: int, item: Item, size: int) -> None:
        try:
            taken = await self._admission.submit_item(item, size)
            await self._tell(stream, BatchStatus(batch_id, message=taken.message))
        except Refusal as refusal:
            await self._answer_no(stream, batch_id, refusal)
        finally:
            stream.places.release()

    async def _tell(self, stream: _Stream, answer: BatchStatus) -> None:
        """Send a status, one at a time. Who is not there any more will send the batch again."""
        async with stream.writing:
            try:
                await stream.context.write(write_status(answer))
            except Exception:
                self._admission.count("quiver.receiver.answers_lost_total")
                logger.debug("%s: an answer was lost", self._name, exc_info=True)

    def _measure(self, stream: _Stream, remembered: int) -> None:
        self._remembered += remembered - stream.remembered
        stream.remembered = remembered
        self._metrics.set("quiver.receiver.streams", len(self._open), node=self._name)
        self._metrics.set("quiver.receiver.stream_bytes", self._remembered, node=self._name)
