"""Directories and object stores: how the bytes of a lake get there, and are found again."""

from __future__ import annotations

import pickle  # noqa: TID251 - what Spark does with a place
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quiver.disk import DiskFile, RealDisk
from quiver.errors import InvalidConfig, InvalidName, ObjectNotFound, ObjectsUnavailable
from quiver.lake.places import LocalPlace, Place, RemotePlace, open_place

if TYPE_CHECKING:
    from s3 import S3Server  # which pytest imports itself, as a plugin

pytest_plugins = ["s3"]

NOWHERE = "s3://bucket/lake?endpoint=http://127.0.0.1:1&region=us-east-1"
KEYS = {"access_key_id": "nobody", "secret_access_key": "hunter2"}


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.xdist_group("s3"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "directory":
        yield open_place(tmp_path / "lake")
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        yield open_place(server.url(f"places-{tmp_path.name}"), server.keys)


def test_what_is_put_is_there(place: Place) -> None:
    assert place.list() == []
    assert place.put("a/b=1/x.bin", [b"hello ", b"world"]) == 11
    assert place.put("a/b=1/y.bin", [memoryview(b"!")]) == 1
    assert place.put("z.bin", [b""]) == 0
    assert place.read("a/b=1/x.bin").to_pybytes() == b"hello world"
    assert place.read("z.bin").to_pybytes() == b""
    listed = {file.path: file.size for file in place.list()}
    assert listed == {"a/b=1/x.bin": 11, "a/b=1/y.bin": 1, "z.bin": 0}
    assert [file.path for file in place.list("a/b=1")] == ["a/b=1/x.bin", "a/b=1/y.bin"]
    assert all(file.modified_ms > 1_700_000_000_000 for file in place.list())
    assert place.list("nothing/here") == []


def test_a_large_file_arrives_whole(place: Place) -> None:
    data = bytes(range(256)) * 80_000  # more than one part, more than one sync
    assert place.put("large", [data]) == len(data)
    assert place.read("large").to_pybytes() == data


def test_deleted_files_are_gone_and_missing_ones_no_error(place: Place) -> None:
    place.put("a/x", [b"1"])
    place.put("a/y", [b"2"])
    place.delete(["a/x", "a/never", "b/never"])
    assert [file.path for file in place.list()] == ["a/y"]
    with pytest.raises(ObjectNotFound, match="there is no a/x"):
        place.read("a/x")


def test_folders_of_a_place_are_places(place: Place) -> None:
    below = place.below("spans")
    below.put("x", [b"1"])
    assert place.read("spans/x").to_pybytes() == b"1"
    assert [file.path for file in below.list()] == ["x"]
    assert below.location == f"{place.location}/spans"


def test_a_place_travels_to_another_process(place: Place) -> None:
    place.put("x", [b"1"])
    copy: Place = pickle.loads(pickle.dumps(place.below("f")))  # noqa: S301 - just made
    copy.put("y", [b"2"])
    assert place.read("f/y").to_pybytes() == b"2"
    assert copy.storage_options == place.storage_options


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../x", "a//b", "a/", "a\\b", "."])
def test_paths_stay_inside(place: Place, path: str) -> None:
    with pytest.raises(InvalidName):
        place.put(path, [b""])
    with pytest.raises(InvalidName):
        place.read(path)
    with pytest.raises(InvalidName):
        place.delete([path])


# --- Directories --------------------------------------------------------------------------------


class RecordingDisk(RealDisk):
    """Remembers what was made durable, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def open_append(self, path: Path) -> DiskFile:
        self.calls.append(("open", path.name))
        return super().open_append(path)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append(("rename", target.name))
        super().rename(source, target)

    def sync_dir(self, path: Path) -> None:
        self.calls.append(("sync_dir", path.name))
        super().sync_dir(path)

    def unlink(self, path: Path) -> None:
        self.calls.append(("unlink", path.name))
        super().unlink(path)


def test_a_file_in_a_directory_is_durable_when_it_is_put(tmp_path: Path) -> None:
    disk = RecordingDisk()
    place = LocalPlace(tmp_path, disk)
    place.put("day=01/x", [b"1"])
    assert disk.calls[-2:] == [("rename", "x"), ("sync_dir", "day=01")]
    assert ("sync_dir", tmp_path.name) in disk.calls  # the new folder's name
    place.delete(["day=01/x"])
    assert disk.calls[-2:] == [("unlink", "x"), ("sync_dir", "day=01")]


def test_what_others_wrote_is_settled(tmp_path: Path) -> None:
    disk = RecordingDisk()
    place = LocalPlace(tmp_path, disk)
    place.prepare("log")
    for name in ("1", "2", "3"):
        (tmp_path / "log" / name).write_text(name)
    disk.calls.clear()
    place.settle("log", lambda path: path != "log/1")
    assert disk.calls == [("open", "2"), ("open", "3"), ("sync_dir", "log")]


def test_many_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    data = b"x" * 100_000

    def put(_: int) -> int:
        return place.put("same", [data], contended=True)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(put, range(64))) == {len(data)}
    assert place.read("same").to_pybytes() == data
    assert [file.path for file in place.list()] == ["same"]


def test_a_directory_has_several_names(tmp_path: Path) -> None:
    for root in (tmp_path, str(tmp_path), tmp_path.as_uri()):
        place = open_place(root)
        assert isinstance(place, LocalPlace)
        assert place.path == tmp_path
        assert place.storage_options is None
    with pytest.raises(InvalidConfig):
        open_place("file://host/dir")


# --- Object stores ------------------------------------------------------------------------------


def test_delta_is_told_what_the_url_and_the_options_say() -> None:
    place = open_place(NOWHERE, KEYS)
    assert isinstance(place, RemotePlace)
    assert place.location == "s3://bucket/lake"
    assert place.storage_options == {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_ALLOW_HTTP": "true",
    }
    assert open_place("az://box/lake?account=me").storage_options == {
        "AZURE_STORAGE_ACCOUNT_NAME": "me"
    }
    assert open_place("gs://box/lake").storage_options == {}


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "memory://x", "s3://key:secret@bucket/x", "s3://b/x?secret=hunter2"]
)
def test_urls_that_are_no_place(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        open_place(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.timeout(60)
def test_an_error_names_the_place_and_no_keys() -> None:
    place = open_place(NOWHERE, {**KEYS, "timeout": "1"})
    with pytest.raises(ObjectsUnavailable, match="s3://bucket/lake: x: ") as caught:
        place.put("x", [b"1"])
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None
