"""What a recipe uploads, as a hash over its content: names, permission bits, bytes, and where links point.

A file that has not changed since it was last read (device, inode, size, times) is not read again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 1 << 20
_SETTLED_S = 2.0
"""What was written just now may be written again within one tick of the file system's clock, and look the same."""
_KEPT = 200_000
"""Files whose digests are kept."""

_Known = tuple[int, int, int, int, int]


class Uploads:
    """One node's. `digest` blocks."""

    def __init__(self, settled_s: float = _SETTLED_S) -> None:
        self._settled_s = settled_s
        self._digests: OrderedDict[_Known, str] = OrderedDict()
        self.files_read = 0
        """For whoever wants to know what was saved."""

    def digest(self, source: Path) -> str:
        """Of a file or folder. What is not there or cannot be read has a digest too: preparing says what ails it."""
        said: list[bytes] = []
        try:
            for name, mode, what in self._entries(Path(os.path.realpath(source))):
                said.append(b"%s\0%o %s\n" % (os.fsencode(name), mode, what))
        except OSError as exc:
            said.append(f"!{exc.errno}\n".encode())
        return hashlib.sha256(b"".join(said)).hexdigest()

    def _entries(self, root: Path) -> Iterator[tuple[str, int, bytes]]:
        """(name below the root, mode, digest or target): thousands of them each time, so no `Path` before one is
        read."""
        left = [(str(root), "", root.stat())]
        while left:
            path, name, info = left.pop()
            what = b""
            if stat.S_ISREG(info.st_mode):
                what = self._content(path, info).encode()
            elif stat.S_ISLNK(info.st_mode):
                what = os.fsencode(Path(path).readlink())
            yield name, info.st_mode, what
            if stat.S_ISDIR(info.st_mode):
                with os.scandir(path) as found:
                    below = sorted(found, key=lambda entry: entry.name, reverse=True)
                left += [(entry.path, f"{name}/{entry.name}", entry.stat(follow_symlinks=False)) for entry in below]

    def _content(self, path: str, info: os.stat_result) -> str:
        known = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        if (digest := self._digests.get(known)) is not None:
            self._digests.move_to_end(known)
            return digest
        self.files_read += 1
        whole = hashlib.sha256()
        with Path(path).open("rb") as file:
            while part := file.read(_READ_BYTES):
                whole.update(part)
        if time.time() - max(info.st_mtime, info.st_ctime) > self._settled_s:
            self._digests[known] = whole.hexdigest()
            while len(self._digests) > _KEPT:
                self._digests.popitem(last=False)
        return whole.hexdigest()
