"""What a disk holds, and what of it a power cut leaves: the state behind ``SimulatedDisk``.

Files (``Inode``) and directories are kept in the same three forms:

- *durable*: survives every power cut;
- *pending*: changes in the order they were made, each of one or more pieces. A power cut keeps any
  subset of the pieces, applied in order;
- *live*: all changes applied, which is what the running process reads.

A subset is a *mask*: bit ``i`` is set when piece ``i`` survives, the oldest piece is bit 0. Bytes
that do not change are shared between a disk and all the disks that it may become.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

EVERYTHING = -1  # as a mask: all bits are set, however many there are

Choice: TypeAlias = tuple[int, ...]
"""One mask for each part of a medium that is not settled, in the order of ``Medium.unsettled``."""


class FileImage:
    """A file while changes are applied to it."""

    def __init__(self, content: bytes, *, read_only: bool) -> None:
        self.content = bytearray(content)
        self.read_only = read_only

    def put(self, offset: int, data: bytes) -> None:
        """Write inside the file or beyond its end; a gap reads as zeros."""
        if offset > len(self.content):
            self.resize(offset)
        self.content[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Cut, or grow by zeros."""
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes at the end of a file: a piece for each sector they touch, and one for the length.

    The length is a piece of its own because file systems allocate late: the inode may say that the
    file has grown when the blocks never arrived, which then read as zeros.
    """

    offset: int
    data: bytes
    sector_bytes: int

    @property
    def pieces(self) -> int:
        return self._sectors() + 1

    def apply(self, image: FileImage, mask: int) -> None:
        sectors = self._sectors()
        chosen = mask & ((1 << sectors) - 1)
        if chosen == (1 << sectors) - 1:
            image.put(self.offset, self.data)
        elif chosen:
            for index in range(sectors):
                if chosen >> index & 1:
                    self._put_sector(image, index)
        if mask >> sectors & 1:
            image.resize(self.offset + len(self.data))

    def _sectors(self) -> int:
        last = (self.offset + len(self.data) - 1) // self.sector_bytes
        return last - self.offset // self.sector_bytes + 1

    def _put_sector(self, image: FileImage, index: int) -> None:
        sector_start = (self.offset // self.sector_bytes + index) * self.sector_bytes
        start = max(0, sector_start - self.offset)
        stop = sector_start + self.sector_bytes - self.offset
        image.put(self.offset + start, self.data[start:stop])


@dataclass(frozen=True, slots=True)
class Truncate:
    """A new length, in one piece."""

    size: int

    @property
    def pieces(self) -> int:
        return 1

    def apply(self, image: FileImage, _mask: int) -> None:
        image.resize(self.size)


@dataclass(frozen=True, slots=True)
class MakeReadOnly:
    """A new mode, in one piece."""

    @property
    def pieces(self) -> int:
        return 1

    def apply(self, image: FileImage, _mask: int) -> None:
        image.read_only = True


FileChange: TypeAlias = Write | Truncate | MakeReadOnly


class Rest(NamedTuple):
    """A file that nobody is changing."""

    content: bytes
    read_only: bool


class Inode:
    """A file without its names."""

    def __init__(self, number: int, rest: Rest) -> None:
        self.number = number
        self.durable = rest
        self.pending: list[FileChange] = []
        self.read_only = rest.read_only
        self._live: bytes | bytearray = rest.content  # shared until the first change

    @property
    def size(self) -> int:
        return len(self._live)

    @property
    def pieces(self) -> int:
        return sum(change.pieces for change in self.pending)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """A copy of the live bytes, or the bytes themselves where they cannot change."""
        return bytes(self._live[start:stop])

    def write(self, data: bytes, sector_bytes: int) -> None:
        """Append; no bytes, no change."""
        if data:
            self.pending.append(Write(len(self._live), data, sector_bytes))
            self._own().extend(data)

    def truncate(self, size: int) -> None:
        self.pending.append(Truncate(size))
        live = self._own()
        del live[size:]
        live.extend(bytes(size - len(live)))

    def make_read_only(self) -> None:
        self.pending.append(MakeReadOnly())
        self.read_only = True

    def settle(self, mask: int = EVERYTHING) -> None:
        """Make the chosen pieces durable and forget the others.

        Everything: that is a sync. A part: that is a sync that failed. Its pages are clean
        afterwards, so no later sync writes them, while the live view still shows them.
        """
        self.durable = self.after_power_cut(mask)
        self.pending.clear()

    def after_power_cut(self, mask: int) -> Rest:
        """The file when only the pieces in ``mask`` had reached the disk."""
        if not self.pending:
            return self.durable
        image = FileImage(self.durable.content, read_only=self.durable.read_only)
        for change in self.pending:
            chosen = mask & ((1 << change.pieces) - 1)
            mask >>= change.pieces
            if chosen:
                change.apply(image, chosen)
        return Rest(bytes(image.content), image.read_only)

    def _own(self) -> bytearray:
        if isinstance(self._live, bytes):
            self._live = bytearray(self._live)
        return self._live


@dataclass(frozen=True, slots=True)
class Link:
    """A name for a new file."""

    name: str
    inode: Inode

    def apply(self, names: dict[str, Inode]) -> None:
        names[self.name] = self.inode


@dataclass(frozen=True, slots=True)
class Move:
    """A rename: the old name goes and the new one is set, or neither."""

    source: str
    target: str
    inode: Inode

    def apply(self, names: dict[str, Inode]) -> None:
        names.pop(self.source, None)
        names[self.target] = self.inode


@dataclass(frozen=True, slots=True)
class Remove:
    """A name that goes."""

    name: str

    def apply(self, names: dict[str, Inode]) -> None:
        names.pop(self.name, None)


NameChange: TypeAlias = Link | Move | Remove


class Directory:
    """Names and the files behind them. Subdirectories are durable as soon as they exist."""

    def __init__(self, names: Mapping[str, Inode], subdirectories: Iterable[str]) -> None:
        self.durable = names
        self.pending: list[NameChange] = []
        self.live = dict(names)
        self.subdirectories = set(subdirectories)

    @property
    def pieces(self) -> int:
        return len(self.pending)

    def change(self, change: NameChange) -> None:
        self.pending.append(change)
        change.apply(self.live)

    def settle(self, mask: int = EVERYTHING) -> None:
        """Make the chosen changes durable and forget the others, as ``Inode.settle`` does."""
        self.durable = self.after_power_cut(mask)
        self.pending.clear()

    def after_power_cut(self, mask: int) -> Mapping[str, Inode]:
        """The names when only the changes in ``mask`` had reached the disk."""
        names = dict(self.durable)
        for index, change in enumerate(self.pending):
            if mask >> index & 1:
                change.apply(names)
        for name in self.subdirectories & names.keys():
            del names[name]  # the file was removed before the directory was made, durably
        return names

    def possible_inodes(self) -> Iterator[Inode]:
        """Every file that has a name here after some power cut."""
        yield from self.durable.values()
        for change in self.pending:
            if not isinstance(change, Remove):
                yield change.inode


class Medium:
    """All directories by their absolute path, and through them all files."""

    def __init__(self) -> None:
        self.directories = {"/": Directory({}, ())}
        self.inodes_made = 0

    def new_inode(self, content: bytes = b"") -> Inode:
        self.inodes_made += 1
        return Inode(self.inodes_made, Rest(content, read_only=False))

    def unsettled(self) -> Sequence[Directory | Inode]:
        """What a power cut can change, in an order that only depends on the calls made so far."""
        directories = [d for d in self.directories.values() if d.pending]
        inodes = {
            inode.number: inode
            for directory in self.directories.values()
            for inode in directory.possible_inodes()
            if inode.pending
        }
        return [*directories, *(inodes[number] for number in sorted(inodes))]

    def after_power_cut(self, choice: Choice) -> Medium:
        """The medium when only the chosen pieces of ``unsettled()`` had reached the disk."""
        masks = dict(zip(self.unsettled(), choice, strict=True))
        survivors: dict[Inode, Inode] = {}
        medium = Medium()
        medium.inodes_made = self.inodes_made
        for path, directory in self.directories.items():
            names = {}
            for name, inode in directory.after_power_cut(masks.get(directory, 0)).items():
                if inode not in survivors:
                    rest = inode.after_power_cut(masks.get(inode, 0))
                    survivors[inode] = Inode(inode.number, rest)
                names[name] = survivors[inode]
            medium.directories[path] = Directory(names, directory.subdirectories)
        return medium

    def fingerprint(self) -> int:
        """Equal for media that no reader or writer could tell apart."""
        ranks: dict[Inode, int] = {}  # two names of one file are not two equal files
        names = tuple(
            (path, name, ranks.setdefault(inode, len(ranks)), inode.read_only, inode.read())
            for path, directory in self.directories.items()
            for name, inode in sorted(directory.live.items())
        )
        return hash((tuple(self.directories), names))
