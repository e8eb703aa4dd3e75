"""Every error that Quiver raises on purpose, in one tree.

::

    QuiverError
    ├── InvalidBundle          a bundle that cannot be stored as it is
    ├── InvalidConfig          a setting outside its range
    ├── InvalidName            a name that must not become part of a path
    ├── InvalidRequest         a telemetry request that is not OTLP, or breaks its rules
    ├── FormatError            bytes that are not what they claim to be
    │   ├── Truncated          they end before the structure does
    │   ├── ChecksumMismatch   they changed since they were written
    │   ├── UnsupportedVersion they were written by something newer, or older
    │   └── LimitExceeded      a length or count is above the limit that guards it
    ├── WalError               the write-ahead log cannot take the bundle
    │   ├── WalAtCapacity      not now: reclaim first, then try again
    │   └── WalPoisoned        a write or sync failed: the file is not trusted any more
    ├── StoreError             the store cannot do what is asked
    │   ├── StorageAtCapacity  it is full, or its disk is: try again later
    │   ├── StoreLocked        another process writes to the directory
    │   ├── StoreClosed        it was closed, or is closing
    │   ├── IngestFailed       the disk failed before the bundle was safe: hand it in again
    │   └── SegmentNotFound    the segment was deleted meanwhile
    ├── DeliveryError          telemetry was not taken by the next node
    │   ├── TryLater           not now: the same item may be taken later
    │   └── Undeliverable      never: sending it again would not help
    ├── QueueError             the queue in object storage cannot do what is asked
    │   ├── ObjectsUnavailable the object store failed, or did not answer: nobody knows
    │   │                      whether a write happened
    │   ├── ObjectNotFound     there is no object by that name
    │   ├── Conflict           somebody else changed the object first: read it again
    │   ├── Fenced             another consumer has taken over the queue
    │   ├── QueueReset         the manifest is not the one that was read before
    │   ├── QueueFull          its manifest would grow above the limit: consume first
    │   ├── BatchLost          the manifest names a batch that is missing or damaged
    │   └── ProducerClosed     it was closed, or could not go on
    ├── LakeError              the lake cannot do what is asked
    │   ├── LakeConflict       somebody else changed the table first: plan again
    │   └── LakeUnavailable    commits failed for too long: nobody knows whether the last happened
    └── SubscriberError        a subscriber asks for what it cannot have
        ├── SubscriberNotFound nobody by that name is registered, or active
        ├── SubscriberExists   the name is taken by a subscriber of another kind
        └── BundleNotAvailable the bundle is resolved, held by somebody, or not there

Errors from the operating system (``OSError``) pass through unchanged: they name their file already.
"""

from __future__ import annotations


class QuiverError(Exception):
    """Base of everything below. ``retryable`` says whether the same call may succeed later."""

    retryable = False


class InvalidBundle(QuiverError):
    """A bundle breaks a rule of the formats: slot number, row count, ingestion time, size."""


class InvalidConfig(QuiverError):
    """A setting is outside its range."""


class InvalidName(QuiverError):
    """A name contains what must not become part of a file name."""


class InvalidRequest(QuiverError):
    """A request, by its place in the group, that cannot be taken: where in it, and why.

    ``where`` is a path (``resource_spans[0].scope_spans[1].spans[3].trace_id``) or ``byte 17``,
    and empty when neither is known.
    """

    def __init__(self, reason: str, *, where: str = "", request: int = 0) -> None:
        self.reason = reason
        self.where = where
        self.request = request
        super().__init__(
            f"request {request}: {where}: {reason}" if where else f"request {request}: {reason}"
        )


class FormatError(QuiverError):
    """Bytes that cannot be decoded: which file, at which offset, for which reason."""

    def __init__(self, source: str, offset: int, reason: str) -> None:
        self.source = source
        self.offset = offset
        self.reason = reason
        super().__init__(f"{source}: at byte {offset}: {reason}")


