"""Drops spans, log records and data points by conditions.

An item goes on if one of ``keep`` holds, or there is none, and none of ``drop`` does. Resources and
scopes that become empty are taken out. What nothing is left of is acknowledged and not handed on.

=====================================  =============================================================
metric                                 what
=====================================  =============================================================
``quiver.filter.dropped_total``        spans, records or points that were dropped
``quiver.filter.emptied_total``        items of the pipeline of which nothing was left
``quiver.filter.unreadable_total``     requests that went on as they are: they cannot be read
=====================================  =============================================================
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from quiver.bundle import Signal
from quiver.errors import InvalidConfig
from quiver.metrics import Metrics
from quiver.pipeline.item import Item
from quiver.pipeline.node import Port
from quiver.pipeline.processors.conditions import Check, any_of
from quiver.pipeline.processors.rewriting import Edited, rewritten
from quiver.pipeline.settings.options import FilterOptions


class FilterProcessor:
    """Hands on what was not dropped."""

    def __init__(
        self, name: str, options: FilterOptions, port: Port, *, metrics: Metrics | None = None
    ) -> None:
        self.name = name
        self._port = port
        self._metrics = metrics or Metrics()
        try:
            self._drop = [Check.of(condition) for condition in options.drop]
            self._keep = [Check.of(condition) for condition in options.keep]
        except InvalidConfig as error:
            raise InvalidConfig(f"{name}: {error}") from error

    async def start(self) -> None:
        """Nothing to begin."""

    async def take(self, item: Item) -> None:
        """Return when what is left of the item was taken by whoever comes next."""
        if not self._drop and not self._keep:
            await self._port.send(item)
            return
        done = await rewritten(item, self._edit)
        if done.unreadable:
            self._metrics.count("quiver.filter.unreadable_total", done.unreadable, node=self.name)
        if done.dropped:
            self._metrics.count("quiver.filter.dropped_total", done.dropped, node=self.name)
        if done.item is None:
            self._metrics.count("quiver.filter.emptied_total", node=self.name)
        else:
            await self._port.send(done.item)

    def _edit(self, signal: Signal, table: pa.RecordBatch) -> Edited:
        keep = np.ones(table.num_rows, np.bool_)
        if self._keep:
            keep = any_of(self._keep, signal, table)
        if self._drop:
            keep = keep & ~any_of(self._drop, signal, table)
        return Edited(table, keep, np.zeros(table.num_rows, np.bool_))

    async def stop(self, deadline: float) -> None:
        """Nothing to end."""
