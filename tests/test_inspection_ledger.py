"""What ``quiver inspect`` says of a store's ledger."""

from __future__ import annotations

import json
from pathlib import Path

from bundles import plain_bundle
from typer.testing import CliRunner

from quiver import Start, Store
from quiver.cli.main import app


def test_a_store_shows_its_id_and_its_losses(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.subscribe("slow", Start.earliest())
        store.ingest(plain_bundle(0))
        store.flush()
        store.unregister("slow")
        store_id = store.store_id
    table = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert table.exit_code == 0
    assert store_id in table.output
    assert "lost, unregistered.bundles.slow" in table.output
    assert "Not part of the store" not in table.output
    seen = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--output=json"]).output)
    assert seen["store_id"] == store_id
    assert seen["losses"] == {"unregistered.bundles.slow": 1}


def test_a_damaged_ledger_is_damage(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    (tmp_path / "quiver.ledger").write_text("nonsense")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 1
    assert "quiver.ledger" in shown.output
