"""Reads and writes files inside a folder that an untrusted program also writes to.

Every path is walked component by component with O_NOFOLLOW, relative to the open descriptor of the one before (openat),
so no symbolic link that a task planted, at whatever moment, leads outside. All functions block; run them in a thread.
`Progress.stop()` makes them give up at the next file or megabyte.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.fetched import MAX_DEPTH, Fetched, TooLarge, TooMany, kind_of, stays_inside

CHUNK = 1 << 20
Transfer = Callable[..., object]
"""One of this module's functions: (base, parts, ...)."""
Base = Path | int
"""The folder that is not left: its path, or an open descriptor of it."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_thread = threading.local()
"""`owner` of what this thread makes: (user, group), or absent for its own."""


def as_owner(owner: tuple[int, int], function: Transfer, *args: object) -> object:
    """Calls one of these functions; what it makes belongs to `owner`."""
    _thread.owner = owner
    try:
        return function(*args)
    finally:
        del _thread.owner


class Stopped(Exception):
    """The copy was asked to stop."""


@dataclass(slots=True)
class Progress:
    """Limits of one transfer and how much of them is used."""

    max_bytes: int | None = None
    max_files: int | None = None
    bytes: int = 0
    files: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self._stop.set()

    def count(self, size: int = 0, files: int = 0) -> None:
        self.bytes += size
        self.files += files
        if self._stop.is_set():
            raise Stopped
        if self.max_bytes is not None and self.bytes > self.max_bytes:
            raise TooLarge(f"larger than the {self.max_bytes} bytes that may be fetched")
        if self.max_files is not None and self.files > self.max_files:
            raise TooMany(f"more than the {self.max_files} files that may be fetched")


def parts_of(path: str) -> list[str]:
    """The components of a relative path. Raises `RuntimeFault` where it climbs."""
    parts = [part for part in PurePosixPath(path).parts if part not in {"/", "."}]
    if ".." in parts:
        raise RuntimeFault(f"'{path}' has '..' in it; give the path without")
    return parts


def put_bytes(base: Base, parts: list[str], data: bytes, mode: int) -> None:
    with _parent(base, parts, create=True) as (folder, name), _replacing(folder, name, mode) as target:
        _write_all(target, data)


def put_file(base: Base, parts: list[str], source: Path, progress: Progress) -> None:
    with source.open("rb") as file, _parent(base, parts, create=True) as (folder, name):
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        with _replacing(folder, name, mode) as target:
            while data := file.read(CHUNK):
                progress.count(size=len(data))
                _write_all(target, data)


def put_dir(base: Base, parts: list[str], source: Path, progress: Progress) -> None:
    """Copies a folder of the host. An existing target is replaced as a whole, never merged into."""
    if not parts:
        raise RuntimeFault("the sandbox's own folder cannot be replaced; upload into a folder below it")
    with _parent(base, parts, create=True) as (folder, name):
        temporary = f".polarq-{secrets.token_hex(8)}"
        os.mkdir(temporary, 0o700, dir_fd=folder)
        try:
            with _opened(temporary, FOLDER, folder) as target:
                _fill(target, source, progress)
                _give_away(target)
                os.fchmod(target, stat.S_IMODE(source.stat().st_mode) | 0o700)
            _remove(name, folder)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            _remove(temporary, folder)
            raise


def make_dir(base: Base, parts: list[str]) -> None:
    """A folder, with those above it, unless it is there."""
    with _folder(base, parts, create=True):
        return


def give(base: Base, parts: list[str], uid: int, gid: int) -> None:
    """Another owner for a folder, not for what is in it."""
    with _folder(base, parts, create=False) as folder:
        os.fchown(folder, uid, gid)


def remove(base: Base, parts: list[str]) -> None:
    """Whatever has that name; no harm when nothing has."""
    with _parent(base, parts, create=False) as (folder, name):
        _remove(name, folder)


def get_file(base: Base, parts: list[str], target: Path, progress: Progress) -> None:
    with (
        _parent(base, parts, create=False) as (folder, name),
        _regular(name, folder) as source,
        target.open("wb") as out,
    ):
        while data := os.read(source, CHUNK):
            progress.count(size=len(data))
            out.write(data)


def get_dir(base: Base, parts: list[str], target: Path, progress: Progress) -> Fetched:
    """Copies a folder out: its files, its folders, and the links that stay inside; what else is there is refused.

    Raises `TooMany` beyond `progress.max_files` entries; what was copied until then is whole, and stays.
    """
    fetched = Fetched()
    with _folder(base, parts, create=False) as source:
        _take(source, target, progress, fetched, "", 0)
    return fetched


@contextlib.contextmanager
def _folder(base: Base, parts: list[str], *, create: bool) -> Iterator[int]:
    handle = os.open(base, FOLDER) if isinstance(base, Path) else os.dup(base)
    try:
        for done, part in enumerate(parts):
            made = create and _make_folder(part, handle)
            try:
                inner = os.open(part, FOLDER, dir_fd=handle)
            except OSError as exc:
                if exc.errno in {errno.ELOOP, errno.ENOTDIR}:
                    shown = "/".join(parts[: done + 1])
                    raise RuntimeFault(f"'{shown}' is not a folder of its own (a file or a symbolic link)") from None
                raise
            os.close(handle)
            handle = inner
            if made:
                _give_away(handle)
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _parent(base: Base, parts: list[str], *, create: bool) -> Iterator[tuple[int, str]]:
    if not parts:
        raise RuntimeFault("names the sandbox's own folder, not something in it")
    with _folder(base, parts[:-1], create=create) as handle:
        yield handle, parts[-1]


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int, mode: int = 0o600) -> Iterator[int]:
    handle = os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _regular(name: str, folder: int) -> Iterator[int]:
    # O_NONBLOCK: opening a named pipe must not wait for its writer.
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as exc:
        if exc.errno in {errno.ELOOP, errno.ENXIO}:
            raise RuntimeFault(f"'{name}' is not a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise RuntimeFault(f"'{name}' is not a regular file")
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _replacing(folder: int, name: str, mode: int) -> Iterator[int]:
    """A new file that takes the place of `name` when it is whole; a link of that name is replaced, not followed."""
    temporary = f".polarq-{secrets.token_hex(8)}"
    try:
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, folder) as handle:
            yield handle
            _give_away(handle)
            os.fchmod(handle, mode)
        try:
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            raise RuntimeFault(f"'{name}' is a folder; give the name of a file in it") from None
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _fill(target: int, source: Path, progress: Progress) -> None:
    with os.scandir(source) as entries:
        for entry in entries:
            progress.count(files=1)
            if entry.is_symlink():
                os.symlink(Path(entry.path).readlink(), entry.name, dir_fd=target)
                _give_link_away(entry.name, target)
            elif entry.is_dir():
                os.mkdir(entry.name, 0o700, dir_fd=target)
                with _opened(entry.name, FOLDER, target) as inner:
                    _fill(inner, Path(entry.path), progress)
                    _give_away(inner)
                    os.fchmod(inner, stat.S_IMODE(entry.stat().st_mode) | 0o700)
            elif entry.is_file():
                _copy_in(target, entry, progress)


def _copy_in(target: int, entry: os.DirEntry[str], progress: Progress) -> None:
    mode = stat.S_IMODE(entry.stat().st_mode) & 0o777
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with Path(entry.path).open("rb") as file, _opened(entry.name, flags, target) as out:
        while data := file.read(CHUNK):
            progress.count(size=len(data))
            _write_all(out, data)
        _give_away(out)
        os.fchmod(out, mode)


def _take(source: int, target: Path, progress: Progress, fetched: Fetched, above: str, depth: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            path = f"{above}{entry.name}"
            progress.count(files=1)
            try:
                _take_one(entry, source, target / entry.name, progress, fetched, path, depth)
            except (Stopped, TooMany):
                raise
            except RuntimeFault as exc:
                fetched.refuse(path, str(exc))
            except OSError as exc:
                # Among others a folder that became a link, or a file that went, since it was listed.
                fetched.refuse(path, exc.strerror or str(exc))


def _take_one(
    entry: os.DirEntry[str],
    source: int,
    target: Path,
    progress: Progress,
    fetched: Fetched,
    path: str,
    depth: int,
) -> None:
    mode = entry.stat(follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode):
        leads_to = os.readlink(entry.name, dir_fd=source)
        if stays_inside(leads_to, depth):
            target.symlink_to(leads_to)
        else:
            fetched.refuse(path, "a link that leads out of the folder")
    elif stat.S_ISDIR(mode) and depth >= MAX_DEPTH:
        fetched.refuse(path, f"deeper than {MAX_DEPTH} folders")
    elif stat.S_ISDIR(mode):
        with _opened(entry.name, FOLDER, source) as inner:
            _take(inner, target, progress, fetched, f"{path}/", depth + 1)
    elif stat.S_ISREG(mode):
        with _regular(entry.name, source) as file:
            fetched.bytes += _copy_out(file, target, progress)
        fetched.files += 1
    else:
        fetched.refuse(path, kind_of(mode))


def _copy_out(source: int, target: Path, progress: Progress) -> int:
    """Bytes copied. A file that is too large, now or by growing, leaves nothing and counts for nothing."""
    found = os.fstat(source)
    before = progress.bytes
    # A hole in a file costs whoever reads the copy as much as data: it counts.
    if progress.max_bytes is not None and before + found.st_size > progress.max_bytes:
        raise TooLarge(f"{found.st_size} bytes, and {progress.max_bytes - before} more may be fetched")
    try:
        with target.open("xb") as out:
            while data := os.read(source, CHUNK):
                progress.count(size=len(data))
                out.write(data)
            os.fchmod(out.fileno(), stat.S_IMODE(found.st_mode) & 0o755 | 0o600)
    except BaseException:
        progress.bytes = before
        target.unlink(missing_ok=True)
        raise
    return progress.bytes - before


def _make_folder(name: str, folder: int) -> bool:
    """Whether it was not there yet."""
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return False
    return True


def _give_away(handle: int) -> None:
    if hasattr(_thread, "owner"):
        os.fchown(handle, *_thread.owner)


def _give_link_away(name: str, folder: int) -> None:
    if hasattr(_thread, "owner"):
        os.chown(name, *_thread.owner, dir_fd=folder, follow_symlinks=False)


def _remove(name: str, folder: int) -> None:
    """Removes whatever is called `name`; a link itself, never what it points to."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
