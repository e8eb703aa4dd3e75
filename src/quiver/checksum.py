"""CRC-32 (IEEE), the one checksum of all Quiver files.

``zlib.crc32`` gives the same numbers; isal computes them at memory speed and lets go of the GIL.
``crc32_combine(a, b, len_b)`` is the checksum of two pieces put together, from those of the pieces.
"""

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "crc32_combine"]
