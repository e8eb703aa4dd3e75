"""A bundle in the hands of a subscriber, and what it can do with it.

A handle that is dropped without a word gives its bundle back, as a crash of the subscriber would.
Used with ``with``, it is acknowledged when the block ends well and given back when it raises.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from quiver.bundle import RecordBundle
from quiver.subscriber.state import BundleRef, Claim


class HandleOwner(Protocol):
    """Who gave the handle out."""

    def resolve(self, subscriber_id: str, claim: Claim, rejected: str | None) -> None:
        """The bundle is done with; ``rejected`` is the reason when it could not be used."""

    def give_back(self, subscriber_id: str, claim: Claim, delay: float | None) -> None:
        """The bundle is to be delivered again, at once or after ``delay`` seconds."""


class BundleHandle:
    """A claimed bundle."""

    def __init__(
        self, owner: HandleOwner, subscriber_id: str, claim: Claim, bundle: RecordBundle
    ) -> None:
        self._owner = owner
        self._claim: Claim | None = claim
        self.subscriber_id = subscriber_id
        self.ref: BundleRef = claim.ref
        self.bundle = bundle

    @property
    def item_count(self) -> int | None:
        """Items in the bundle, where known."""
        return self.bundle.item_count

    def ack(self) -> None:
        """Done: the bundle will not come again. Durable with the next maintenance."""
        self._owner.resolve(self.subscriber_id, self._take(), None)

    def reject(self, reason: str) -> None:
        """It can never be used: the bundle will not come again, and is counted as rejected."""
        self._owner.resolve(self.subscriber_id, self._take(), reason)

    def defer(self, delay: float = 0.0) -> BundleRef:
        """Not now: it comes again after ``delay`` seconds, and holds up nothing meanwhile."""
        self._owner.give_back(self.subscriber_id, self._take(), delay)
        return self.ref

    def _take(self) -> Claim:
        claim, self._claim = self._claim, None
        if claim is None:
            # A number that was never given out: the owner says what is wrong.
            return Claim(self.ref, 0)
        return claim

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._claim is not None:
            if kind is None:
                self.ack()
            else:
                self.defer()

    def __del__(self) -> None:
        claim = getattr(self, "_claim", None)
        if claim is not None:
            self._owner.give_back(self.subscriber_id, claim, None)

    def __repr__(self) -> str:
        state = "held" if self._claim is not None else "given back"
        return f"<bundle {self.ref} for {self.subscriber_id!r}, {state}>"
