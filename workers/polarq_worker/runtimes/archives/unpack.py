"""Writes what comes out of a sandbox into a folder of the host, and nothing outside it.

Folders are opened one below the other without following links, relative to the one before. Only regular files, folders
and links that stay inside are made; owners, setuid bits and everything else stay behind. Blocking; run it in a thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.archives.tar import BrokenArchive, Entry, Kind, TarReader
from polarq_worker.runtimes.confined import Stopped
from polarq_worker.runtimes.fetched import MAX_DEPTH, Fetched, TooLarge, TooMany, stays_inside

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
READ_PAST = 64 << 20
"""A file that is left out is read past up to this size; behind a larger one the archive is given up."""


class TooLong(Exception):
    """What follows in the archive is too much to be read past. `path` is relative to the folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(path)


class Unpacker:
    """One folder's, of one or several archives. `seen`: what was met, by its path relative to the folder."""

    def __init__(self, target: Path, max_bytes: int, max_files: int) -> None:
        self.fetched = Fetched()
        self.seen: set[str] = set()
        self._target = target
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._stopped = False
        self._open: int | None = None
        self._open_path = ""
        self._open_left = 0
        self._open_size = 0
        self._reader = TarReader()
        self._base = ""
        self._root = ""

    def begin(self, base: str) -> None:
        """The next archive. Its first entry is what lies at `base` of the folder; empty: the folder itself."""
        self.close()
        self._reader, self._base, self._root = TarReader(), base, ""

    def stop(self) -> None:
        """From another thread: the next step raises `Stopped`."""
        self._stopped = True

    def feed(self, data: bytes) -> None:
        """Raises `TooMany`, `TooLong`, `BrokenArchive`, `Stopped`, `OSError` where the host's disk has no room."""
        if self._stopped:
            raise Stopped
        for item in self._reader.feed(data):
            if isinstance(item, Entry):
                self._take(item)
            elif self._open is not None:
                self._write(self._open, item)

    def end(self) -> None:
        """The archive's bytes are all there. Raises `BrokenArchive`."""
        if not self._reader.ended:
            raise BrokenArchive("the archive breaks off")
        self.close()

    def close(self) -> None:
        """A file that is not whole is removed."""
        if self._open is not None:
            self._drop()

    def _take(self, entry: Entry) -> None:
        path = self._relative(entry.name)
        if path is None:
            self.fetched.refuse(entry.name, "a name that leads out of the folder")
            self._past(entry, entry.name)
            return
        if path == "":
            if entry.kind is not Kind.FOLDER:
                raise RuntimeFault("is not a folder")
            self._target.mkdir(parents=True, exist_ok=True)
            return
        parts = path.split("/")
        if len(parts) > MAX_DEPTH + 1:
            # Below a folder that was refused.
            self._past(entry, path)
            return
        self.seen.add(path)
        if len(self.seen) > self._max_files:
            raise TooMany(f"more than the {self._max_files} files that may be fetched")
        try:
            self._make(entry, parts, path)
        except OSError as exc:
            self.fetched.refuse(path, exc.strerror or str(exc))
        except TooLarge as exc:
            self.fetched.refuse(path, str(exc))
        if self._open is None:
            self._past(entry, path)
        elif not entry.size:
            self._finish(self._open)

    def _past(self, entry: Entry, path: str) -> None:
        if entry.size > READ_PAST:
            raise TooLong(path)

    def _relative(self, name: str) -> str | None:
        """The path in the folder; None: it leads elsewhere. The archive's first entry is its root."""
        parts = [part for part in name.split("/") if part not in {"", "."}]
        if name.startswith("/") or ".." in parts or "\0" in name:
            return None
        plain = "/".join(parts)
        if not self._root:
            self._root = plain or "."
            return self._base
        if self._root == ".":
            inner = plain
        elif plain.startswith(f"{self._root}/"):
            inner = plain[len(self._root) + 1 :]
        else:
            return None
        return f"{self._base}/{inner}" if self._base else inner

    def _make(self, entry: Entry, parts: list[str], path: str) -> None:
        with self._folder(parts[:-1]) as folder:
            if entry.kind is Kind.FOLDER and len(parts) > MAX_DEPTH:
                self.fetched.refuse(path, f"deeper than {MAX_DEPTH} folders")
            elif entry.kind is Kind.FOLDER:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parts[-1], 0o755, dir_fd=folder)
            elif entry.kind is Kind.LINK and stays_inside(entry.link, len(parts) - 1):
                os.symlink(entry.link, parts[-1], dir_fd=folder)
            elif entry.kind is Kind.LINK:
                self.fetched.refuse(path, "a link that leads out of the folder")
            elif entry.kind is Kind.HARD_LINK:
                self._copy(entry, folder, parts[-1], path)
            elif entry.kind is Kind.FILE:
                self._fits(entry.size)
                self._open = os.open(parts[-1], NEW_FILE, entry.mode & 0o755 | 0o600, dir_fd=folder)
                self._open_path, self._open_left, self._open_size = path, entry.size, entry.size
            else:
                self.fetched.refuse(path, str(entry.kind))

    def _copy(self, entry: Entry, folder: int, name: str, path: str) -> None:
        """A hard link is a second file with the same bytes, if the first one came along."""
        first = self._relative(entry.link)
        if not first or first not in self.seen:
            self.fetched.refuse(path, "a hard link to what is not in the folder")
            return
        parts = first.split("/")
        with self._folder(parts[:-1]) as beside:
            source = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=beside)
        try:
            found = os.fstat(source)
            self._fits(found.st_size)
            target = os.open(name, NEW_FILE, found.st_mode & 0o755, dir_fd=folder)
            try:
                while data := os.read(source, 1 << 20):
                    os.write(target, data)
            finally:
                os.close(target)
            self.fetched.bytes += found.st_size
            self.fetched.files += 1
        finally:
            os.close(source)

    def _fits(self, size: int) -> None:
        left = self._max_bytes - self.fetched.bytes
        if size > left:
            raise TooLarge(f"{size} bytes, and {left} more may be fetched")

    @contextlib.contextmanager
    def _folder(self, parts: list[str]) -> Iterator[int]:
        handle = os.open(self._target, FOLDER)
        try:
            for part in parts:
                inner = os.open(part, FOLDER, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    def _write(self, handle: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        self._open_left -= len(data)
        if not self._open_left:
            self._finish(handle)

    def _finish(self, handle: int) -> None:
        os.close(handle)
        self._open = None
        self.fetched.bytes += self._open_size
        self.fetched.files += 1

    def _drop(self) -> None:
        assert self._open is not None
        os.close(self._open)
        self._open = None
        parts = self._open_path.split("/")
        with contextlib.suppress(OSError), self._folder(parts[:-1]) as folder:
            os.unlink(parts[-1], dir_fd=folder)
