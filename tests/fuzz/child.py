"""Runs cases in a process of its own, because a case may kill it.

``python -m tests.fuzz.child <kind> <run seed> <first case> <number of cases>``

Prints the number of each case before it is tried, so the last one printed is the one that killed the
process: by a crash, by a hang, or by asking for more memory than there is.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
from tests.fuzz.corpus import seeds
from tests.fuzz.decoders import exercise
from tests.fuzz.mutations import case

from quiver.ipc import MAX_DECOMPRESSED_BYTES

SECONDS_PER_CASE = 20
POOL_LIMIT = MAX_DECOMPRESSED_BYTES + 64 * 2**20
EXTRA_ADDRESS_SPACE = 3 * 2**30


def limit_memory() -> None:
    """A little more than the process has now: an absurd allocation fails instead of swapping."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(kind: str, run_seed: int, first: int, count: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        faulthandler.dump_traceback_later(SECONDS_PER_CASE, exit=True)
        os.write(1, b"%d\n" % number)
        outcomes.update(exercise(kind, case(run_seed, kind, number).data))
        peak = pa.default_memory_pool().max_memory()
        assert peak <= POOL_LIMIT, f"Arrow allocated {peak} bytes"
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def main() -> None:
    faulthandler.enable()
    kind, run_seed, first, count = sys.argv[1], *map(int, sys.argv[2:])
    seeds()
    if Path("/proc/self/statm").exists():
        limit_memory()
    outcomes = run(kind, run_seed, first, count)
    os.write(1, " ".join(f"{name}={n}" for name, n in outcomes.most_common()).encode() + b"\n")


if __name__ == "__main__":
    main()
