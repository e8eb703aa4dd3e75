"""One Spark session for all tests of a worker that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

import quiver.spark


@pytest.fixture(scope="session")
def _spark_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield str(tmp_path_factory.mktemp("spark"))
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()


@pytest.fixture
def spark(_spark_directory: str) -> SparkSession:
    """The session that is there; a new one when somebody has stopped it."""
    return quiver.spark.session(
        "quiver-tests",
        master="local[2]",
        memory="1g",
        config={
            "spark.local.dir": f"{_spark_directory}/local",
            "spark.sql.warehouse.dir": f"{_spark_directory}/warehouse",
            "spark.sql.shuffle.partitions": "2",
        },
    )
