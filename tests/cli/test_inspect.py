"""``quiver inspect`` as users call it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from bundles import START_NS, plain_bundle
from looking import G2, GOLDEN, SEGMENT, flip, make_store, seal
from typer.testing import CliRunner, Result

from quiver.bundle import RecordBundle
from quiver.cli.main import app
from quiver.disk import RealDisk
from quiver.segment.writer import OpenSegment, write_segment
from quiver.wal.entry import prepare_entry
from quiver.wal.writer import WalWriter

INDEX: dict[str, dict[str, Any]] = json.loads((GOLDEN / "INDEX.json").read_text())
NOBODY = 65534
ESCAPE = "\x1b"


def inspect(*arguments: str | Path, **environment: str) -> Result:
    plain = {"COLUMNS": "200", "NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm-256color"}
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={**plain, **environment})


def inspect_json(*arguments: str | Path) -> dict[str, Any]:
    result = inspect(*arguments, "--output", "json")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def only_error(result: Result) -> str:
    """The one line that a command which failed may print."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The golden files with the modes that they were written with, which git does not keep."""
    root = Path(shutil.copytree(GOLDEN, tmp_path / "golden"))
    for name, expected in INDEX.items():
        (root / name).chmod(int(expected["mode"], 8))
    return root


# --- JSON ---------------------------------------------------------------------------------------


