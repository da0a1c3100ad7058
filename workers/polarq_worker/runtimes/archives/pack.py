"""Writes a tar stream of files of the host, for whoever unpacks it in a sandbox. Blocking; run it in a thread."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from polarq.errors import RuntimeFault

CHUNK = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who files in the sandbox belong to."""

    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True)
class Packer:
    """`parents`: folders to make, or to give to the owner, before anything else."""

    owner: Owner = Owner()
    parents: tuple[str, ...] = ()

    def under(self, *parents: str) -> Packer:
        return replace(self, parents=parents)

    def folders(self) -> Iterator[bytes]:
        for parent in self.parents:
            yield self._header(parent, tarfile.DIRTYPE, 0o755)

    def folder_entry(self, name: str, mode: int) -> bytes:
        return self._header(name, tarfile.DIRTYPE, mode)

    def one(self, name: str, data: bytes, mode: int) -> Iterator[bytes]:
        yield from self.folders()
        yield from self.entry(name, data, mode)
        yield END

    def entry(self, name: str, data: bytes, mode: int) -> Iterator[bytes]:
        yield self._header(name, tarfile.REGTYPE, mode, len(data)) + data + bytes(-len(data) % tarfile.BLOCKSIZE)

    def file(self, name: str, source: Path) -> Iterator[bytes]:
        yield from self.folders()
        yield from self._file(name, source)
        yield END

    def folder(self, name: str, source: Path) -> Iterator[bytes]:
        """An empty file of the same name goes before it: the daemon removes whatever is there for it, and then that."""
        yield from self.folders()
        yield self._header(name, tarfile.REGTYPE, 0o600)
        yield from self._folder(name, source)
        yield END

    def _folder(self, name: str, source: Path) -> Iterator[bytes]:
        mode = stat.S_IMODE(source.stat().st_mode) & 0o777 | 0o700
        yield self._header(name, tarfile.DIRTYPE, mode)
        with os.scandir(source) as entries:
            for entry in entries:
                inner = f"{name}/{entry.name}"
                if entry.is_symlink():
                    yield self._header(inner, tarfile.SYMTYPE, 0o777, link=str(Path(entry.path).readlink()))
                elif entry.is_dir():
                    yield from self._folder(inner, Path(entry.path))
                elif entry.is_file():
                    yield from self._file(inner, Path(entry.path))

    def _file(self, name: str, source: Path) -> Iterator[bytes]:
        with source.open("rb") as file:
            found = os.fstat(file.fileno())
            left = found.st_size
            yield self._header(name, tarfile.REGTYPE, stat.S_IMODE(found.st_mode) & 0o777, left)
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise RuntimeFault(f"{source} became shorter while it was read")
                left -= len(data)
                yield data
        yield bytes(-found.st_size % tarfile.BLOCKSIZE)

    def _header(self, name: str, kind: bytes, mode: int, size: int = 0, link: str = "") -> bytes:
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.size, info.linkname = kind, mode, size, link
        info.uid, info.gid = self.owner.uid, self.owner.gid
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def parents_of(path: str, above: str) -> tuple[str, ...]:
    """The folders between `above` and what lies at `path`, from the top; none when it lies elsewhere. For an archive,
    so without the first slash."""
    whole = PurePosixPath(path)
    between = [folder for folder in whole.parents if folder.is_relative_to(above) and folder != PurePosixPath(above)]
    return tuple(str(folder).lstrip("/") for folder in reversed(between))