class Truncated(FormatError):
    """The bytes end before the structure does."""

    def __init__(self, source: str, offset: int, *, need: int, have: int, what: str) -> None:
        self.need = need
        self.have = have
        super().__init__(source, offset, f"{what} needs {need} bytes, only {have} are left")


class ChecksumMismatch(FormatError):
    """The stored sum is not the sum of the bytes."""

    def __init__(self, source: str, offset: int, *, stored: int, computed: int, what: str) -> None:
        self.stored = stored
        self.computed = computed
        super().__init__(
            source, offset, f"{what} has checksum {stored:08x} but its bytes sum to {computed:08x}"
        )


class UnsupportedVersion(FormatError):
    """The version field holds a number that this reader does not know."""


class LimitExceeded(FormatError):
    """A length or count is larger than the limit that protects the reader."""


class WalError(QuiverError):
    """The write-ahead log cannot take the bundle."""


class WalAtCapacity(WalError):
    """The log is full: nothing was written. Finalise a segment, advance the cursor, try again."""

    retryable = True


class WalPoisoned(WalError):
    """A write or sync of this file failed, so what it holds past the last sync is unknown."""


class StoreError(QuiverError):
    """The store cannot do what is asked."""


class StorageAtCapacity(StoreError):
    """The store, or the disk under it, is full. Nothing was taken; the same call may work later."""

    retryable = True


class StoreLocked(StoreError):
    """Another process has the directory open for writing."""


class StoreClosed(StoreError):
    """The store was closed, or is closing."""


class IngestFailed(StoreError):
    """The disk failed before the bundle was safe. It was not acknowledged: hand it in again."""

    retryable = True


class SegmentNotFound(StoreError):
    """The segment is not there any more."""


class DeliveryError(QuiverError):
    """Telemetry was not taken by the next node of a pipeline, or by a server."""


class TryLater(DeliveryError):
    """Not now. ``retry_after`` is how many seconds to wait, when whoever refused it said so."""

    retryable = True

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(reason)


class Undeliverable(DeliveryError):
    """Never: it is malformed for whoever refused it, or not allowed there."""


class QueueError(QuiverError):
    """The queue in object storage cannot do what is asked."""


class ObjectsUnavailable(QueueError):
    """The object store failed, or did not answer. A write may have happened all the same."""

    retryable = True


class ObjectNotFound(QueueError):
    """There is no object by that name."""


class Conflict(QueueError):
    """The object is not the one that was read before: read it again, and decide again."""

    retryable = True


class Fenced(QueueError):
    """Another consumer has taken over the queue; this one must stop."""


class QueueReset(QueueError):
    """The manifest is not a later state of the one that was read before. Nothing was changed."""


class QueueFull(QueueError):
    """The manifest would grow above its limit. Nothing was appended; it may work later."""

    retryable = True


class BatchLost(QueueError):
    """The manifest names a batch that is missing or damaged."""

    def __init__(self, sequence: int, location: str, reason: str) -> None:
        self.sequence = sequence
        self.location = location
        self.reason = reason
        super().__init__(f"batch {sequence} at {location}: {reason}")


class ProducerClosed(QueueError):
    """The producer was closed, or gave up after errors that did not go away."""


class LakeError(QuiverError):
    """The lake cannot do what is asked."""


class LakeConflict(LakeError):
    """Somebody else changed the table so that this commit makes no sense any more: plan again."""

    retryable = True


class LakeUnavailable(LakeError):
    """Commits failed for too long. Whether the last one happened is not known: plan again."""

    retryable = True


class SubscriberError(QuiverError):
    """A subscriber asks for what it cannot have."""


class SubscriberNotFound(SubscriberError):
    """Nobody by that name is registered, or it is not active."""


class SubscriberExists(SubscriberError):
    """The name is taken by a subscriber of another kind."""


class BundleNotAvailable(SubscriberError):
    """The bundle is resolved already, held by somebody else, or not there."""
