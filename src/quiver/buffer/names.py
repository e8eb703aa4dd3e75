"""What batches are called: ``{prefix}/{ULID}.batch``, directly below the prefix of the queue.

A ULID is 26 characters of Crockford's base 32: 48 bits of milliseconds, then 80 random bits. We
write upper case and read both. Anything else below the prefix is not ours: other queues may be
nested there, and some producers write other names.
"""

from __future__ import annotations

import re

from ulid import ULID

_NAME = re.compile(r"([0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25})\.batch")


def batch_location(prefix: str, ulid: ULID) -> str:
    """Where a batch goes."""
    return f"{prefix}/{ulid}.batch"


def ulid_time_ms(location: str, prefix: str) -> int | None:
    """When a batch was named, by its producer's clock. None: not a batch directly below it."""
    if not location.startswith(f"{prefix}/"):
        return None
    name = _NAME.fullmatch(location, len(prefix) + 1)
    return ULID.from_str(name[1]).milliseconds if name else None
