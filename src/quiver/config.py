"""The settings of a store, typed, with their ranges checked when they are made.

Defaults are those of the reference implementation, so a directory can change hands.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from quiver.errors import InvalidConfig

MIB = 1024 * 1024
_PATH_PART = re.compile(r"[A-Za-z0-9._-]+")
_MAX_BUNDLES = 65_536  # a progress file cannot address more in one segment


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """Limits of the write-ahead log.

    =====================  =========  ========================================================
    setting                default    what it bounds
    =====================  =========  ========================================================
    ``max_size``           128 MiB    active and rotated files together
    ``rotation_target``    64 MiB     data bytes after which the active file is rotated
    ``max_rotated_files``  10         files beside the active one
    ``max_quarantine``     64 MiB     damaged bytes kept aside; more are reported, not copied
    ``flush_interval``     25 ms      how long a bundle acknowledged as written stays unsynced
    =====================  =========  ========================================================
    """

    max_size: int = 128 * MIB
    rotation_target: int = 64 * MIB
    max_rotated_files: int = 10
    max_quarantine: int = 64 * MIB
    flush_interval: float = 0.025

    def __post_init__(self) -> None:
        _check("wal.flush_interval", self.flush_interval, at_least=0)
        _check("wal.max_rotated_files", self.max_rotated_files, at_least=1)
        _check("wal.rotation_target", self.rotation_target, at_least=1)
        _check("wal.max_quarantine", self.max_quarantine, at_least=0)
        if self.rotation_target > self.max_size:
            raise InvalidConfig(
                f"wal.rotation_target ({self.rotation_target}) is larger than wal.max_size "
                f"({self.max_size}): the log would be full before it rotates; lower the first "
                "or raise the second"
            )


def _check(name: str, value: float, *, at_least: int) -> None:
    if value < at_least:
        raise InvalidConfig(f"{name} is {value}; it must be at least {at_least}")


class Durability(enum.StrEnum):
    """What an ingest waits for before the data counts as stored at all."""

    WAL = "wal"
    SEGMENT_ONLY = "segment_only"


class Ack(enum.StrEnum):
    """When an ingest returns: after the sync that covers the bundle, or after the write."""

    DURABLE = "durable"
    WRITTEN = "written"


class SizeCapPolicy(enum.StrEnum):
    """What gives way when the store is full: new data, or the oldest."""

    BACKPRESSURE = "backpressure"
    DROP_OLDEST = "drop_oldest"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentConfig:
    """When the open segment is finalised.

    =====================  =========  ========================================================
    setting                default    what it bounds
    =====================  =========  ========================================================
    ``target_size``        32 MiB     bytes of the batches in an open segment
    ``max_open_duration``  5 s        how long bundles wait for subscribers to see them
    ``max_stream_count``   512        (slot, schema) pairs
    ``max_bundles``        65,536     bundles; what a progress file can address
    ``max_frozen``         4          segments that wait to be written before ingest is refused
    ``max_open_readers``   8          segments kept mapped: one for each subscriber that reads
    ``sync_every``         256 KiB    bytes of a segment between two syncs while it is written: the
                                      log beside it waits for no more than that
    =====================  =========  ========================================================
    """

    target_size: int = 32 * MIB
    max_open_duration: float = 5.0
    max_stream_count: int = 512
    max_bundles: int = _MAX_BUNDLES
    max_frozen: int = 4
    max_open_readers: int = 8
    sync_every: int = 256 * 1024

    def __post_init__(self) -> None:
        _check("segment.target_size", self.target_size, at_least=1)
        _check("segment.max_stream_count", self.max_stream_count, at_least=1)
        _check("segment.max_bundles", self.max_bundles, at_least=1)
        _check("segment.max_frozen", self.max_frozen, at_least=1)
        _check("segment.max_open_readers", self.max_open_readers, at_least=1)
        _check("segment.sync_every", self.sync_every, at_least=4096)
        if self.max_bundles > _MAX_BUNDLES:
            raise InvalidConfig(
                f"segment.max_bundles is {self.max_bundles}; at most {_MAX_BUNDLES}"
            )
        if self.max_open_duration <= 0:
            raise InvalidConfig("segment.max_open_duration must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """How much is kept, and what goes first. Rules in the order in which they win: ``retention``.

    ========================  ============  ==================================================
    setting                   default       what it bounds
    ========================  ============  ==================================================
    ``size_cap``              none          bytes of log and segments together
    ``size_cap_policy``       backpressure  what happens at the cap
    ``max_age``               none          seconds since ingestion after which data is dropped
    ``min_free_space``        64 MiB        free bytes on disk below which ingest stops
    ``headroom``              0             bytes of finished segments kept all the same
    ``shared``                no            whether ``size_cap`` is for all ``core_*`` stores
                                            beside this one together
    ``patience``              20            rounds in which a store over a shared cap waits for
                                            one that holds older data to drop it
    ``max_deletes_per_step``  64            segments that one step of maintenance deletes
    ========================  ============  ==================================================
    """

    size_cap: int | None = None
    size_cap_policy: SizeCapPolicy = SizeCapPolicy.BACKPRESSURE
    max_age: float | None = None
    min_free_space: int = 64 * MIB
    headroom: int = 0
    shared: bool = False
    patience: int = 20
    max_deletes_per_step: int = 64

    def __post_init__(self) -> None:
        _check("retention.patience", self.patience, at_least=0)
        _check("retention.max_deletes_per_step", self.max_deletes_per_step, at_least=1)
        _check("retention.min_free_space", self.min_free_space, at_least=0)
        _check("retention.headroom", self.headroom, at_least=0)
        if self.size_cap is not None:
            _check("retention.size_cap", self.size_cap, at_least=1)
        if self.max_age is not None and self.max_age <= 0:
            raise InvalidConfig(f"retention.max_age is {self.max_age}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """All settings of a store.

    =========================  =======  ======================================================
    setting                    default  what it bounds
    =========================  =======  ======================================================
    ``durability``             wal      what holds a bundle before its segment does
    ``ack``                    durable  when an ingest returns
    ``max_waiting_bytes``      64 MiB   what was handed in and the disk has not taken yet
    ``max_group_bytes``        16 MiB   what is written with one call and synced with one
    ``relief_timeout``         2 s      how long a commit waits for a full log to get room
    ``maintain_interval``      100 ms   how often segments, progress and retention are looked at
    ``remembered_rejections``  100      reasons of the last rejected bundles
    =========================  =======  ======================================================
    """

    durability: Durability = Durability.WAL
    ack: Ack = Ack.DURABLE
    max_waiting_bytes: int = 64 * MIB
    max_group_bytes: int = 16 * MIB
    relief_timeout: float = 2.0
    maintain_interval: float = 0.1
    remembered_rejections: int = 100
    wal: WalConfig = field(default_factory=WalConfig)
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        _check("max_waiting_bytes", self.max_waiting_bytes, at_least=1)
        _check("max_group_bytes", self.max_group_bytes, at_least=1)
        _check("relief_timeout", self.relief_timeout, at_least=0)
        _check("remembered_rejections", self.remembered_rejections, at_least=0)
        if self.maintain_interval <= 0:
            raise InvalidConfig(
                f"maintain_interval is {self.maintain_interval}; it must be above 0"
            )


class AttributeLevel(enum.StrEnum):
    """Whose attributes: those of the span, log record or data point, or of what it belongs to."""

    ITEM = "item"
    RESOURCE = "resource"
    SCOPE = "scope"


class AttributeType(enum.StrEnum):
    """The type of a promoted attribute; a value of another type leaves its column null."""

    STRING = "string"
    INT = "int"
    DOUBLE = "double"
    BOOL = "bool"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedAttribute:
    """An attribute that has a column of its own, for fast filters."""

    key: str
    column: str
    type: AttributeType = AttributeType.STRING
    level: AttributeLevel = AttributeLevel.ITEM


@dataclass(frozen=True, slots=True, kw_only=True)
class OtlpConfig:
    """Limits on telemetry that comes in, and how it becomes columns.

    =====================  =========  ========================================================
    setting                default    what it bounds
    =====================  =========  ========================================================
    ``max_request_bytes``  16 MiB     one request; empty messages take 40 times their size in memory
    ``max_group_bytes``    16 MiB     requests that are decoded in one call
    ``max_items``          1,000,000  spans, log records or data points of one request
    ``max_attributes``     10,000     attributes of one span, event, link, resource ...
    ``max_depth``          30         lists and maps inside each other in an attribute's value
    ``promoted``           none       attributes with a column of their own
    =====================  =========  ========================================================
    """

    max_request_bytes: int = 16 * MIB
    max_group_bytes: int = 16 * MIB
    max_items: int = 1_000_000
    max_attributes: int = 10_000
    max_depth: int = 30
    promoted: tuple[PromotedAttribute, ...] = ()

    def __post_init__(self) -> None:
        _check("otlp.max_request_bytes", self.max_request_bytes, at_least=1)
        _check("otlp.max_group_bytes", self.max_group_bytes, at_least=1)
        _check("otlp.max_items", self.max_items, at_least=1)
        _check("otlp.max_attributes", self.max_attributes, at_least=0)
        _check("otlp.max_depth", self.max_depth, at_least=0)
        columns = [promoted.column for promoted in self.promoted]
        if len(set(columns)) != len(columns):
            raise InvalidConfig("otlp.promoted names a column twice; each attribute needs its own")


class BatchCompression(enum.StrEnum):
    """How the records of a batch in object storage are compressed."""

    NONE = "none"
    ZSTD = "zstd"


class LostBatchPolicy(enum.StrEnum):
    """What a consumer does with a batch that is missing or damaged: stop, or list it and go on."""

    STOP = "stop"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Where a queue is in its object store, and what its formats may hold.

    =======================  =================  ==============================================
    setting                  default            what it bounds
    =======================  =================  ==============================================
    ``manifest_path``        ingest/manifest    the one object that lists the batches
    ``data_path_prefix``     ingest             the batches, directly below it
    ``max_manifest_bytes``   256 MiB            a manifest that is read or written
    ``max_batch_bytes``      1 GiB              a batch, before and after decompression
    ``max_backoff``          5 s                the pause between two attempts at a write
    ``attempt_timeout``      30 s               one call to the object store
    ``give_up_after``        5 min              attempts at one write, together
    ``gc_grace_period``      10 min             the age below which no batch is collected
    =======================  =================  ==============================================

    Whoever works on a queue must use the same paths and the same ``gc_grace_period``: the consumer
    deletes batches above that age, and producers list none that is above half of it.
    """

    manifest_path: str = "ingest/manifest"
    data_path_prefix: str = "ingest"
    max_manifest_bytes: int = 256 * MIB
    max_batch_bytes: int = 1024 * MIB
    max_backoff: float = 5.0
    attempt_timeout: float = 30.0
    give_up_after: float = 300.0
    gc_grace_period: float = 600.0

    def __post_init__(self) -> None:
        for name in ("manifest_path", "data_path_prefix"):
            path = getattr(self, name)
            parts = path.split("/")
            if not all(_PATH_PART.fullmatch(part) and part.strip(".") for part in parts):
                raise InvalidConfig(
                    f"queue.{name} is {path!r}; it must be names of letters, digits, '.', '_' "
                    "and '-', with '/' between them"
                )
        _check("queue.max_manifest_bytes", self.max_manifest_bytes, at_least=1024)
        _check("queue.max_batch_bytes", self.max_batch_bytes, at_least=1024)
        _check("queue.max_backoff", self.max_backoff, at_least=0)
        _check("queue.attempt_timeout", self.attempt_timeout, at_least=0)
        _check("queue.give_up_after", self.give_up_after, at_least=0)
        if self.max_upload_age <= self.attempt_timeout:
            raise InvalidConfig(
                f"queue.gc_grace_period is {self.gc_grace_period:g} s; it must be more than twice "
                f"queue.attempt_timeout ({self.attempt_timeout:g} s), so that a batch is listed "
                "before it may be collected"
            )

    @property
    def max_upload_age(self) -> float:
        """How long ago a batch may have been uploaded that is listed now, in seconds."""
        return self.gc_grace_period / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerConfig:
    """When a producer writes a batch, and how much it may hold.

    =======================  =================  ==============================================
    setting                  default            what it bounds
    =======================  =================  ==============================================
    ``flush_interval``       100 ms             how long the first entry of a batch waits
    ``flush_size_bytes``     64 MiB             entries and metadata of a batch
    ``max_buffered_inputs``  1000               calls whose entries are not durable yet
    ``max_buffered_bytes``   256 MiB            their bytes
    ``max_uploads``          8                  batches that are uploaded at the same time
    ``max_append``           256                batches that one write of the manifest adds
    ``batch_compression``    none               ``none`` or ``zstd``
    ``committer``            none               ``host:port`` that appends for many producers
    =======================  =================  ==============================================
    """

    queue: QueueConfig = field(default_factory=QueueConfig)
    flush_interval: float = 0.1
    flush_size_bytes: int = 64 * MIB
    max_buffered_inputs: int = 1000
    max_buffered_bytes: int = 256 * MIB
    max_uploads: int = 8
    max_append: int = 256
    batch_compression: BatchCompression = BatchCompression.NONE
    committer: str | None = None

    def __post_init__(self) -> None:
        _check("producer.flush_interval", self.flush_interval, at_least=0)
        for name in (
            "flush_size_bytes",
            "max_buffered_inputs",
            "max_buffered_bytes",
            "max_uploads",
            "max_append",
        ):
            _check(f"producer.{name}", getattr(self, name), at_least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """How a consumer reads, acknowledges and cleans up.

    =======================  =================  ==============================================
    setting                  default            what it bounds
    =======================  =================  ==============================================
    ``dequeue_acks``         100                acknowledged batches that stay in the manifest
    ``dequeue_interval``     10 s               how long they stay
    ``max_remembered``       100,000            locations that repeats are recognised by
    ``lost_batches``         stop               ``stop`` or ``dead_letter``
    ``gc_interval``          5 min              between two rounds of garbage collection
    ``gc_max_deletes``       1000               batches that one round deletes
    =======================  =================  ==============================================
    """

    queue: QueueConfig = field(default_factory=QueueConfig)
    dequeue_acks: int = 100
    dequeue_interval: float = 10.0
    max_remembered: int = 100_000
    lost_batches: LostBatchPolicy = LostBatchPolicy.STOP
    gc_interval: float = 300.0
    gc_max_deletes: int = 1000

    def __post_init__(self) -> None:
        _check("consumer.dequeue_acks", self.dequeue_acks, at_least=1)
        _check("consumer.max_remembered", self.max_remembered, at_least=1)
        _check("consumer.gc_max_deletes", self.gc_max_deletes, at_least=1)
        for name in ("dequeue_interval", "gc_interval"):
            _check(f"consumer.{name}", getattr(self, name), at_least=0)
