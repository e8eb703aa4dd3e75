"""Runs cases in a process of its own, because a case may kill it.

::

    python -m tests.fuzz.child mutations <kind> <run seed> <first case> <number of cases>
    python -m tests.fuzz.child hostile <name>

Prints the number of each case before it is tried, so the last one printed is the one that killed
the process: by a crash, by a hang, or by asking for more memory than there is. The last line of a
run that went well says how the calls ended.
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
from tests.fuzz.hostile import HOSTILE
from tests.fuzz.mutations import case

from quiver.ipc import MAX_DECOMPRESSED_BYTES

SECONDS_PER_CASE = 20
SECONDS_PER_HOSTILE_CASE = 5
MEMORY_LIMIT = MAX_DECOMPRESSED_BYTES + 64 * 2**20
EXTRA_ADDRESS_SPACE = 3 * 2**30
STATM = Path("/proc/self/statm")


def limit_memory() -> None:
    """A little more than the process has now: an absurd allocation fails instead of swapping."""
    if STATM.exists():  # Linux; elsewhere the check of Arrow's memory pool has to do
        pages = int(STATM.read_text().split(maxsplit=1)[0])
        limit = pages * resource.getpagesize() + EXTRA_ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def run_mutations(kind: str, run_seed: int, first: int, count: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count):
        say(str(number))
        data = case(run_seed, kind, number).data
        outcomes.update(run_one(kind, data, SECONDS_PER_CASE))
    return outcomes


def run_one(kind: str, data: bytes, seconds: int) -> list[str]:
    """``faulthandler`` watches from a thread that needs no GIL: it ends native hangs too."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    outcomes = exercise(kind, data)
    faulthandler.cancel_dump_traceback_later()
    peak = pa.default_memory_pool().max_memory() or 0
    assert peak <= MEMORY_LIMIT, f"Arrow allocated {peak} bytes"
    return outcomes


def main(mode: str, *arguments: str) -> None:
    faulthandler.enable()
    if mode == "hostile":
        kind, make = HOSTILE[arguments[0]]
        data = make()
        before = resident_peak()
        limit_memory()
        outcomes = Counter(run_one(kind, data, SECONDS_PER_HOSTILE_CASE))
        grown = resident_peak() - before
        assert grown <= MEMORY_LIMIT, f"the process grew by {grown} bytes"
    else:
        seeds()
        limit_memory()
        outcomes = run_mutations(arguments[0], *map(int, arguments[1:]))
    say(" ".join(f"{name}={count}" for name, count in outcomes.most_common()))


if __name__ == "__main__":
    main(*sys.argv[1:])
