"""``quiver demo``: it shows its steps, and does not claim success without it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from quiver.bundle import Payload, RecordBundle, Signal
from quiver.cli.demo import DEFAULT_DIRECTORY
from quiver.cli.demo_data import make_bundles
from quiver.cli.demo_steps import BUNDLE_COUNT, differences
from quiver.cli.main import app
from quiver.disk import RealDisk

DATA = pa.record_batch({"value": pa.array([1, 2, 3])})
BUNDLE = RecordBundle.from_batches({30: DATA}, ingestion_time_ns=5)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


def test_it_shows_each_step_and_what_to_do_next(tmp_path: Path) -> None:
    result = run("--directory", str(tmp_path / "here"))
    assert result.exit_code == 0, result.output
    for text in (
        "seed 1",
        "1. Written to the log",
        "2. Crashed",
        f"{BUNDLE_COUNT} bundles",
        "3. Turned into a segment",
        "4. Read through a memory map",
        "LOG_ATTRS",
        "OTLP_LOGS",
    ):
        assert text in result.stdout
    assert result.stdout.count("Everything is equal") == 2
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_the_commands_that_it_suggests_work(tmp_path: Path) -> None:
    result = run("--directory", str(tmp_path / "a b"))
    commands = [shlex.split(line) for line in result.stdout.splitlines() if "inspect" in line]
    assert len(commands) == 3
    for quiver, *arguments in commands:
        assert quiver == "quiver"
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
        assert "Nothing is damaged" in shown.stdout


def test_a_second_run_replaces_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, again, other = run(), run(), run("--seed", "2")
    assert [first.exit_code, again.exit_code, other.exit_code] == [0, 0, 0]
    assert first.stdout == again.stdout != other.stdout
    assert [path.name for path in tmp_path.iterdir()] == [DEFAULT_DIRECTORY.name]


def test_a_foreign_directory_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    result = run("--directory", str(tmp_path))
    assert result.exit_code == 2
    assert "not from an earlier demo" in result.stderr
    assert "--directory" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("suffix", "message"),
    [(".wal", "240 bundles went in and 239 came back"), (".qseg", "the file is damaged")],
)
def test_damage_makes_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, message: str
) -> None:
    class DamagingDisk(RealDisk):
        def map(self, path: Path) -> pa.Buffer:
            data = bytearray(super().map(path))
            if path.suffix == suffix:
                data[len(data) // 2] ^= 1
            return pa.py_buffer(bytes(data))

    monkeypatch.setattr("quiver.disk.RealDisk", DamagingDisk)
    result = run("--directory", str(tmp_path))
    assert result.exit_code == 1
    assert f"NOT EQUAL to what went in: {message}" in result.stdout
    assert "quiver inspect" not in result.stdout


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RecordBundle({30: Payload(DATA, bytes(32))}, 5), "another fingerprint in LOGS"),
        (RecordBundle(BUNDLE.payloads, 6), "another ingestion time"),
        (RecordBundle({31: BUNDLE.payloads[30]}, 5), "other slots"),
        (
            RecordBundle.from_batches({30: DATA.slice(1)}, ingestion_time_ns=5),
            "other rows in LOGS",
        ),
    ],
)
def test_a_difference_is_named(other: RecordBundle, message: str) -> None:
    assert list(differences([BUNDLE], [other])) == [f"bundle 0 has {message}"]


def test_another_dictionary_is_no_difference_but_another_value_is() -> None:
    def bundle(keys: list[int], values: list[str]) -> RecordBundle:
        column = pa.DictionaryArray.from_arrays(pa.array(keys, pa.uint8()), pa.array(values))
        batch = pa.record_batch({"key": column})
        return RecordBundle.from_batches({31: batch}, ingestion_time_ns=5)

    one = bundle([0, 1], ["a", "b"])
    assert list(differences([one], [bundle([1, 2], ["x", "a", "b"])])) == []
    assert list(differences([one], [bundle([0, 1], ["a", "c"])])) == [
        "bundle 0 has other rows in LOG_ATTRS"
    ]


def test_the_data_is_made_of_its_seed() -> None:
    one, again, other = (list(make_bundles(seed, 8)) for seed in (3, 3, 4))
    assert list(differences(one, again)) == []
    assert list(differences(one, other))


def test_the_data_has_what_it_promises() -> None:
    bundles = list(make_bundles(1, 8))
    assert {bundle.signal for bundle in bundles} == {Signal.LOGS, Signal.TRACES}
    assert sum(bundle.batch(30) is not None for bundle in bundles) == 4
    assert sum(bundle.batch(40) is not None for bundle in bundles) == 2
    opaque = [bundle.payloads[60] for bundle in bundles if bundle.batch(60) is not None]
    assert len(opaque) == 2
    assert opaque[0].fingerprint.hex().startswith("61a0cd7165e024ae")
