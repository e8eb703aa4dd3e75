"""Quiver: telemetry that is acknowledged only when it is durable.

This is the whole public interface; modules below may change between releases.
"""

from quiver.bundle import Payload, RecordBundle, Signal, Slot, fingerprint
from quiver.config import (
    Ack,
    Durability,
    RetentionConfig,
    SegmentConfig,
    SizeCapPolicy,
    StoreConfig,
    WalConfig,
)
from quiver.disk import Disk, DiskFile, RealDisk
from quiver.errors import (
    BatchLost,
    BundleNotAvailable,
    ChecksumMismatch,
    Conflict,
    DeliveryError,
    Fenced,
    FormatError,
    IngestFailed,
    InvalidBundle,
    InvalidConfig,
    InvalidName,
    InvalidRequest,
    LimitExceeded,
    ObjectNotFound,
    ObjectsUnavailable,
    ProducerClosed,
    QueueError,
    QueueReset,
    QuiverError,
    SegmentNotFound,
    StorageAtCapacity,
    StoreClosed,
    StoreError,
    StoreLocked,
    SubscriberError,
    SubscriberExists,
    SubscriberNotFound,
    Truncated,
    TryLater,
    Undeliverable,
    UnsupportedVersion,
    WalAtCapacity,
    WalError,
    WalPoisoned,
)
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.store.core import Start
from quiver.store.intake import Receipt
from quiver.store.reader import Place, Snapshot, StoreReader
from quiver.store.store import Choose, Store, Subscription
from quiver.subscriber.handle import BundleHandle
from quiver.subscriber.progress import Progress, SegmentProgress
from quiver.subscriber.state import BundleRef
from quiver.wal.writer import WalWriter

__version__ = "0.1.0"

__all__ = [
    "Ack",
    "BatchLost",
    "BundleHandle",
    "BundleNotAvailable",
    "BundleRef",
    "ChecksumMismatch",
    "Choose",
    "Conflict",
    "DeliveryError",
    "Disk",
    "DiskFile",
    "Durability",
    "Fenced",
    "FormatError",
    "IngestFailed",
    "InvalidBundle",
    "InvalidConfig",
    "InvalidName",
    "InvalidRequest",
    "LimitExceeded",
    "ObjectNotFound",
    "ObjectsUnavailable",
    "OpenSegment",
    "Payload",
    "Place",
    "ProducerClosed",
    "Progress",
    "QueueError",
    "QueueReset",
    "QuiverError",
    "RealDisk",
    "Receipt",
    "RecordBundle",
    "RetentionConfig",
    "SegmentConfig",
    "SegmentNotFound",
    "SegmentProgress",
    "SegmentReader",
    "Signal",
    "SizeCapPolicy",
    "Slot",
    "Snapshot",
    "Start",
    "StorageAtCapacity",
    "Store",
    "StoreClosed",
    "StoreConfig",
    "StoreError",
    "StoreLocked",
    "StoreReader",
    "SubscriberError",
    "SubscriberExists",
    "SubscriberNotFound",
    "Subscription",
    "Truncated",
    "TryLater",
    "Undeliverable",
    "UnsupportedVersion",
    "WalAtCapacity",
    "WalConfig",
    "WalError",
    "WalPoisoned",
    "WalWriter",
    "__version__",
    "fingerprint",
    "write_segment",
]
