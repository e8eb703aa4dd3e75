"""Bugs to plant, for explorations to find."""

from __future__ import annotations

from pathlib import Path

from quiver.disk import Disk, DiskFile
from quiver.wal.files import ACTIVE_NAME
from quiver.wal.header import WalHeader, encode_header


def rotate_without_directory_sync(disk: Disk, source: Path, target: Path) -> None:
    """In place of ``retire_file``."""
    disk.rename(source, target)


def start_without_sync(disk: Disk, directory: Path, position: int) -> DiskFile:
    """In place of ``start_file``."""
    file = disk.create(directory / ACTIVE_NAME)
    file.append([encode_header(WalHeader(position))])
    return file


class Believed(int):
    """A checksum that equals any other."""

    def __ne__(self, _other: object) -> bool:
        return False

    __eq__ = int.__eq__
    __hash__ = int.__hash__
