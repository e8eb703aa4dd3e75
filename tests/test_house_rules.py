"""Rules of the house that no linter knows: who may write files, what may run, how long a file is.

The checks read the syntax tree, not the text. Where a name alone does not tell, they decide so:

- ``x.unlink()``, ``x.rename(y)``, ``x.replace(y)`` are those of a path: a ``Disk`` takes one path
  more, ``str.replace`` one string more, and ``datetime.replace`` names its arguments. Handed around
  without a call, they are a path's unless ``x`` is called a disk.
- ``x.open(y)`` writes when ``y`` is a constant that says so, or is called a mode.
- What pyarrow writes to must be made in memory in the same module, or be annotated as a stream.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "quiver"
MAX_LINES = 500

MAY_WRITE_FILES = {PACKAGE / "disk.py"}

BANNED_IMPORTS = {
    "cloudpickle": "unpickling runs what it reads",
    "dill": "unpickling runs what it reads",
    "marshal": "it crashes on bytes that it did not write",
    "pickle": "unpickling runs what it reads",
    "shelve": "it pickles",
}
WRITING_IMPORTS = {"shutil", "tempfile"}
OS_FUNCTIONS = """
chmod chown copy_file_range fchmod fdopen ftruncate link makedirs mkdir mkfifo open pwrite pwritev
remove removedirs rename renames replace rmdir sendfile symlink truncate unlink write writev
"""
WRITING_FUNCTIONS = {f"os.{name}" for name in OS_FUNCTIONS.split()} | {
    "mmap.mmap",
    "pyarrow.OSFile",
    "pyarrow.create_memory_map",
    "pyarrow.dataset.write_dataset",
    "pyarrow.fs.LocalFileSystem",
    "pyarrow.memory_map",
    "pyarrow.output_stream",
    "pyarrow.parquet.write_to_dataset",
}
# Which argument is the sink: its position, and its name.
SINKS = {
    "pyarrow.RecordBatchFileWriter": (0, "sink"),
    "pyarrow.RecordBatchStreamWriter": (0, "sink"),
    "pyarrow.csv.CSVWriter": (0, "sink"),
    "pyarrow.csv.write_csv": (1, "output_file"),
    "pyarrow.feather.write_feather": (1, "dest"),
    "pyarrow.ipc.RecordBatchFileWriter": (0, "sink"),
    "pyarrow.ipc.RecordBatchStreamWriter": (0, "sink"),
    "pyarrow.ipc.new_file": (0, "sink"),
    "pyarrow.ipc.new_stream": (0, "sink"),
    "pyarrow.parquet.ParquetWriter": (0, "where"),
    "pyarrow.parquet.write_metadata": (1, "where"),
    "pyarrow.parquet.write_table": (1, "where"),
}
STREAMS = {
    "io.BytesIO",
    "pyarrow.BufferOutputStream",
    "pyarrow.FixedSizeBufferWriter",
    "pyarrow.MockOutputStream",
    "pyarrow.NativeFile",
    "pyarrow.PythonFile",
    "typing.BinaryIO",
}
OPENERS = {
    "builtins.open",
    "bz2.open",
    "codecs.open",
    "gzip.open",
    "io.open",
    "lzma.open",
    "tarfile.open",
    "zipfile.ZipFile",
}
PATH_METHODS = "chmod hardlink_to lchmod mkdir rmdir symlink_to touch write_bytes write_text"
WRITING_METHODS = set(PATH_METHODS.split())
AMBIGUOUS_METHODS = {"unlink": 0, "rename": 1, "replace": 1}  # how many arguments a path's takes


class Checker:
    """All that a module does and should not."""

    def __init__(self, source: str, *, may_write_files: bool = False) -> None:
        self._tree = ast.parse(source)
        self._may_write_files = may_write_files
        self._origins = dict(self._imported_names())
        self._called = {id(n.func) for n in ast.walk(self._tree) if isinstance(n, ast.Call)}
        self._streams: set[str] = set()
        self._streams.update(self._stream_names())

    def findings(self) -> list[str]:
        return [
            f"line {getattr(node, 'lineno', 0)}: {finding}"
            for node in ast.walk(self._tree)
            for finding in self._judge(node)
        ]

    def _judge(self, node: ast.AST) -> Iterator[str]:
        yield from self._dangers(node)
        if not self._may_write_files:
            yield from self._writes(node)

    # --- What may run -------------------------------------------------------------------------

    def _dangers(self, node: ast.AST) -> Iterator[str]:
        for module in _imported_modules(node):
            if module in BANNED_IMPORTS:
                yield f"import of {module}: {BANNED_IMPORTS[module]}"
        name = self._name(node)
        if name in {"eval", "exec", "builtins.eval", "builtins.exec", "__import__"}:
            yield f"{name} runs text"
        if name in {"os.system", "os.popen"}:
            yield f"{name} runs a shell"
        if isinstance(node, ast.Call):
            shell = _argument(node, None, "shell")
            if shell and not (isinstance(shell, ast.Constant) and shell.value is False):
                yield "a call with shell=True runs a shell"

    # --- What writes --------------------------------------------------------------------------

    def _writes(self, node: ast.AST) -> Iterator[str]:
        for module in _imported_modules(node):
            if module in WRITING_IMPORTS:
                yield f"import of {module}"
        name = self._name(node)
        if name in WRITING_FUNCTIONS:
            yield f"{name}"
        if name in OPENERS and id(node) not in self._called:
            yield f"{name} without its mode"
        if isinstance(node, ast.Attribute) and self._may_be_a_path(node.value):
            yield from self._path_method(node)
        if isinstance(node, ast.Call):
            yield from self._writing_call(node)

    def _path_method(self, node: ast.Attribute) -> Iterator[str]:
        handed_around = id(node) not in self._called and not _is_called_disk(node.value)
        if node.attr in WRITING_METHODS or (node.attr in AMBIGUOUS_METHODS and handed_around):
            yield f"{node.attr} of a path"

    def _writing_call(self, call: ast.Call) -> Iterator[str]:
        name = self._name(call.func)
        if name in SINKS:
            sink = _argument(call, *SINKS[name])
            if not (sink and self._is_stream(sink)):
                yield f"{name} to something that may be a file"
        if name in OPENERS and _writes_with(_argument(call, 1, "mode")):
            yield f"{name} for writing"
        if isinstance(call.func, ast.Attribute) and self._may_be_a_path(call.func.value):
            method = call.func.attr
            if method == "open" and _writes_with(_mode_of_method(call)):
                yield "open for writing"
            if method in AMBIGUOUS_METHODS and (
                self._name(call.func.value) == "pathlib.Path"
                or _looks_like_a_paths(call, AMBIGUOUS_METHODS[method])
            ):
                yield f"{method} of a path"

    # --- Names --------------------------------------------------------------------------------

    def _imported_names(self) -> Iterator[tuple[str, str]]:
        yield from (("open", "builtins.open"), ("eval", "eval"), ("exec", "exec"))
        yield "__import__", "__import__"
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (top, top)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def _name(self, node: ast.AST) -> str | None:
        """What a name stands for, with its module: ``pq.write_table`` is pyarrow's."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._name(node.value)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.Call) and self._is_getattr(node):
            base, attribute = self._name(node.args[0]), node.args[1]
            if base and isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                return f"{base}.{attribute.value}"
        return None

    @staticmethod
    def _is_getattr(call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) > 1

    def _may_be_a_path(self, node: ast.AST) -> bool:
        """Whatever is not a module, or a name out of one, may be; and ``Path`` itself."""
        return self._name(node) in {None, "pathlib.Path"}

    def _stream_names(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.arg) and node.annotation and self._is_stream(node.annotation):
                yield node.arg
            elif isinstance(node, ast.AnnAssign) and self._is_stream(node.annotation):
                yield _last_name(node.target)
            elif isinstance(node, ast.Assign) and self._is_stream(node.value):
                yield from map(_last_name, node.targets)
            elif isinstance(node, ast.withitem) and self._is_stream(node.context_expr):
                yield _last_name(node.optional_vars)

    def _is_stream(self, node: ast.AST) -> bool:
        node = node.func if isinstance(node, ast.Call) else node
        return self._name(node) in STREAMS or _last_name(node) in self._streams


