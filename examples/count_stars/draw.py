"""Draws a picture of so many stars: python examples/count_stars/draw.py 7 stars.png"""

from __future__ import annotations

import random
import struct
import sys
import zlib
from pathlib import Path

SIZE, CELLS = 256, 4
STAR = ("....#....", "....#....", "...###...", "#########", ".#######.", "..#####..", ".###.###.", ".##...##.")


def picture(stars: int) -> bytes:
    """A PNG, always the same one for a number (16 at most): each star stands alone in a cell of its own."""
    places = random.Random(stars).sample(range(CELLS * CELLS), stars)
    rows = [bytearray(b"\x10\x18\x40" * SIZE) for _ in range(SIZE)]
    for place in places:
        left, top = (SIZE // CELLS * n + 14 for n in (place % CELLS, place // CELLS))
        for y, line in enumerate(STAR):
            for x, point in enumerate(line):
                for dy in range(4 if point == "#" else 0):
                    start = 3 * (left + 4 * x)
                    rows[top + 4 * y + dy][start : start + 12] = b"\xff\xe0\x40" * 4
    header = struct.pack(">IIBBBBB", SIZE, SIZE, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(picture(int(sys.argv[1])))
