"""The settings of a store, typed, with their ranges checked when they are made.

Defaults are those of the reference implementation, so a directory can change hands.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiver.errors import InvalidConfig

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """Limits of the write-ahead log.

    =====================  =========  ========================================================
    setting                default    what it bounds
    =====================  =========  ========================================================
    ``max_size``           128 MiB    active and rotated files together
    ``rotation_target``    64 MiB     data bytes after which the active file is rotated
    ``max_rotated_files``  10         files beside the active one
    ``max_quarantine``     64 MiB     damaged bytes kept aside; more are reported, not copied
    =====================  =========  ========================================================
    """

    max_size: int = 128 * MIB
    rotation_target: int = 64 * MIB
    max_rotated_files: int = 10
    max_quarantine: int = 64 * MIB

    def __post_init__(self) -> None:
        _check("wal.max_rotated_files", self.max_rotated_files, at_least=1)
        _check("wal.rotation_target", self.rotation_target, at_least=1)
        _check("wal.max_quarantine", self.max_quarantine, at_least=0)
        if self.rotation_target > self.max_size:
            raise InvalidConfig(
                f"wal.rotation_target ({self.rotation_target}) is larger than wal.max_size "
                f"({self.max_size}): the log would be full before it rotates; lower the first "
                "or raise the second"
            )


def _check(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise InvalidConfig(f"{name} is {value}; it must be at least {at_least}")
