"""A Spark session with the settings that matter here.

=================================================  ==============================================
setting                                            why
=================================================  ==============================================
``PYSPARK_PYTHON``                                 workers are this Python, not the first in PATH
``spark.sql.session.timeZone`` UTC                 dates are those of the lake
``spark.sql.execution.arrow.pyspark.enabled``      rows go to Python and back as Arrow
``spark.sql.python.filterPushdown.enabled``        without it, Spark refuses the sources
``spark.sql.streaming.checkpointFileManagerClass`` local: 80 ms less for each micro-batch
``spark.driver.memory``                            of the JVM; only before it has started
``spark.ui.enabled`` false                         nobody looks at it, and it takes a port
``spark.driver.host``, ``bindAddress``             local: nothing listens to the network
=================================================  ==============================================

A setting of the caller wins, and so does one that the environment or ``spark-submit`` has made. A
session that is there already is used as it is; it gets those of the caller's settings that can
still change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from quiver.lake.queue_source import QuiverBufferSource
from quiver.lake.store_source import QuiverSource

_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
_PYTHON: Final = "PYSPARK_PYTHON"
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
_SAYS_MASTER: Final = frozenset(
    {"MASTER", "PYSPARK_SUBMIT_ARGS", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE"}
)
"""With one of these set, the master may be named where nobody can look before Java has started."""
_LOOPBACK: Final = "127.0.0.1"
_CHECKPOINTS: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def session(
    app_name: str = "quiver",
    *,
    master: str | None = None,
    memory: str | None = None,
    ui: bool = False,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session, new or the one that is there, in which the formats of Quiver are known.

    Args:
        app_name: What the session is called in Spark's own pages.
        master: ``local[4]``, ``spark://host:7077``, ``yarn`` ...; None: what the environment says,
            and ``local[*]`` when it says nothing.
        memory: Of the driver's JVM, as ``4g``; None: Spark's own default.
        ui: Whether Spark serves its pages.
        config: Any settings of Spark. They win over those made here.
    """
    given = dict(config or {})
    there = SparkSession.getActiveSession()
    if there is not None:
        _adapt(there, given)
        return there
    if _SUBMITTED in os.environ:
        SparkContext._ensure_initialized()  # noqa: SLF001 - or its settings cannot be seen
    if master is not None:
        given["spark.master"] = master
    known = SparkConf()  # what spark-submit and spark-defaults.conf have set
    settings = _settings(given.get("spark.master") or known.get("spark.master", None), ui=ui)
    if memory is not None:
        settings["spark.driver.memory"] = memory
    if "spark.pyspark.python" not in given and not known.contains("spark.pyspark.python"):
        os.environ.setdefault(_PYTHON, sys.executable)
    builder = SparkSession.builder.appName(app_name)
    for name, value in settings.items():
        if not known.contains(name):
            builder = builder.config(name, value)
    for name, value in given.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _adapt(spark: SparkSession, given: Mapping[str, str]) -> None:
    for name, value in given.items():
        if spark.conf.isModifiable(name):
            spark.conf.set(name, value)
    register(spark)


def _settings(master: str | None, *, ui: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        _PUSHDOWN: "true",
        "spark.ui.enabled": "true" if ui else "false",
    }
    local = not _SAYS_MASTER & os.environ.keys() if master is None else master.startswith("local")
    if local:
        settings["spark.sql.streaming.checkpointFileManagerClass"] = _CHECKPOINTS
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = _LOOPBACK
        os.environ.setdefault("SPARK_LOCAL_IP", _LOOPBACK)
    return settings


def register(spark: SparkSession) -> None:
    """Make the formats ``quiver`` and ``quiver_buffer`` known to a session.

    It also lets Spark push filters into sources written in Python: with that switched off, it
    refuses those that understand filters.
    """
    spark.dataSource.register(QuiverSource)
    spark.dataSource.register(QuiverBufferSource)
    spark.conf.set(_PUSHDOWN, "true")
