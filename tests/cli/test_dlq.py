"""``quiver dlq``: what was refused can be listed, looked at, tried again and dropped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from receiving import Collector, eventually, request_of
from typer.testing import CliRunner, Result

from quiver import Signal
from quiver.cli.dlq import COMMANDS
from quiver.cli.main import reporting
from quiver.disk import RealDisk
from quiver.errors import Undeliverable
from quiver.pipeline.dead_letters import DeadLetter, DeadLetters
from quiver.pipeline.item import Item, to_bundle
from quiver.pipeline.persistence import Persistence
from quiver.pipeline.settings.options import PersistenceOptions, RetentionOptions, SegmentOptions

app = typer.Typer()
for _name, _command in COMMANDS.items():
    app.command(_name)(reporting(_command))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, list(map(str, arguments)), env={"COLUMNS": "250", "NO_COLOR": "1"}
    )


def item(text: str = "a", signal: Signal = Signal.TRACES) -> Item:
    return Item(
        signal=signal,
        requests=(request_of(signal, 2, text),),
        count=2,
        received_ns=7,
        context={"peer": "127.0.0.1:1"},
    )


def add(root: Path, destination: str, reason: str, made: Item | None = None) -> DeadLetter:
    letters = DeadLetters(RealDisk(), root, 10**9)
    return letters.add(destination, to_bundle(made or item()), reason)


def listed(path: Path, *arguments: str) -> list[dict[str, Any]]:
    result = run("list", path, "-o", "json", *arguments)
    assert result.exit_code == 0
    return list(json.loads(result.stdout)["letters"])


def test_the_letters_of_all_cores_are_listed(tmp_path: Path) -> None:
    assert listed(tmp_path) == []
    first = add(tmp_path / "core_0", "out", "bad span")
    second = add(tmp_path / "core_1", "other", "bad \x1b log", item(signal=Signal.LOGS))
    assert [letter["name"] for letter in listed(tmp_path)] == sorted([first.name, second.name])
    assert [letter["name"] for letter in listed(tmp_path / "core_1")] == [second.name]
    assert [letter["name"] for letter in listed(tmp_path, "-d", "out")] == [first.name]
    (letter,) = listed(tmp_path / "core_0")
    assert (letter["reason"], letter["signal"], letter["items"]) == ("bad span", "traces", 2)
    table = run("list", tmp_path).stdout
    assert first.name in table
    assert "bad span" in table
    assert "2 refused" in table
    assert "\x1b" not in table


def test_a_letter_is_shown_with_what_it_holds(tmp_path: Path) -> None:
    letter = add(tmp_path / "core_0", "out", "bad span", item("name of a span"))
    result = run("show", tmp_path, letter.name)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["reason"] == "bad span"
    assert document["context"] == {"peer": "127.0.0.1:1"}
    (request,) = document["requests"]
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans] == ["name of a span0", "name of a span1"]


def test_what_cannot_be_read_is_shown_as_bytes(tmp_path: Path) -> None:
    broken = Item(signal=Signal.TRACES, requests=(b"\xff\xff",))
    letter = add(tmp_path / "core_0", "out", "garbage", broken)
    (request,) = json.loads(run("show", tmp_path, letter.name).stdout)["requests"]
    assert request["bytes"] == "ffff"
    assert request["unreadable"]


def test_letters_are_dropped(tmp_path: Path) -> None:
    letters = [add(tmp_path / f"core_{n % 2}", "out", "no") for n in range(4)]
    result = run("drop", tmp_path, letters[0].name, letters[1].name, letters[1].name)
    assert (result.exit_code, result.stdout) == (0, "2 deleted.\n")
    assert {letter["name"] for letter in listed(tmp_path)} == {letters[2].name, letters[3].name}
    assert run("drop", tmp_path, "--all").stdout == "2 deleted.\n"
    assert listed(tmp_path) == []


def test_a_running_pipeline_tries_again(tmp_path: Path) -> None:
    async def play() -> None:
        taker = Collector("out", answer=lambda _: Undeliverable("not like this"))
        options = PersistenceOptions(
            path=tmp_path,
            segment=SegmentOptions(max_open_duration=0.02),
            retention=RetentionOptions(min_free_space=0),
        )
        node = Persistence("store", options, [taker])
        await node.start()
        try:
            await node.take(item())
            await eventually(lambda: listed(tmp_path), "a dead letter")
            (letter,) = listed(tmp_path)
            assert "not like this" in letter["reason"]
            taker.answer = lambda _: Undeliverable("nor like that")
            assert run("replay", tmp_path, letter["name"]).exit_code == 0
            await eventually(lambda: "nor like that" in listed(tmp_path)[0]["reason"])
            taker.answer = lambda _: None
            assert run("replay", tmp_path, "--all").stdout.startswith("1 will be tried again")
            await eventually(lambda: not listed(tmp_path))
            assert taker.requests == list(item().requests)
        finally:
            await node.stop(asyncio.get_running_loop().time())

    asyncio.run(play())


def test_asked_for_again_is_listed(tmp_path: Path) -> None:
    letter = add(tmp_path / "core_0", "out", "no")
    assert run("replay", tmp_path, letter.name).exit_code == 0
    assert [found["again"] for found in listed(tmp_path)] == [True]


@pytest.mark.parametrize("command", ["replay", "drop"])
def test_names_or_all(tmp_path: Path, command: str) -> None:
    letter = add(tmp_path / "core_0", "out", "no")
    for arguments in ((), (letter.name, "--all"), ("no-such-letter",)):
        result = run(command, tmp_path, *arguments)
        assert result.exit_code == 2
        assert "NAME" in result.stderr
    assert [found["again"] for found in listed(tmp_path)] == [False]


def test_a_directory_that_is_not_there() -> None:
    result = run("list", "/nowhere")
    assert result.exit_code == 2
    assert result.stderr == "error: /nowhere: No such file or directory; check the path\n"
