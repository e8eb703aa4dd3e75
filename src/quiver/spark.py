"""Quiver in Spark: a session, and stores and queues as sources.

::

    import quiver.spark

    spark = quiver.spark.session()
    spans = spark.read.format("quiver").option("path", root).option("signal", "traces").load()

Both need the extra ``spark`` (``pip install quiver[spark]``) and Java 17 or newer; importing this
module needs neither. The formats are described in ``quiver.lake.store_source`` and
``quiver.lake.queue_source``, their options in ``quiver.lake.source_options``.

On a cluster, install the package in the Python of the executors, or ship it with ``--py-files``.
For streaming queries it must be installed in the Python of the driver as well: the process that
plans their offsets there does not see what was shipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register", "session"]


def register(spark: SparkSession) -> None:
    """Make the formats ``quiver`` and ``quiver_buffer`` known to a session."""
    from quiver.lake.session import register as register_formats

    register_formats(spark)


def session(
    app_name: str = "quiver",
    *,
    master: str | None = None,
    memory: str | None = None,
    ui: bool = False,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with the settings that matter, in which the formats of Quiver are known.

    Args:
        app_name: What the session is called in Spark's own pages.
        master: ``local[4]``, ``spark://host:7077``, ``yarn`` ...; None: what the environment says,
            and ``local[*]`` when it says nothing.
        memory: Of the driver's JVM, as ``4g``; None: Spark's own default.
        ui: Whether Spark serves its pages.
        config: Any settings of Spark. They win over those made here.
    """
    from quiver.lake.session import session as make_session

    return make_session(app_name, master=master, memory=memory, ui=ui, config=config)
