"""The public interface, name by name. Adding or removing one is a decision, made here."""

from __future__ import annotations

import quiver
import quiver.testing

PUBLIC = {
    "Ack",
    "BundleHandle",
    "BundleNotAvailable",
    "BundleRef",
    "ChecksumMismatch",
    "Choose",
    "Disk",
    "DiskFile",
    "Durability",
    "FormatError",
    "IngestFailed",
    "InvalidBundle",
    "InvalidConfig",
    "InvalidName",
    "InvalidRequest",
    "LimitExceeded",
    "OpenSegment",
    "Payload",
    "Place",
    "Progress",
    "QuiverError",
    "LakeUnavailable",
    "LakeConflict",
    "LakeError",
    "Undeliverable",
    "TryLater",
    "DeliveryError",
    "ObjectNotFound",
    "ObjectsUnavailable",
    "QueueError",
    "QueueFull",
    "ProducerClosed",
    "BatchLost",
    "QueueReset",
    "Fenced",
    "Conflict",
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
    "UnsupportedVersion",
    "WalAtCapacity",
    "WalConfig",
    "WalError",
    "WalPoisoned",
    "WalWriter",
    "__version__",
    "fingerprint",
    "write_segment",
}
PUBLIC_FOR_TESTS = {
    "Call",
    "ExplorationReport",
    "Shape",
    "SimulatedDisk",
    "Telemetry",
    "Violation",
    "error_loop",
    "explore",
    "replay",
}


def test_quiver_exports_these_names_and_no_others() -> None:
    assert set(quiver.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(quiver, name) is not None


def test_quiver_testing_exports_these_names_and_no_others() -> None:
    assert set(quiver.testing.__all__) == PUBLIC_FOR_TESTS
    for name in PUBLIC_FOR_TESTS:
        assert getattr(quiver.testing, name) is not None


def test_every_error_is_a_quiver_error_and_drawn_in_the_tree() -> None:
    from quiver import errors

    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    assert len(classes) > 10
    for error in classes:
        assert issubclass(error, quiver.QuiverError)
        assert error.__name__ in (errors.__doc__ or "")
        assert error.__name__ in quiver.__all__
