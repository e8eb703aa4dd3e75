"""Shows what passes: one line an item, or all that is in it as OTLP/JSON.

======================  ============================================================================
``basic``               ``traces requests=1 items=100 bytes=4711 context=peer,x-tenant``
``detailed``            the same, then every request as JSON, cut after 64 KiB
======================  ============================================================================

Only the names of the context are shown: its values may be secrets.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Final

from quiver.errors import InvalidConfig, InvalidRequest, QuiverError, TryLater
from quiver.metrics import Metrics
from quiver.otlp.json_text import to_json
from quiver.pipeline.exporters.as_otlp import converted
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import DebugOptions

_MAX_TEXT: Final = 64 * 1024
_MAX_REQUEST: Final = 4 * 1024 * 1024
"""Requests above this are not made into JSON, which takes many times their size."""


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class DebugExporter:
    """Writes items to standard output, and takes all of them."""

    def __init__(
        self,
        name: str,
        options: DebugOptions,
        *,
        metrics: Metrics | None = None,
        write: Callable[[str], None] = _to_stdout,
    ) -> None:
        if options.verbosity not in {"none", "basic", "detailed"}:
            raise InvalidConfig(
                f"{name}: verbosity is {options.verbosity!r}; it must be none, basic or detailed"
            )
        self.name = name
        self._is_silent = options.verbosity == "none"
        self._is_detailed = options.verbosity == "detailed"
        self._metrics = metrics or Metrics()
        self._write = write

    async def start(self) -> None:
        """Nothing to begin."""

    async def take(self, item: Item) -> None:
        """Return when it is written. In a thread: a pipe that nobody reads holds up nothing."""
        try:
            if not self._is_silent:
                await asyncio.to_thread(lambda: self._write(self._text(item)))
        except (OSError, ValueError) as error:
            raise TryLater(f"{self.name}: standard output does not take it: {error}") from error
        self._metrics.count("quiver.exporter.items_total", node=self.name)

    def _text(self, item: Item) -> str:
        text = headline(item) + "\n"
        return text + detail(item) if self._is_detailed else text

    async def stop(self, deadline: float) -> None:
        """Nothing to end."""


def headline(item: Item) -> str:
    """One line about an item."""
    count = "?" if item.count is None else item.count
    names = [name.encode("unicode_escape").decode() for name in sorted(item.context)]
    shape = f"requests={len(item.requests)}"
    if item.tables:
        shape = f"tables={len(item.tables)}"
    keys = ",".join(names) or "-"
    return f"{item.signal} {shape} items={count} bytes={item.size} context={keys}"


def detail(item: Item) -> str:
    """The requests as JSON, a line each; why one has none; not more than so much."""
    lines = []
    left = _MAX_TEXT
    try:
        requests = converted(item)
    except QuiverError as error:
        return f"  {json.dumps(str(error))}\n"
    for request in requests:
        line = _json(item, request)
        lines.append(f"  {line if len(line) <= left else line[:left] + '...'}\n")
        left -= len(line)
        if left <= 0:
            break
    if len(lines) < len(requests):
        lines.append(f"  ... and {len(requests) - len(lines)} requests more\n")
    return "".join(lines)


def _json(item: Item, request: bytes) -> str:
    if len(request) > _MAX_REQUEST:
        return json.dumps(f"{len(request)} bytes: too large to be shown")
    try:
        return to_json(item.signal, request).decode()
    except InvalidRequest as error:
        return json.dumps(f"it cannot be read: {error}")
