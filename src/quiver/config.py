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
    =====================  =========  ========================================================
    """

    target_size: int = 32 * MIB
    max_open_duration: float = 5.0
    max_stream_count: int = 512
    max_bundles: int = _MAX_BUNDLES
    max_frozen: int = 4

    def __post_init__(self) -> None:
        _check("segment.target_size", self.target_size, at_least=1)
        _check("segment.max_stream_count", self.max_stream_count, at_least=1)
        _check("segment.max_bundles", self.max_bundles, at_least=1)
        _check("segment.max_frozen", self.max_frozen, at_least=1)
        if self.max_bundles > _MAX_BUNDLES:
            raise InvalidConfig(
                f"segment.max_bundles is {self.max_bundles}; at most {_MAX_BUNDLES}"
            )
        if self.max_open_duration <= 0:
            raise InvalidConfig("segment.max_open_duration must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """How much is kept, and what goes first. Rules in the order in which they win: ``retention``.

    =====================  ============  =====================================================
    setting                default       what it bounds
    =====================  ============  =====================================================
    ``size_cap``           none          bytes of log and segments together
    ``size_cap_policy``    backpressure  what happens at the cap
    ``max_age``            none          seconds since ingestion after which data is dropped
    ``min_free_space``     64 MiB        free bytes of the file system below which ingest stops
    ``headroom``           0             bytes of finished segments kept on disk all the same
    ``shared``             no            whether ``size_cap`` is for all ``core_*`` stores beside
                                         this one together
    =====================  ============  =====================================================
    """

    size_cap: int | None = None
    size_cap_policy: SizeCapPolicy = SizeCapPolicy.BACKPRESSURE
    max_age: float | None = None
    min_free_space: int = 64 * MIB
    headroom: int = 0
    shared: bool = False

    def __post_init__(self) -> None:
        _check("retention.min_free_space", self.min_free_space, at_least=0)
        _check("retention.headroom", self.headroom, at_least=0)
        if self.size_cap is not None:
            _check("retention.size_cap", self.size_cap, at_least=1)
        if self.max_age is not None and self.max_age <= 0:
            raise InvalidConfig(f"retention.max_age is {self.max_age}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """All settings of a store.

    ``max_waiting_bytes`` bounds what callers have handed in and the disk has not taken yet;
    ``maintain_interval`` is how often the background looks after segments, progress and retention.
    """

    durability: Durability = Durability.WAL
    ack: Ack = Ack.DURABLE
    max_waiting_bytes: int = 64 * MIB
    maintain_interval: float = 0.1
    wal: WalConfig = field(default_factory=WalConfig)
    segment: SegmentConfig = field(default_factory=SegmentConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)

    def __post_init__(self) -> None:
        _check("max_waiting_bytes", self.max_waiting_bytes, at_least=1)
        if self.maintain_interval <= 0:
            raise InvalidConfig(
                f"maintain_interval is {self.maintain_interval}; it must be above 0"
            )
