"""The settings of a store, typed, with their ranges checked when they are made.

Defaults are those of the reference implementation, so a directory can change hands.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quiver.errors import InvalidConfig

MIB = 1024 * 1024
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
    ``max_open_readers``   8          segments that are kept mapped for those who read
    =====================  =========  ========================================================
    """

    target_size: int = 32 * MIB
    max_open_duration: float = 5.0
    max_stream_count: int = 512
    max_bundles: int = _MAX_BUNDLES
    max_frozen: int = 4
    max_open_readers: int = 8

    def __post_init__(self) -> None:
        _check("segment.target_size", self.target_size, at_least=1)
        _check("segment.max_stream_count", self.max_stream_count, at_least=1)
        _check("segment.max_bundles", self.max_bundles, at_least=1)
        _check("segment.max_frozen", self.max_frozen, at_least=1)
        _check("segment.max_open_readers", self.max_open_readers, at_least=1)
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
    ``max_request_bytes``  64 MiB     one request
    ``max_group_bytes``    64 MiB     requests that are decoded in one call
    ``max_items``          1,000,000  spans, log records or data points of one request
    ``max_attributes``     10,000     attributes of one span, event, link, resource ...
    ``max_depth``          32         lists and maps inside each other in an attribute's value
    ``promoted``           none       attributes with a column of their own
    =====================  =========  ========================================================
    """

    max_request_bytes: int = 64 * MIB
    max_group_bytes: int = 64 * MIB
    max_items: int = 1_000_000
    max_attributes: int = 10_000
    max_depth: int = 32
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
