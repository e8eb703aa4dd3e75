"""The set-up that the lake needs: a Java that Spark accepts, and workers that speak Arrow."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # or the workers are another Python
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # or it looks up the name of the machine
    session = (
        SparkSession.builder.master("local[2]")
        .appName("quiver-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(tmp_path / "local"))
        .config("spark.sql.warehouse.dir", str(tmp_path / "warehouse"))
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    yield session
    session.stop()


def test_a_job_runs_on_arrow_batches(spark: SparkSession) -> None:
    def total(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"total": [pc.sum(batch["id"]).as_py()]})

    rows = spark.range(1000, numPartitions=4).mapInArrow(total, "total long").collect()
    assert sum(row.total for row in rows) == sum(range(1000))
