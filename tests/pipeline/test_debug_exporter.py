"""The debug exporter shows what passes, and no secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from quiver import Signal
from quiver.errors import InvalidConfig, TryLater
from quiver.otlp.convert import to_otap
from quiver.pipeline.exporters.debug import DebugExporter
from quiver.pipeline.item import Item
from quiver.pipeline.settings.options import DebugOptions
from quiver.testing.telemetry import Shape, Telemetry


def shown(item: Item, verbosity: str) -> list[str]:
    texts: list[str] = []
    node = DebugExporter("debug", DebugOptions(verbosity=verbosity), write=texts.append)
    asyncio.run(node.take(item))
    return "".join(texts).splitlines()


def sample(items: int, requests: int = 1) -> Item:
    made = Telemetry(1, Shape(items_per_request=items)).take(Signal.TRACES, requests)
    context = {"x-tenant": "hush", "peer": "hush"}
    return Item(signal=Signal.TRACES, requests=tuple(made), count=items * requests, context=context)


def test_one_line_an_item() -> None:
    item = sample(10, 3)
    assert shown(item, "basic") == [
        f"traces requests=3 items=30 bytes={item.size} context=peer,x-tenant"
    ]
    bare = Item(signal=Signal.LOGS, requests=(b"",))
    assert shown(bare, "basic") == ["logs requests=1 items=? bytes=0 context=-"]


def test_all_of_it() -> None:
    item = sample(10, 2)
    _, first, second = shown(item, "detailed")
    assert len(json.loads(first)["resourceSpans"]) == 2
    assert first != second
    (tables,) = to_otap(Signal.TRACES, item.requests).batches
    head, only = shown(Item(signal=Signal.TRACES, tables=tables), "detailed")
    assert f"tables={len(tables)}" in head
    assert "resourceSpans" in json.loads(only)


def test_not_more_than_a_reader_can_bear() -> None:
    text = "".join(shown(sample(200, 5), "detailed"))
    assert len(text) < 70_000
    assert text.endswith("... and 4 requests more")
    _, line = shown(Item(signal=Signal.LOGS, requests=(b"\xff",)), "detailed")
    assert "cannot be read" in json.loads(line)
    _, line = shown(Item(signal=Signal.LOGS, requests=(b"x" * 5_000_000,)), "detailed")
    assert "too large" in json.loads(line)


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(DebugExporter("debug", DebugOptions()).take(sample(1)))
    assert capsys.readouterr().out.startswith("traces requests=1 items=1 ")


def test_a_closed_output_refuses() -> None:
    def closed(error: Exception) -> Callable[[str], None]:
        def write(_: str) -> None:
            raise error

        return write

    for error in (BrokenPipeError(), ValueError("I/O operation on closed file")):
        node = DebugExporter("debug", DebugOptions(), write=closed(error))
        with pytest.raises(TryLater):
            asyncio.run(node.take(sample(1)))
    with pytest.raises(InvalidConfig, match="verbosity"):
        DebugExporter("debug", DebugOptions(verbosity="loud"))
