"""The real disk and the simulated one, side by side: whatever a caller can see must be the same."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.disk import BytesLike, Disk, DiskFile, RealDisk, publish
from quiver.testing import SimulatedDisk

NOBODY = 65534


@dataclass(frozen=True)
class Place:
    """A disk, and an empty directory on it."""

    disk: Disk
    root: Path

    def write(self, name: str, data: bytes) -> Path:
        file = self.disk.create(self.root / name)
        file.append([data])
        file.close()
        return file.path

    def read(self, name: str) -> bytes:
        return self.disk.read(self.root / name).to_pybytes()


@contextlib.contextmanager
def real_place() -> Iterator[Place]:
    """Without the rights of root, for whom no file is read-only."""
    root = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(root, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        yield Place(RealDisk(), root)
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(root)


def simulated_place() -> Place:
    disk = SimulatedDisk()
    disk.make_directory(Path("/data"))
    return Place(disk, Path("/data"))


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "real":
            yield stack.enter_context(real_place())
        else:
            yield simulated_place()


def test_appends_arrive_in_order_whatever_holds_them(place: Place) -> None:
    file = place.disk.create(place.root / "a")
    buffers: list[BytesLike] = [
        b"one",
        bytearray(b"two"),
        memoryview(b"three"),
        pa.py_buffer(b"four"),
        b"",
    ]
    assert file.append(buffers) == 15
    assert file.append([]) == 0
    assert file.append([b"!"]) == 1
    assert file.size == 16
    assert file.path == place.root / "a"
    assert place.read("a") == b"onetwothreefour!"


def test_a_buffer_of_numbers_is_written_whole(place: Place) -> None:
    numbers = memoryview(array.array("q", [1, 2, 3]))
    file = place.disk.create(place.root / "a")
    assert file.append([numbers, b"end"]) == 27
    assert place.read("a") == numbers.tobytes() + b"end"


def test_more_buffers_than_one_system_call_takes(place: Place) -> None:
    buffers = [bytes([i % 256]) for i in range(5000)]
    file = place.disk.create(place.root / "a")
    assert file.append(buffers) == 5000
    assert place.read("a") == b"".join(buffers)


def test_open_append_continues_at_the_end(place: Place) -> None:
    place.write("a", b"old ")
    file = place.disk.open_append(place.root / "a")
    assert file.size == 4
    file.append([b"new"])
    file.sync()
    file.close()
    file.close()
    assert place.read("a") == b"old new"


def test_truncate_cuts_and_grows(place: Place) -> None:
    place.write("a", b"123456")
    file = place.disk.open_append(place.root / "a")
    file.truncate(2)
    file.append([b"x"])
    assert place.read("a") == b"12x"
    file.truncate(5)
    assert file.size == 5
    assert place.read("a") == b"12x\0\0"


def test_read_a_part(place: Place) -> None:
    path = place.write("a", b"0123456789")
    parts = [(0, None), (3, None), (3, 4), (8, 10), (10, 1), (99, 1), (0, 0)]
    found = [place.disk.read(path, offset, length).to_pybytes() for offset, length in parts]
    assert found == [b"0123456789", b"3456789", b"3456", b"89", b"", b"", b""]


def test_a_read_does_not_see_later_changes(place: Place) -> None:
    path = place.write("a", b"before")
    copy = place.disk.read(path)
    file = place.disk.open_append(path)
    file.truncate(0)
    file.append([b"behind"])
    assert copy.to_pybytes() == b"before"


@pytest.mark.parametrize("data", [b"", b"some bytes"])
def test_map_shows_the_whole_file(place: Place, data: bytes) -> None:
    assert place.disk.map(place.write("a", data)).to_pybytes() == data


def test_a_handle_outlives_the_names_of_its_file(place: Place) -> None:
    file = place.disk.create(place.root / "a")
    place.disk.rename(place.root / "a", place.root / "b")
    file.append([b"renamed"])
    assert place.read("b") == b"renamed"
    place.disk.unlink(place.root / "b")
    file.append([b" and gone"])
    file.sync()
    assert file.size == 16
    assert place.disk.list_directory(place.root) == []


def test_create_empties_the_file_that_others_have_open(place: Place) -> None:
    old = place.disk.create(place.root / "a")
    old.append([b"old"])
    new = place.disk.create(place.root / "a")
    assert place.read("a") == b""
    old.append([b"x"])
    new.append([b"y"])
    assert place.read("a") == b"xy"


def test_rename_replaces_the_target(place: Place) -> None:
    source, target = place.write("a", b"new"), place.write("b", b"old")
    place.disk.rename(source, target)
    assert place.disk.list_directory(place.root) == ["b"]
    assert place.read("b") == b"new"
    place.disk.rename(target, target)
    assert place.read("b") == b"new"


def test_directories(place: Place) -> None:
    deep = place.root / "x" / "y"
    place.disk.make_directory(deep)
    place.disk.make_directory(deep)
    place.write("x/file", b"123")
    assert place.disk.list_directory(place.root / "x") == ["file", "y"]
    assert place.disk.exists(deep)
    assert place.disk.exists(place.root / "x" / "file")
    assert not place.disk.exists(place.root / "x" / "other")
    assert not place.disk.exists(place.root / "x" / "file" / "below")
    assert place.disk.size(place.root / "x" / "file") == 3
    place.disk.sync_dir(place.root / "x")


def test_a_read_only_file_can_be_read_replaced_and_removed(place: Place) -> None:
    file = place.disk.create(place.root / "a")
    place.disk.make_read_only(file.path)
    file.append([b"opened before"])
    assert place.read("a") == b"opened before"
    place.disk.rename(place.write("b", b"b"), file.path)
    place.disk.make_read_only(file.path)
    place.disk.unlink(file.path)


def test_the_mode_of_a_read_only_file() -> None:
    with real_place() as place:
        path = place.write("a", b"")
        place.disk.make_read_only(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o440


Attempt: TypeAlias = Callable[[Disk, Path], object]

ATTEMPTS: list[tuple[str, Attempt, int, str | None]] = [
    ("open what is missing", lambda d, r: d.open_append(r / "no"), errno.ENOENT, "no"),
    ("read what is missing", lambda d, r: d.read(r / "no"), errno.ENOENT, "no"),
    ("map what is missing", lambda d, r: d.map(r / "no"), errno.ENOENT, "no"),
    ("size of what is missing", lambda d, r: d.size(r / "no"), errno.ENOENT, "no"),
    ("unlink what is missing", lambda d, r: d.unlink(r / "no"), errno.ENOENT, "no"),
    ("protect what is missing", lambda d, r: d.make_read_only(r / "no"), errno.ENOENT, "no"),
    ("rename what is missing", lambda d, r: d.rename(r / "no", r / "x"), errno.ENOENT, "no"),
    ("list what is missing", lambda d, r: d.list_directory(r / "no"), errno.ENOENT, "no"),
    ("sync_dir of what is missing", lambda d, r: d.sync_dir(r / "no"), errno.ENOENT, "no"),
    ("create in nothing", lambda d, r: d.create(r / "no" / "x"), errno.ENOENT, "no/x"),
    ("create in a file", lambda d, r: d.create(r / "file" / "x"), errno.ENOTDIR, "file/x"),
    ("read in a file", lambda d, r: d.read(r / "file/x/y"), errno.ENOTDIR, "file/x/y"),
    ("unlink in a file", lambda d, r: d.unlink(r / "file/x"), errno.ENOTDIR, "file/x"),
    ("list a file", lambda d, r: d.list_directory(r / "file"), errno.ENOTDIR, "file"),
    ("sync_dir of a file", lambda d, r: d.sync_dir(r / "file"), errno.ENOTDIR, "file"),
    ("directory in a file", lambda d, r: d.make_directory(r / "file/x"), errno.ENOTDIR, "file/x"),
    ("directory over a file", lambda d, r: d.make_directory(r / "file"), errno.EEXIST, "file"),
    ("create over a directory", lambda d, r: d.create(r / "dir"), errno.EISDIR, "dir"),
    ("open a directory", lambda d, r: d.open_append(r / "dir"), errno.EISDIR, "dir"),
    ("read a directory", lambda d, r: d.read(r / "dir"), errno.EISDIR, "dir"),
    ("unlink a directory", lambda d, r: d.unlink(r / "dir"), errno.EISDIR, "dir"),
    ("rename over a directory", lambda d, r: d.rename(r / "file", r / "dir"), errno.EISDIR, "file"),
    ("open the read-only", lambda d, r: d.open_append(r / "protected"), errno.EACCES, "protected"),
    ("create over read-only", lambda d, r: d.create(r / "protected"), errno.EACCES, "protected"),
    ("truncate below zero", lambda d, r: d.create(r / "x").truncate(-1), errno.EINVAL, "x"),
    ("read before the start", lambda d, r: d.read(r / "file", -1), errno.EINVAL, None),
]


@pytest.mark.parametrize(
    ("attempt", "number", "name"),
    [pytest.param(attempt, number, name, id=title) for title, attempt, number, name in ATTEMPTS],
)
def test_errors(place: Place, attempt: Attempt, number: int, name: str | None) -> None:
    place.write("file", b"123")
    place.disk.make_read_only(place.write("protected", b""))
    place.disk.make_directory(place.root / "dir")
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        attempt(place.disk, place.root)
    assert caught.value.errno == number
    assert type(caught.value) is type(OSError(number, ""))
    assert caught.value.filename == (None if name is None else str(place.root / name))


def test_a_failed_rename_names_both(place: Place) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        place.disk.rename(place.root / "a", place.root / "b")
    assert caught.value.filename2 == str(place.root / "b")


def test_a_closed_file_refuses(place: Place) -> None:
    file = place.disk.create(place.root / "a")
    file.close()
    for use in (lambda: file.append([b"x"]), lambda: file.truncate(0)):
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            use()
    with pytest.raises((OSError, ValueError)):
        file.sync()


def test_short_writes_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_little(descriptor: int, buffers: list[bytes]) -> int:
        return os.write(descriptor, b"".join(buffers)[:3])

    monkeypatch.setattr(os, "writev", write_little)
    with real_place() as place:
        file = place.disk.create(place.root / "a")
        assert file.append([b"0123", b"45678", b"9"]) == 10
        assert place.read("a") == b"0123456789"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")
def test_both_disks_say_when_they_are_full() -> None:
    full = SimulatedDisk(capacity_bytes=0)
    for file in (RealDisk().open_append(Path("/dev/full")), full.create(Path("/file"))):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
            file.append([b"x"])
        assert caught.value.filename == str(file.path)
        assert file.size == 0
        file.close()


def test_what_was_written_before_the_disk_was_full_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_until_full(descriptor: int, buffers: list[bytes]) -> int:
        room = 4 - os.fstat(descriptor).st_size
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, b"".join(buffers)[:room])

    monkeypatch.setattr(os, "writev", write_until_full)
    with real_place() as place:
        for disk, root in ((place.disk, place.root), (SimulatedDisk(capacity_bytes=4), Path("/"))):
            file = disk.create(root / "a")
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                file.append([b"012", b"345"])
            assert file.size == 4
            assert disk.read(root / "a").to_pybytes() == b"0123"


# --- publish ----------------------------------------------------------------------------------


def test_publish_puts_a_whole_file_in_place(place: Place) -> None:
    path = place.write("name", b"old")
    assert publish(place.disk, path, [b"new ", pa.py_buffer(b"content")]) == 11
    assert place.read("name") == b"new content"
    assert place.disk.list_directory(place.root) == ["name"]
    place.disk.open_append(path).close()


def test_publish_read_only(place: Place) -> None:
    path = place.root / "name"
    for content in (b"first", b"second"):
        publish(place.disk, path, [content], read_only=True)
        assert place.read("name") == content
        with pytest.raises(PermissionError):
            place.disk.open_append(path)
    if isinstance(place.disk, RealDisk):
        assert stat.S_IMODE(path.stat().st_mode) == 0o440


def test_publish_replaces_what_a_crash_left(place: Place) -> None:
    place.disk.make_read_only(place.write("name.tmp", b"torn"))
    publish(place.disk, place.root / "name", [b"new"])
    assert place.disk.list_directory(place.root) == ["name"]
    assert place.read("name") == b"new"


def test_publish_that_fails_leaves_the_old_file_only(place: Place) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"half of the new "
        raise KeyboardInterrupt

    path = place.write("name", b"old")
    with pytest.raises(KeyboardInterrupt):
        publish(place.disk, path, interrupted())
    assert place.disk.list_directory(place.root) == ["name"]
    assert place.read("name") == b"old"


# --- Random operations, the same on both ------------------------------------------------------

Step: TypeAlias = tuple[str, tuple[str | int | bytes, ...]]

FILES = st.sampled_from(["a", "b", "c", "a/x", "sub/x"])
PLAIN = st.sampled_from(["a", "b", "c"])
HANDLES = st.integers(0, 3)


def step(name: str, *arguments: st.SearchStrategy[str | int | bytes]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(name), st.tuples(*arguments))


STEPS = st.lists(
    st.one_of(
        step("create", FILES | st.just("sub")),
        step("open_append", FILES),
        step("append", HANDLES, st.binary(min_size=1, max_size=3).map(lambda b: b * 400)),
        step("truncate", HANDLES, st.integers(0, 2000)),
        step("sync", HANDLES),
        step("close", HANDLES),
        step("rename", PLAIN, PLAIN | st.just("sub")),
        step("unlink", FILES | st.just("sub")),
        step("make_read_only", FILES),
        step("make_directory", st.sampled_from(["sub", "sub/deep"])),
        step("sync_dir", st.sampled_from([".", "sub", "a"])),
        step("read", FILES | st.just("sub"), st.integers(0, 1500), st.integers(0, 1500)),
        step("map", FILES),
        step("size", FILES),
        step("exists", FILES | st.sampled_from(["sub", "sub/deep"])),
        step("list_directory", st.sampled_from([".", "sub", "a"])),
    ),
    max_size=40,
)


class Performer:
    """Does steps on one disk and tells what came of them in words that fit both."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._handles: list[DiskFile] = []

    def perform(self, name: str, arguments: tuple[str | int | bytes, ...]) -> object:
        try:
            return self._tell(self._call(name, arguments))
        except (OSError, ValueError) as error:
            names = [getattr(error, "filename", None), getattr(error, "filename2", None)]
            return type(error), getattr(error, "errno", None), [self._relative(n) for n in names]

    def close(self) -> None:
        for handle in self._handles:
            handle.close()

    def view(self) -> object:
        files = {name: self.perform("read", (name, 0, 9999)) for name in ("a", "b", "c", "sub/x")}
        return (
            files,
            [handle.size for handle in self._handles],
            self.perform("list_directory", (".",)),
        )

    def _call(self, name: str, arguments: tuple[str | int | bytes, ...]) -> object:
        first, *rest = arguments
        if isinstance(first, str):
            paths = [self._place.root / a if isinstance(a, str) else a for a in arguments]
            return getattr(self._place.disk, name)(*paths)
        if not isinstance(first, int) or first >= len(self._handles):
            return None
        given = [rest] if name == "append" else rest
        return getattr(self._handles[first], name)(*given)

    def _tell(self, result: object) -> object:
        if isinstance(result, pa.Buffer):
            return result.to_pybytes()
        if result is None or isinstance(result, int | bool | list):
            return result
        handle = cast("DiskFile", result)
        self._handles.append(handle)
        return handle.size

    def _relative(self, name: str | None) -> str | None:
        return None if name is None else os.path.relpath(name, self._place.root)


@given(STEPS)
def test_both_disks_look_the_same_to_a_running_process(steps: list[Step]) -> None:
    with real_place() as place:
        real, simulated = Performer(place), Performer(simulated_place())
        try:
            for name, arguments in steps:
                assert simulated.perform(name, arguments) == real.perform(name, arguments)
            assert simulated.view() == real.view()
        finally:
            real.close()
