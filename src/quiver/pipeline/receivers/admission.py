"""What the receivers share: who may send, how much may wait, and what becomes of a request.

Before the body of a request is read, ``screen`` says whether it is wanted at all. While it is held,
its bytes are counted with ``hold`` and ``let_go``. When it is complete, ``submit`` counts its items
and hands it on; it returns when the next node has taken it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from quiver.bundle import Signal
from quiver.errors import (
    InvalidBundle,
    InvalidConfig,
    InvalidRequest,
    QuiverError,
    StoreClosed,
    TryLater,
    Undeliverable,
)
from quiver.metrics import Metrics, labelled
from quiver.pipeline.item import MAX_CONTEXT_BYTES, Item
from quiver.pipeline.node import Port
from quiver.pipeline.receivers.answers import Reason, Refusal
from quiver.pipeline.security.exposure import check_exposure
from quiver.pipeline.security.keys import JUNJO_HEADER, KeyRing, KeysUnavailable, WrongKey
from quiver.pipeline.settings.options import ReceiverOptions
from quiver.pipeline.wire_count import count_items

logger = logging.getLogger(__name__)

_ROOM_FOR_HEADERS: Final = MAX_CONTEXT_BYTES - 1024
"""The rest is for the peer, the key and the punctuation of JSON."""

Headers = Callable[[str], str | None]
"""The value of a header by its name in lower case."""


class PartlyRefused(Undeliverable):
    """Some items of a request were refused for ever; all the others were taken."""

    def __init__(self, reason: str, rejected: int) -> None:
        self.rejected = rejected
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Taken:
    """The request is safe, except for items that were refused."""

    rejected: int = 0
    message: str = ""


ALL_TAKEN: Final = Taken()


class Admission:
    """The limits of one receiver, and its way into the pipeline."""

    def __init__(
        self,
        name: str,
        options: ReceiverOptions,
        port: Port,
        *,
        metrics: Metrics,
        pressure: Callable[[], bool],
        now_ns: Callable[[], int],
    ) -> None:
        check_exposure(name, options)
        _check_limits(name, options)
        self._name = name
        self._options = options
        self._port = port
        self._metrics = metrics
        self._pressure = pressure
        self._now_ns = now_ns
        self._keep = tuple(header.lower() for header in options.keep_headers)
        self._keys = KeyRing(options.auth, metrics=metrics) if options.auth else None
        _check_kept_headers(name, self._keep, self._keys)
        self._watch: asyncio.Task[None] | None = None
        self._nothing_waits = asyncio.Event()
        self._nothing_waits.set()
        self._names: dict[tuple[str, ...], str] = {}
        self.is_stopping = False
        self.waiting_requests = 0
        self.waiting_bytes = 0

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the keys, and go on reading them; ``InvalidConfig`` when that is not possible."""
        if self._keys is not None:
            await asyncio.to_thread(self._keys.load)
            self._watch = asyncio.create_task(self._keys.watch())
        self.is_stopping = False

    async def drain(self, deadline: float) -> None:
        """Refuse what comes from now on, and wait for what is on its way."""
        self.is_stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._nothing_waits.wait()

    async def end(self) -> None:
        """Stop reading keys."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    # --- before the body ------------------------------------------------------------------------

    def screen(self, headers: Headers) -> str | None:
        """The id of the sender's key, None where none is needed; ``Refusal`` if it may not send."""
        if self.is_stopping:
            raise self._come_later(Reason.UNAVAILABLE, "shutting down")
        key_id = None
        if self._keys is not None:
            try:
                key_id = self._keys.identify(headers)
            except WrongKey as error:
                raise Refusal(Reason.UNAUTHENTICATED, str(error)) from None
            except KeysUnavailable as error:
                logger.error("%s refuses everybody: %s", self._name, error)  # noqa: TRY400 - it says all
                raise self._come_later(
                    Reason.UNAVAILABLE, "the API keys cannot be checked at the moment"
                ) from None
        if self._pressure():
            raise self._come_later(Reason.OVERLOADED, "memory is short")
        if self.waiting_requests >= self._options.max_waiting_requests:
            raise self._come_later(Reason.OVERLOADED, "too many requests wait for an answer")
        return key_id

    def context(self, peer: str, key_id: str | None, headers: Headers) -> Mapping[str, str]:
        """What is kept of a request beside its body. A header that has no room is left out."""
        made = {"peer": peer}
        if key_id is not None:
            made["api_key_id"] = key_id
        room = _ROOM_FOR_HEADERS
        for name in self._keep:
            value = headers(name)
            if value is None:
                continue
            room -= len(json.dumps({f"header.{name}": value}))
            if room < 0:
                self._count("quiver.receiver.headers_left_out_total")
                break
            made[f"header.{name}"] = value
        return made

    # --- while it is held -----------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be held."""
        return self.waiting_bytes + size <= self._options.max_waiting_bytes

    def hold(self, size: int) -> None:
        """Count bytes that are held for a request; ``Refusal`` when there are too many."""
        if not self.has_room(size):
            raise self._come_later(Reason.OVERLOADED, "too many bytes wait for an answer")
        self.waiting_bytes += size

    def let_go(self, size: int) -> None:
        """They are not held any more."""
        self.waiting_bytes -= size

    async def submit(self, signal: Signal, request: bytes, context: Mapping[str, str]) -> Taken:
        """Hand a complete request on; ``Refusal`` when it is not taken."""
        if self.waiting_requests >= self._options.max_waiting_requests:
            raise self._come_later(Reason.OVERLOADED, "too many requests wait for an answer")
        self.waiting_requests += 1
        self._nothing_waits.clear()
        self._gauges()
        try:
            count = count_items(signal, request)
            # A metric may be of a kind that is newer than this: it has no items that we know of.
            if count or (request and signal is Signal.METRICS):
                item = Item(
                    signal=signal,
                    requests=(request,),
                    count=count,
                    received_ns=self._now_ns(),
                    context=context,
                )
                await self._port.send(item)
        except PartlyRefused as error:
            self._count("quiver.receiver.rejected_items_total", error.rejected, signal=signal)
            taken = Taken(error.rejected, str(error))
        except Exception as error:
            raise self.refusal(error) from error
        else:
            taken = ALL_TAKEN
        finally:
            self.waiting_requests -= 1
            if not self.waiting_requests:
                self._nothing_waits.set()
            self._gauges()
        self._count("quiver.receiver.items_total", count - taken.rejected, signal=signal)
        self._count("quiver.receiver.bytes_total", len(request), signal=signal)
        self._count("quiver.receiver.requests_total", signal=signal)
        return taken

    def refusal(self, error: Exception) -> Refusal:
        """The answer for an error; whatever is not the sender's fault may be sent again."""
        match error:
            case Refusal():
                return error
            case InvalidRequest():
                where = f"{error.where}: " if error.where else ""
                return Refusal(Reason.MALFORMED, f"{where}{error.reason}")
            case Undeliverable() | InvalidBundle():
                return Refusal(Reason.MALFORMED, str(error))
            case StoreClosed():
                return self._come_later(Reason.UNAVAILABLE, "shutting down")
            case QuiverError(retryable=True):
                after = error.retry_after if isinstance(error, TryLater) else None
                reason = Reason.UNAVAILABLE if self.is_stopping else Reason.OVERLOADED
                return self._come_later(reason, str(error), after)
        logger.error("%s: a request failed", self._name, exc_info=error)
        return self._come_later(Reason.UNAVAILABLE, "something went wrong here, see our log")

    def come_later(self, message: str) -> Refusal:
        """A refusal that is nobody's fault but ours."""
        return self._come_later(Reason.UNAVAILABLE, message)

    def _come_later(self, reason: Reason, message: str, after: float | None = None) -> Refusal:
        pause = self._options.retry_after if after is None else after
        return Refusal(reason, f"{message}: try again later", pause)

    # --- figures --------------------------------------------------------------------------------

    def refused(self, refusal: Refusal) -> None:
        """Count an answer that was no."""
        self._count("quiver.receiver.refused_total", reason=refusal.reason.name.lower())

    def connections(self, count: int) -> None:
        """Tell how many there are."""
        self._metrics.set(self._label("quiver.receiver.connections"), count)

    def count(self, name: str) -> None:
        """Count something that happened to this receiver."""
        self._count(name)

    def _gauges(self) -> None:
        label, gauge = self._label, self._metrics.set
        gauge(label("quiver.receiver.waiting_requests"), self.waiting_requests)
        gauge(label("quiver.receiver.waiting_bytes"), self.waiting_bytes)

    def _count(self, name: str, by: float = 1, **labels: str) -> None:
        self._metrics.count(self._label(name, **labels), by)

    def _label(self, name: str, **labels: str) -> str:
        """Labels are put into text once, not for every request."""
        key = (name, *labels.values())
        made = self._names.get(key)
        if made is None:
            made = self._names[key] = labelled(name, node=self._name, **labels)
        return made


def _check_limits(name: str, options: ReceiverOptions) -> None:
    largest = max(options.max_request_bytes, options.max_compressed_bytes)
    if options.max_waiting_bytes < largest:
        raise InvalidConfig(
            f"{name}: max_waiting_bytes is {options.max_waiting_bytes}: a request of {largest} "
            "bytes, which max_request_bytes or max_compressed_bytes allow, could never be taken"
        )


def _check_kept_headers(name: str, keep: tuple[str, ...], keys: KeyRing | None) -> None:
    secret = {"authorization", JUNJO_HEADER, "cookie", *(keys.headers if keys else ())}
    for header in keep:
        if header in secret:
            raise InvalidConfig(
                f"{name}: keep_headers names {header!r}, which holds a secret; the id of the key "
                "is kept with every request as api_key_id"
            )