def _imported_modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def _argument(call: ast.Call, position: int | None, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def _mode_of_method(call: ast.Call) -> ast.expr | None:
    """The mode in ``path.open(mode)``; in ``store.open(path)`` there is none."""
    mode = _argument(call, 0, "mode")
    named = any(keyword.arg == "mode" for keyword in call.keywords)
    telling = isinstance(mode, ast.Constant) or (mode and _last_name(mode).endswith("mode"))
    return mode if named or telling else None


def _writes_with(mode: ast.expr | None) -> bool:
    if mode is None:
        return False
    if not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)):
        return True
    letters = set(mode.value.partition(":")[0])
    return letters <= set("rwxabt+U") and bool(letters & set("wxa+"))


def _looks_like_a_paths(call: ast.Call, positional: int) -> bool:
    keywords = {keyword.arg for keyword in call.keywords}
    if keywords == {"target"}:
        return not call.args
    return len(call.args) == positional and keywords <= {"missing_ok"}


def _is_called_disk(node: ast.AST) -> bool:
    return _last_name(node).endswith("disk")


def _last_name(node: ast.AST | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


# --- The rules --------------------------------------------------------------------------------


def modules() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > len(MAY_WRITE_FILES)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_keeps_the_rules(path: Path) -> None:
    checker = Checker(path.read_text(), may_write_files=path in MAY_WRITE_FILES)
    assert checker.findings() == []


def test_the_disk_is_what_the_rule_is_about() -> None:
    assert all(path.is_file() for path in MAY_WRITE_FILES)
    assert Checker((PACKAGE / "disk.py").read_text()).findings()


def test_no_file_is_too_long() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


# --- The checker itself -----------------------------------------------------------------------

FORBIDDEN = """
open(p, "w")
open(p, mode="ab")
open(p, "r+")
open(p, how)
opener = open
import io; io.open(p, "x")
import gzip; gzip.open(p, "wb")
p.open("w")
p.open(mode="wb")
p.open("r+b")
p.open(mode)
(a / b).open("wb")
import os; os.open(p, os.O_RDONLY)
import os; os.write(1, b"")
import os; os.fdopen(1)
import os; os.replace(a, b)
import os; os.rename(a, b)
import os; os.unlink(p)
import os; os.remove(p)
import os; os.mkdir(p)
import os; os.makedirs(p)
import os; os.truncate(p, 0)
import os; os.chmod(p, 0)
import os as o; o.replace(a, b)
import os; callback(os.unlink, p)
import os; getattr(os, "unlink")(p)
from os import replace; replace(a, b)
from os import replace as put; put(a, b)
p.write_text("")
p.write_bytes(b"")
p.unlink()
p.unlink(missing_ok=True)
p.rename(other)
p.replace(other)
p.replace(target=other)
p.touch()
p.mkdir()
p.mkdir(parents=True)
p.rmdir()
p.chmod(0)
p.symlink_to(other)
p.hardlink_to(other)
self.path.unlink()
(a / b).replace(c)
callback(p.unlink)
from pathlib import Path; Path("x").touch()
from pathlib import Path; Path.rename(a, b)
from pathlib import Path; Path.unlink(a)
import shutil
import shutil; shutil.rmtree(p)
from shutil import copy
import tempfile
from tempfile import NamedTemporaryFile
import mmap; mmap.mmap(1, 0)
from mmap import mmap; mmap(1, 0)
import pyarrow as pa; pa.OSFile(p, "wb")
import pyarrow as pa; pa.memory_map(p)
import pyarrow as pa; pa.create_memory_map(p, 1)
import pyarrow as pa; pa.output_stream(p)
import pyarrow as pa; pa.ipc.new_file(p, schema)
import pyarrow as pa; pa.ipc.new_stream("x", schema)
import pyarrow.parquet as pq; pq.write_table(table, "x")
import pyarrow.parquet as pq; pq.write_table(table, path)
import pyarrow.parquet as pq; pq.write_table(table, where=path)
import pyarrow.parquet as pq; pq.ParquetWriter(path, schema)
from pyarrow.parquet import ParquetWriter; ParquetWriter(path, schema)
import pickle
import pickle as p
from pickle import loads
import marshal
import shelve
def f(): import pickle
import subprocess; subprocess.run(x, shell=True)
import subprocess; subprocess.run(x, shell=flag)
from subprocess import Popen; Popen(x, shell=True)
import os; os.system(x)
eval(x)
exec(x)
run = eval
import builtins; builtins.exec(x)
__import__(x)
"""

ALLOWED = """
open(p)
open(p, "rb")
open(p, mode="r")
p.open()
p.open("rb")
p.open("rb", buffering=0)
p.open(mode="r")
Engine.open(path)
store.open("name")
import gzip; gzip.open(p)
import tarfile; tarfile.open(p, "r:xz")
text.replace("a", "b")
text.replace("a", "b", 1)
when.replace(tzinfo=utc)
from dataclasses import replace; replace(config, size=1)
import dataclasses; dataclasses.replace(config)
disk.unlink(path)
disk.rename(a, b)
self._disk.rename(a, b)
callback(disk.unlink, path)
disk.make_directory(path)
import os; os.path.join(a, b); os.fspath(p); os.environ["X"]; os.listdir(p)
p.read_bytes(); p.exists(); p.stat(); p.with_name("x")
import pyarrow as pa; pa.ipc.new_stream(pa.BufferOutputStream(), schema)
import pyarrow as pa; sink = pa.BufferOutputStream(); pa.ipc.new_file(sink, schema)
import pyarrow as pa; self._sink = pa.BufferOutputStream(); pa.ipc.new_file(self._sink, schema)
import io, pyarrow.parquet as pq; out = io.BytesIO(); pq.write_table(table, out)
import pyarrow.parquet as pq; pq.read_table(path)
import pyarrow as pa; sink: pa.NativeFile = given; pa.ipc.new_stream(sink, schema)
import subprocess; subprocess.run(x)
import subprocess; subprocess.run(x, shell=False)
frame.eval(x); model.exec()
import ast; ast.literal_eval(x)
from . import pickle_free
"""


def snippets(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("snippet", snippets(FORBIDDEN))
def test_the_checker_catches(snippet: str) -> None:
    assert Checker(snippet).findings()


@pytest.mark.parametrize("snippet", snippets(ALLOWED))
def test_the_checker_lets_pass(snippet: str) -> None:
    assert Checker(snippet).findings() == []


def test_a_parameter_may_be_a_stream() -> None:
    start = "import pyarrow as pa\ndef write(sink{}):\n    pa.ipc.new_stream(sink, schema)\n"
    assert Checker(start.format(": pa.NativeFile")).findings() == []
    assert Checker(start.format("")).findings()


def test_the_one_who_may_write_may_still_not_unpickle() -> None:
    assert Checker("p.unlink()", may_write_files=True).findings() == []
    assert Checker("import pickle", may_write_files=True).findings() == [
        "line 1: import of pickle: unpickling runs what it reads"
    ]
