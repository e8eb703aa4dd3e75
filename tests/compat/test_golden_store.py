"""A store takes over directories that the reference implementation left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quiver import RetentionConfig, Start, Store, StoreConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "quiver"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "store"))


@pytest.mark.parametrize(
    ("directory", "bundles"),
    [
        ("g1_wal_only", 3),
        ("g2_segment_progress", 4),
        ("g3_rotation", 7),
        ("g4_min_segment", 1),
        ("g5_no_item_count", 1),
        ("g6_dicts", 3),
        ("g7_order", 1),
    ],
    indirect=["directory"],
)
def test_every_bundle_is_delivered(directory: Path, bundles: int) -> None:
    with Store.open(directory) as store:
        assert store.problems == []
        store.subscribe("new", Start.earliest())
        store.flush()
        assert store.pending_count("new") == bundles
        for _ in range(bundles):
            handle = store.next_bundle("new", timeout=10)
            assert handle is not None
            handle.ack()
    assert len(CASES) == 7


@pytest.mark.parametrize("directory", ["g2_segment_progress"], indirect=True)
def test_a_subscriber_goes_on_where_it_was(directory: Path) -> None:
    """Bundles 0, 1 and 3 of the four were resolved."""
    with Store.open(directory) as store:
        store.subscribe("golden")
        handle = store.next_bundle("golden", timeout=10)
        assert handle is not None
        assert handle.ref == (0, 2)
        batch = handle.bundle.batch(60)
        assert batch is not None
        assert batch.column(0).to_pylist() == [b"otlp-bytes"]


@pytest.mark.parametrize("directory", ["g4_min_segment"], indirect=True)
def test_a_segment_that_does_not_tell_its_age_is_not_too_old(directory: Path) -> None:
    retention = RetentionConfig(max_age=1.0, min_free_space=0)
    with Store.open(directory, StoreConfig(retention=retention)) as store:
        store.subscribe("new", Start.earliest())
        store.maintain()
        assert store.pending_count("new") == 1
        assert store.losses == {}
