"""``quiver buffer``: looking into a queue, dumping, collecting, requeueing, committing."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner, Result

from quiver.buffer import manifest
from quiver.buffer.blocking import BlockingConsumer, BlockingProducer
from quiver.buffer.dead_letters import DeadLetters
from quiver.buffer.objects import Objects
from quiver.buffer.obstore_objects import open_objects
from quiver.cli.main import app
from quiver.config import BatchCompression, ProducerConfig, QueueConfig
from quiver.metrics import Metrics

if TYPE_CHECKING:
    from s3 import S3Server

pytest_plugins = ["s3"]

COMMANDS = ("inspect", "dump", "gc", "requeue", "committer")
METADATA = b"\1\1\1\0"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["buffer", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def objects(url: str) -> Objects:
    return open_objects(url)


def fill(objects: Objects, *records: bytes) -> list[str]:
    """One batch for each; where they are."""
    config = ProducerConfig(batch_compression=BatchCompression.ZSTD)
    places = []
    with BlockingProducer(objects, config, producer_id="worker-7") as producer:
        for record in records:
            handle = producer.produce([record, b""], METADATA)
            producer.flush()
            places.append(handle.watcher.durable().location)
    return places


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: quiver buffer {command}" in result.stdout
    assert "--manifest-path" in result.stdout
    assert "--endpoint" in result.stdout


def test_help_does_not_load_object_stores() -> None:
    code = "import sys; from quiver.cli.main import app; print('obstore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- inspect ------------------------------------------------------------------------------------


def test_a_queue_is_shown_to_people(url: str, objects: Objects) -> None:
    places = fill(objects, b"a" * 3000, b"b")
    result = run("inspect", url)
    assert result.exit_code == 0, result.output
    for text in (*places, "0 (no consumer yet)", "2 batches", "worker-7", "All is well"):
        assert text in result.stdout
    assert "\x1b" not in result.stdout


def test_a_queue_is_shown_to_programs(url: str, objects: Objects) -> None:
    places = fill(objects, b"a", b"b")
    with BlockingConsumer(objects) as consumer:
        consumer.initialize()
        batch = consumer.next_batch()
        assert batch is not None
        consumer.dead_letter(batch.entry, "looks\x1b odd")
        consumer.ack_through(0)
    fill(objects, b"c")
    result = run("inspect", url, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [found[name] for name in ("version", "epoch", "next_sequence", "entry_count")] == [
        1, 1, 3, 2,
    ]  # fmt: skip
    first = found["entries"][0]
    assert first["location"] == places[1]
    assert (first["records"], first["producer_id"], first["damage"]) == (2, "worker-7", None)
    assert 0 <= first["age_s"] < 60
    assert found["waiting_bytes"] == sum(entry["bytes"] for entry in found["entries"]) > 0
    assert found["unlisted_batches"] == 0
    assert [letter["reason"] for letter in found["dead_letters"]] == ["looks\x1b odd"]
    shown = run("inspect", url, "--limit", "1")
    assert "... 1 more" in shown.stdout
    assert "looks\\x1b odd" in shown.stdout
    assert len(json.loads(run("inspect", url, "--json", "--limit", "1").stdout)["entries"]) == 1


def test_a_missing_batch_is_damage(url: str, objects: Objects, tmp_path: Path) -> None:
    gone, changed, _ = fill(objects, b"a", b"b", b"c")
    (tmp_path / "store" / gone).unlink()
    (tmp_path / "store" / changed).write_bytes(b"?")
    result = run("inspect", url)
    assert result.exit_code == 1
    assert f"batch 0 at {gone}: there is no such object" in result.stdout
    assert f"batch 1 at {changed}: it has 1 bytes" in result.stdout
    assert "2 of 3 batches cannot be read" in result.stdout
    assert len(json.loads(run("inspect", url, "--json").stdout)["damage"]) == 2


def test_a_manifest_that_does_not_add_up_is_damage(
    url: str, objects: Objects, tmp_path: Path
) -> None:
    fill(objects, b"a")
    path = tmp_path / "store" / "ingest" / "manifest"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    result = run("inspect", url)
    assert result.exit_code == 1
    assert "does not add up: ingest/manifest: at byte" in result.stdout
    assert "byte" in json.loads(run("inspect", url, "--json").stdout)["damage"][0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("inspect", "ftp://x"), "is no object store"),
        (("inspect", "memory://nothing"), "there is no ingest/manifest"),
        (("inspect", "memory://x", "--manifest-path", "../x"), "queue.manifest_path"),
        (("dump", "memory://x", "--batch", "ingest/x"), "there is no such object"),
        (("requeue", "memory://nothing", "3"), "dead-letter"),
        (("gc", "memory://nothing"), "there is no ingest/manifest"),
        (("gc", "memory://nothing", "--grace-period", "0"), "gc_grace_period"),
        (("committer", "memory://x", "--listen", "nowhere"), "must be host:port"),
        (("dump", "--manifest", "/nonexistent"), "check the path"),
    ],
)
def test_what_cannot_be_read_is_one_line(arguments: tuple[str, ...], reason: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


# --- dump ---------------------------------------------------------------------------------------


def test_a_manifest_is_dumped_as_others_do(url: str, objects: Objects, tmp_path: Path) -> None:
    (place,) = fill(objects, b"a")
    result = run("dump", url)
    found = json.loads(result.stdout)
    assert list(found) == ["version", "epoch", "next_sequence", "entries"]
    (entry,) = found["entries"]
    assert (entry["sequence"], entry["location"]) == (0, place)
    assert base64.b64decode(entry["metadata"][0]["payload_base64"]) == METADATA
    assert entry["facts"]["record_count"] == 2
    local = run("dump", "--manifest", str(tmp_path / "store" / "ingest" / "manifest"))
    assert local.stdout == result.stdout


def test_a_golden_manifest_is_dumped_without_facts(tmp_path: Path) -> None:
    location = "ingest/01ARZ3NDEKTSV4RRFFQ69G5FAV.batch"
    entry = bytes.fromhex("4900000000000000000000002700") + location.encode()
    entry += bytes.fromhex("01000000000000000068e5cf8b0100000400000001010100")
    footer = bytes.fromhex("01000000010000000000000000000000000000000100")
    file = tmp_path / "m1"
    file.write_bytes(entry + footer)
    assert json.loads(run("dump", "--manifest", str(file)).stdout) == {
        "version": 1,
        "epoch": 0,
        "next_sequence": 1,
        "entries": [
            {
                "sequence": 0,
                "location": location,
                "metadata": [
                    {
                        "start_index": 0,
                        "ingestion_time_ms": 1_700_000_000_000,
                        "payload_base64": "AQEBAA==",
                    }
                ],
            }
        ],
    }


def test_a_batch_is_dumped_by_sequence_and_by_path(url: str, objects: Objects) -> None:
    _, place = fill(objects, b"a", b"bcd")
    by_sequence = json.loads(run("dump", url, "--sequence", "1").stdout)
    assert by_sequence["records_base64"] == [base64.b64encode(b"bcd").decode(), ""]
    assert by_sequence["location"] == place
    by_path = json.loads(run("dump", url, "--batch", place).stdout)
    assert by_path["records_base64"] == by_sequence["records_base64"]
    missing = run("dump", url, "--sequence", "2")
    assert missing.exit_code == 2
    assert "has no entry 2: it has 0 to 1" in missing.stderr


def test_a_dump_is_of_one_thing(url: str) -> None:
    assert run("dump").exit_code == 2
    assert run("dump", url, "--manifest", "x").exit_code == 2
    assert "one of" in run("dump", url, "--sequence", "1", "--batch", "x").stderr


# --- gc and requeue -----------------------------------------------------------------------------


def consume_all(objects: Objects) -> None:
    with BlockingConsumer(objects) as consumer:
        consumer.initialize()
        last = consumer.latest_sequence()
        assert len(consumer.next_descriptors(99)) == last + 1
        consumer.ack_through(last)


def test_garbage_is_shown_and_then_deleted(url: str, objects: Objects, tmp_path: Path) -> None:
    places = fill(objects, b"a", b"b")
    consume_all(objects)
    assert run("gc", url, "--dry-run").stdout == ""  # it is young
    time.sleep(1.1)
    before = sorted((tmp_path / "store" / "ingest").iterdir())
    shown = run("gc", url, "--dry-run", "--grace-period", "1")
    assert (shown.exit_code, shown.stdout.split()) == (0, sorted(places)), shown.output
    assert sorted((tmp_path / "store" / "ingest").iterdir()) == before
    done = run("gc", url, "--grace-period", "1")
    assert (done.exit_code, sorted(done.stdout.split())) == (0, sorted(places)), done.output
    assert "2 batches may go; looking again in 0.5 s" in done.stderr
    assert "2 batches deleted" in done.stderr
    assert not list((tmp_path / "store").rglob("*.batch"))


def test_a_dead_letter_comes_back_beside_a_running_consumer(url: str, objects: Objects) -> None:
    (place,) = fill(objects, b"a")
    with BlockingConsumer(objects) as consumer:
        consumer.initialize()
        batch = consumer.next_batch()
        assert batch is not None
        consumer.dead_letter(batch.entry, "a test")
        consumer.ack_through(0)
        result = run("requeue", url, "0")
        assert result.exit_code == 0, result.output
        assert "Batch 0 is back in the queue as 1" in result.stdout
        again = consumer.next_batch()
        assert again is not None
        assert again.records == (b"a", b"")
        assert again.payload_of(0) == METADATA
        assert again.entry.location != place
        assert again.entry.facts == batch.entry.facts
    assert asyncio.run(DeadLetters(objects, "ingest").paths()) == []
    assert run("requeue", url, "0").exit_code == 2


def test_a_batch_that_is_lost_is_not_put_back(url: str, objects: Objects, tmp_path: Path) -> None:
    (place,) = fill(objects, b"a")
    with BlockingConsumer(objects) as consumer:
        consumer.initialize()
        (entry,) = consumer.next_descriptors(1)
        consumer.dead_letter(entry, "a test")
        consumer.ack_through(0)
    (tmp_path / "store" / place).unlink()
    result = run("requeue", url, "0")
    assert result.exit_code == 2
    assert "there is no such object" in result.stderr
    assert len(asyncio.run(DeadLetters(objects, "ingest").paths())) == 1


@pytest.mark.xdist_group("s3")
def test_a_queue_on_s3_is_found_by_its_endpoint_and_the_keys_of_the_environment(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, paths = f"s3://{s3_server.bucket}/cli", ("--manifest-path", "a/m", "--data-prefix", "b")
    where = ("--endpoint", s3_server.endpoint, "--region", "us-east-1", *paths)
    queue = QueueConfig(manifest_path="a/m", data_path_prefix="b")
    objects = open_objects(s3_server.url("cli"), **s3_server.keys)
    with BlockingProducer(objects, ProducerConfig(queue=queue)) as producer:
        place = producer.produce([b"a"]).watcher.durable(20).location
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    found = run("inspect", url, "--json", *where)
    assert found.exit_code == 0, found.output
    assert [entry["location"] for entry in json.loads(found.stdout)["entries"]] == [place]
    assert json.loads(run("dump", url, "--sequence", "0", *where).stdout)["records_base64"]
    assert run("gc", url, *where).exit_code == 0


# --- committer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_committer_serves_until_it_is_told_to_end(
    url: str, objects: Objects, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "quiver", "buffer", "committer", url, "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"127\.0\.0\.1:\d+", line)
        assert address, line
        metrics = Metrics()
        config = ProducerConfig(committer=address[0])
        with BlockingProducer(objects, config, metrics=metrics) as producer:
            producer.produce([b"a"]).watcher.durable(timeout=20)
        assert metrics.get("buffer.committer_appends") == 1
        process.send_signal(number)
        assert process.wait(20) == 0
        assert "Ended" in process.stderr.read()
    data = asyncio.run(objects.get("ingest/manifest"))
    assert data is not None
    assert manifest.check(data.data, source="x").entry_count == 1
