"""Items as OTLP requests, whatever form they have."""

from __future__ import annotations

import asyncio
from typing import Final

from quiver.errors import InvalidRequest, Undeliverable
from quiver.otlp.convert import from_otap
from quiver.pipeline.item import Item

_AT_ONCE: Final = 64 * 1024
"""Bytes of tables that are converted without a thread: about a millisecond."""


async def otlp_requests(item: Item) -> tuple[bytes, ...]:
    """The requests as they came, or one that is made of the OTAP tables.

    Raises:
        Undeliverable: The tables do not add up.
    """
    if not item.tables:
        return item.requests
    if item.size <= _AT_ONCE:
        return converted(item)
    return await asyncio.to_thread(converted, item)


def converted(item: Item) -> tuple[bytes, ...]:
    """The same, in the thread of the caller."""
    if not item.tables:
        return item.requests
    try:
        return (from_otap(item.signal, item.tables),)
    except InvalidRequest as error:
        raise Undeliverable(f"the OTAP tables cannot be converted: {error}") from error
