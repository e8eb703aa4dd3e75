"""Calls that are under way when a store is closed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bundles import plain_bundle

from quiver import Store, StoreClosed
from quiver.testing import Call, SimulatedDisk


def test_a_flush_that_the_closing_overtakes_does_not_claim_to_be_done() -> None:
    disk = SimulatedDisk()
    store = Store.open(Path("/store"), disk=disk)
    store.ingest(plain_bundle(0))
    reached, go_on = threading.Event(), threading.Event()

    def hold(call: Call) -> None:
        if call.kind == "create" and ".qseg" in call.path.name:
            reached.set()
            go_on.wait(30)

    disk.before_call = hold
    with ThreadPoolExecutor(2) as pool:
        flushing = pool.submit(store.flush)
        assert reached.wait(30)
        closing = pool.submit(store.close)
        with pytest.raises(StoreClosed, match="before its open segment was finalised"):
            flushing.result(30)
        go_on.set()
        closing.result(30)
    assert disk.list_directory(Path("/store/segments")) == ["0000000000000000.qseg"]
