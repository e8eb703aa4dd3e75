"""Quiver: telemetry that is acknowledged only when it is durable.

This is the whole public interface; modules below may change between releases.
"""

from quiver.bundle import Payload, RecordBundle, Signal, Slot, fingerprint
from quiver.config import WalConfig
from quiver.disk import Disk, DiskFile, RealDisk
from quiver.errors import (
    ChecksumMismatch,
    FormatError,
    InvalidBundle,
    InvalidConfig,
    InvalidName,
    LimitExceeded,
    QuiverError,
    Truncated,
    UnsupportedVersion,
    WalAtCapacity,
    WalError,
    WalPoisoned,
)
from quiver.segment.reader import SegmentReader
from quiver.segment.writer import OpenSegment, write_segment
from quiver.subscriber.progress import Progress, SegmentProgress
from quiver.wal.writer import WalWriter

__version__ = "0.1.0"

__all__ = [
    "ChecksumMismatch",
    "Disk",
    "DiskFile",
    "FormatError",
    "InvalidBundle",
    "InvalidConfig",
    "InvalidName",
    "LimitExceeded",
    "OpenSegment",
    "Payload",
    "Progress",
    "QuiverError",
    "RealDisk",
    "RecordBundle",
    "SegmentProgress",
    "SegmentReader",
    "Signal",
    "Slot",
    "Truncated",
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