def assert_carries(found: Any, expected: Any, where: str) -> None:  # noqa: ANN401 - it is JSON
    """Everything expected is there, with the same value; more may be there."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        for key, value in expected.items():
            assert key in found, f"{where}: {key} is missing"
            assert_carries(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_carries(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where
        assert type(found) is type(expected), where


def test_the_index_covers_every_golden_file() -> None:
    files = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*") if path.is_file()}
    assert files - {"INDEX.json"} == set(INDEX)


@pytest.mark.parametrize("name", INDEX)
def test_the_json_of_a_golden_file_carries_what_the_reference_says(name: str, golden: Path) -> None:
    result = inspect(golden / name, "--output", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert_carries(document, INDEX[name], name)
    assert document["path"] == str(golden / name)
    assert document["kind"] in {"wal", "cursor", "segment", "progress"}
    assert document["healthy"] is True


def test_the_json_is_one_stable_document_without_markup(golden: Path) -> None:
    first = inspect(golden / G2, "-o", "json", FORCE_COLOR="1")
    assert first.stdout == inspect(golden / G2, "-o", "json").stdout
    assert first.stdout.startswith('{\n  "kind": "store",\n  "path"')
    assert ESCAPE not in first.stdout
    assert "sha256" not in json.loads(first.stdout)


def test_the_json_lists_everything_unless_told(tmp_path: Path) -> None:
    path = log_of(30, tmp_path)
    assert len(inspect_json(path)["entries"]) == 30
    limited = inspect_json(path, "--limit", "3")
    assert len(limited["entries"]) == 3
    assert limited["entry_count"] == 30


def test_the_store_says_how_far_everybody_is(tmp_path: Path) -> None:
    document = inspect_json(make_store(tmp_path))
    assert document["entries_past_cursor"] == 2
    assert document["subscribers"][0] == {
        "id": "lake",
        "resolved": 2,
        "pending": 2,
        "oldest_incomplete_segment": 0,
        "flags": 0,
        "flag_names": [],
        "segments_gone": 0,
    }


# --- Tables -------------------------------------------------------------------------------------


def log_of(entries: int, directory: Path) -> Path:
    writer = WalWriter.open(RealDisk(), directory / "wal")
    writer.append([prepare_entry(plain_bundle(index)) for index in range(entries)])
    writer.close()
    return directory / "wal" / "quiver.wal"


def table(text: str, title: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = text.split(f"\n{title}\n")[1].split("\n\n", maxsplit=1)[0].splitlines()
    return [line.split("   ") for line in lines[2:]]


def cells(text: str, title: str) -> list[list[str]]:
    return [[cell.strip() for cell in row if cell.strip()] for row in table(text, title)]


def test_the_table_of_a_wal_file(golden: Path) -> None:
    text = inspect(golden / G2 / "wal" / "quiver.wal").stdout
    assert text.startswith(f"WAL file  {golden}/{G2}/wal/quiver.wal\n")
    assert "4.8 KiB (4,872 bytes)" in text
    assert "4, sequence 0 to 3" in text
    assert cells(text, "Entries")[0] == [
        "0",
        "38",
        "1533",
        "2023-11-14T22:13:20.000000000Z (1700000000000000000)",
        "fdfb3528",
        "LOGS (30): 3, a1a1a1a1, LOG_ATTRS (31): 3, b1b1b1b1",
    ]
    assert text.endswith("\nNothing is damaged.\n")


def test_the_table_of_a_segment(golden: Path) -> None:
    text = inspect(golden / SEGMENT).stdout
    assert "03442da8 verified" in text
    assert cells(text, "Streams")[1] == [
        "1",
        "LOG_ATTRS (31)",
        "b1b1b1b1",
        "1152",
        "1.5 KiB",
        "5",
        "2",
    ]
    assert cells(text, "Schemas")[1] == [
        "1",
        "k: dictionary<values=string, indices=uint8, ordered=0>",
    ]
    assert cells(text, "Bundles")[2] == ["2", "logs", "1", "OTLP_LOGS (60): 1"]


def test_the_table_of_a_store(golden: Path) -> None:
    text = inspect(golden / G2).stdout
    assert text.startswith(f"Store  {golden}/{G2}\n")
    assert "4, 0 past the cursor" in text
    assert "4 bundles, 13 rows, 7 items" in text
    log, segments, subscribers = "Log, oldest first", "Segments", "Subscribers, over the segments"
    assert cells(text, log) == [["quiver.wal", "4.8 KiB", "0", "4834", "4", "0", "13", "0", "0"]]
    assert cells(text, segments)[0][3:] == ["5", "4", "13", "7", "verified"]
    assert cells(text, f"{subscribers} above") == [["golden", "3", "1", "0", "0"]]


def test_the_tables_of_small_files(golden: Path) -> None:
    text = inspect(golden / G2 / "quiver.sub.golden").stdout
    assert "3 resolved, 1 pending" in text
    assert cells(text, "Segments") == [["0", "4", "3", "1", "##.#"]]
    text = inspect(golden / G2 / "wal" / "quiver.wal.cursor").stdout
    assert "log position  4834" in text


def test_the_table_of_several_stores(tmp_path: Path) -> None:
    make_store(tmp_path / "core_0")
    make_store(tmp_path / "core_1")
    flip(tmp_path / "core_1" / "quiver.sub.lake", 15)
    result = inspect(tmp_path)
    assert result.exit_code == 1
    assert [row[0] for row in cells(result.stdout, "Stores")] == [
        f"{tmp_path}/core_0",
        f"{tmp_path}/core_1",
    ]
    assert f"{tmp_path}/core_1: quiver.sub.lake" in result.stdout
    assert result.stdout.endswith("\n1 part damaged.\n")


@pytest.mark.parametrize(
    ("limit", "rows", "line"),
    [
        ((), 20, "... 30 more, use --limit"),
        (("--limit", "49"), 49, "... 1 more, use --limit"),
        (("--limit", "50"), 50, None),
        (("--limit", "0"), 0, "... 50 more, use --limit"),
    ],
)
def test_a_table_stops_at_the_limit_and_says_so(
    limit: tuple[str, ...], rows: int, line: str | None, tmp_path: Path
) -> None:
    text = inspect(log_of(50, tmp_path), *limit).stdout
    assert text.count("LOGS (30): 3") == rows
    assert "50, sequence 0 to 49" in text
    assert ("more, use --limit" in text) == (line is not None)
    assert line is None or f"\n{line}\n" in text


def test_times_that_a_segment_of_ours_knows_are_shown(tmp_path: Path) -> None:
    batch = pa.record_batch({"time_unix_nano": pa.array([-1, 2**63 - 1], pa.int64())})
    segment = OpenSegment()
    bundle = RecordBundle.from_batches({30: batch}, ingestion_time_ns=START_NS, item_count=2)
    segment.append(bundle, 7)
    write_segment(RealDisk(), tmp_path / "1.qseg", segment)
    text = inspect(tmp_path / "1.qseg").stdout
    assert "1969-12-31T23:59:59.999999999Z (-1)" in text
    assert "2262-04-11T23:47:16.854775807Z (9223372036854775807)" in text
    assert "2023-11-14T22:13:20.000000000Z (1700000000000000000)" in text


# --- Damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEX)
@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_is_shown_and_exits_with_1(
    name: str, output: str, damage: str, golden: Path
) -> None:
    path = golden / name
    path.chmod(0o644)
    size = path.stat().st_size
    if damage == "flipped":
        flip(path, size - 6)
    else:
        path.write_bytes(path.read_bytes()[: size - 6])
    result = inspect(path, "--output", output)
    assert (result.exit_code, result.stderr) == (1, "")
    if output == "table":
        assert "\nDamaged\n" in result.stdout
        assert result.stdout.endswith(" damaged.\n")
    else:
        assert json.loads(result.stdout)["healthy"] is False


def test_a_damaged_part_of_a_store_is_named_and_the_rest_is_shown(golden: Path) -> None:
    (golden / SEGMENT).chmod(0o644)
    flip(golden / SEGMENT, 5000)
    flip(golden / G2 / "wal" / "quiver.wal", 60)
    result = inspect(golden / G2)
    assert result.exit_code == 1
    assert cells(result.stdout, "Segments")[0][-1] == "NOT verified"
    where = [row[0] for row in cells(result.stdout, "Damaged")]
    assert where == ["wal/quiver.wal", "segments/0000000000000000.qseg"]
    assert cells(result.stdout, "Subscribers, over the segments above")[0][0] == "golden"
    assert result.stdout.endswith("\n2 parts damaged.\n")


# --- Mistakes -----------------------------------------------------------------------------------


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    error = only_error(inspect(tmp_path / "nothing"))
    assert error == f"error: {tmp_path}/nothing: No such file or directory; check the path\n"


def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "spans.parquet").write_bytes(b"PAR1 some columns PAR1")
    error = only_error(inspect(tmp_path / "spans.parquet"))
    assert "not a Quiver file" in error
    assert r"b'QUIVER\x00WAL' at the start" in error
    assert "it looks like a Parquet file" in error


def test_a_directory_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("hello")
    assert "not a store: it has readme.txt; looked for wal/" in only_error(inspect(tmp_path))


@pytest.mark.parametrize("part", ["wal", "segments", ".."])
def test_the_directory_above_or_below_the_store(part: str, golden: Path) -> None:
    error = only_error(inspect(golden / G2 / part))
    assert f"{golden}/{G2}" in error
    assert "inspect " in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing argument 'PATH'"),
        (("a", "b"), "unexpected extra argument"),
        (("a", "--output", "yaml"), "'yaml' is not one of"),
        (("a", "--limit", "-1"), "Invalid value for '--limit'"),
        (("a", "--limit", "many"), "Invalid value for '--limit'"),
        (("a", "--json"), "No such option"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(arguments: tuple[str, ...], complaint: str) -> None:
    result = inspect(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Usage: " in result.stderr
    assert "Traceback" not in result.output


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A directory of a user who is not root, for whom every file can be read."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    inspect(GOLDEN / G2)  # everything is imported while it may be read
    is_root = os.geteuid() == 0
    try:
        yield root
    finally:
        if is_root:
            os.seteuid(0)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(root)


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def test_a_file_that_may_not_be_read(as_nobody: Path) -> None:
    path = as_nobody / "quiver.wal"
    shutil.copyfile(GOLDEN / "g1_wal_only" / "wal" / "quiver.wal", path)
    path.chmod(0)
    become_nobody()
    error = only_error(inspect(path))
    assert f"{path}: Permission denied; run it as the user" in error


def test_a_part_that_may_not_be_read_does_not_hide_the_store(as_nobody: Path) -> None:
    make_store(as_nobody / "store")
    (as_nobody / "store" / "segments").chmod(0)
    (as_nobody / "store" / "wal" / "quiver.wal").chmod(0)
    become_nobody()
    result = inspect(as_nobody / "store")
    assert result.exit_code == 1
    assert cells(result.stdout, "Damaged") == [
        ["wal/quiver.wal", "Permission denied"],
        ["segments", "Permission denied"],
    ]
    assert "lake" in result.stdout


# --- Untrusted text -----------------------------------------------------------------------------


def segment_with_field(name: str, path: Path) -> Path:
    segment = OpenSegment()
    batch = pa.record_batch({name: pa.array([1])})
    segment.append(RecordBundle.from_batches({7: batch}, ingestion_time_ns=0))
    write_segment(RealDisk(), path, segment)
    return path


@pytest.mark.parametrize("colour", ["", "1"])
def test_markup_in_names_is_printed_as_it_is(colour: str, tmp_path: Path) -> None:
    directory = tmp_path / "[red]store[bold] :smile:"
    directory.mkdir()
    path = segment_with_field("[bold]field[/bold] [link=x]", directory / "[blink].qseg")
    text = inspect(path, FORCE_COLOR=colour).stdout
    assert "[red]store[bold] :smile:/[blink].qseg" in text
    assert "[bold]field[/bold] [link=x]: int64" in text
    assert "/[red]nothing:" in only_error(inspect(directory / "[red]nothing"))


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    directory = tmp_path / "a\nb\x1b]0;title\x07"
    directory.mkdir()
    path = segment_with_field("\x1b[2J\r\u202efield", directory / "x.qseg")
    for result in (inspect(path), inspect(path, "-o", "json"), inspect(directory)):
        assert set(result.output).isdisjoint({ESCAPE, "\x07", "\r", "\u202e"})
    assert r"\x1b[2J\r\u202efield: int64" in inspect(path).stdout
    assert inspect(path).stdout.splitlines()[0].endswith(r"a\nb\x1b]0;title\x07/x.qseg")


def test_no_color_means_no_escape_sequences_at_all(golden: Path) -> None:
    flip(golden / G2 / "wal" / "quiver.wal", 60)
    assert ESCAPE in inspect(golden / G2, FORCE_COLOR="1").stdout
    assert ESCAPE not in inspect(golden / G2, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert ESCAPE not in inspect(golden / G2).stdout


# --- The real program ---------------------------------------------------------------------------

Program = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def program() -> Program:
    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "quiver.cli.main", "inspect", *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            check=False,
        )

    return run


def test_the_program_shows_a_store(program: Program, golden: Path) -> None:
    done = program(golden / G2, "--output", "json")
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["bundles"] == 4


def test_the_program_reports_damage_and_errors_without_a_traceback(
    program: Program, golden: Path
) -> None:
    (golden / SEGMENT).chmod(0o644)
    flip(golden / SEGMENT, 9999)
    seal(golden / SEGMENT)
    assert program(golden / SEGMENT).returncode == 1
    done = program(golden / "nothing")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ")


def test_a_name_that_is_no_text_and_a_terminal_that_knows_only_ascii(
    program: Program, tmp_path: Path
) -> None:
    name = os.fsdecode(b"gr\xfc\xdf \xe2\x82\xac")
    path = segment_with_field("größe", tmp_path / "x.qseg").rename(tmp_path / name)
    done = program(path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\udcfc\udcdf \u20ac" in done.stdout
    assert rb"gr\xf6\xdfe: int64" in done.stdout
    assert program(path, "-o", "json", PYTHONIOENCODING="ascii").returncode == 0


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_reader_that_leaves_early_is_not_complained_about(
    output: str, damaged: bool, tmp_path: Path
) -> None:
    path = log_of(3000, tmp_path)  # far more than a pipe holds
    if damaged:
        flip(path, 100)
    arguments = ["-m", "quiver", "inspect", str(path), "--output", output, "--limit", "3000"]
    with subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # unbuffered, Python forgets half a write
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == int(damaged)
