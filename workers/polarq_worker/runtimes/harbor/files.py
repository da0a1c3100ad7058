"""Files in and out of a Harbor environment: one archive each way, made and read by us, moved as one file by it."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import shlex
import stat
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path, PurePosixPath

from polarq.errors import RuntimeFault
from polarq_worker.runtimes import confined
from polarq_worker.runtimes.archives.tar import BrokenArchive
from polarq_worker.runtimes.archives.unpack import TooLong, Unpacker
from polarq_worker.runtimes.fetched import Fetched, TooLarge
from polarq_worker.runtimes.harbor.environment import Environment, asking
from polarq_worker.runtimes.texts import cannot

READ_BYTES = 1 << 20
ENTRY_BYTES = 2048
"""What an entry takes in an archive beside its content, about."""
MISSING, NO_FILE, NO_FOLDER = "missing", "other", "no-folder"

Shell = Callable[[str, str], Awaitable[str]]
"""Runs a command of ours inside: (command, what it is for). Raises `RuntimeFault`."""


class Transfers:
    """One sandbox's. `own_dir` is ours inside, `scratch` on the host."""

    def __init__(self, environment: Environment, shell: Shell, own_dir: str, scratch: Path) -> None:
        self._environment = environment
        self._shell = shell
        self._own_dir = own_dir
        self._scratch = scratch

    async def put_file(self, source: Path, path: str, mode: int, what: str) -> None:
        target = absolute(path)
        inside = f"{self._own_dir}/up.{secrets.token_hex(8)}"
        async with asking(what):
            await self._environment.upload_file(source, inside)
        await self._shell(
            f"t={shlex.quote(target)}; mkdir -p -- {shlex.quote(str(PurePosixPath(target).parent))} && "
            f"{{ [ ! -d $t ] || [ -L $t ]; }} && chmod {mode:o} {inside} && mv -fT -- {inside} $t".replace(
                "$t", '"$t"'
            ),
            what,
        )

    async def put_bytes(self, data: bytes, path: str, mode: int, what: str) -> None:
        source = self._scratch / secrets.token_hex(8)
        try:
            await asyncio.to_thread(source.write_bytes, data)
            await self.put_file(source, path, mode, what)
        except OSError as exc:
            raise RuntimeFault(cannot(what, exc)) from exc
        finally:
            source.unlink(missing_ok=True)

    async def put_dir(self, source: Path, path: str, what: str) -> None:
        target = shlex.quote(absolute(path))
        packed = self._scratch / f"{secrets.token_hex(8)}.tar"
        inside = f"{self._own_dir}/{packed.name}"
        try:
            await asyncio.to_thread(_pack, source, packed)
            async with asking(what):
                await self._environment.upload_file(packed, inside)
            await self._shell(
                f"mkdir {inside}.d && tar --no-same-owner -xpf {inside} -C {inside}.d && rm -f {inside} && "
                f'mkdir -p -- "$(dirname -- {target})" && rm -rf -- {target} && mv -T -- {inside}.d {target}',
                what,
            )
        except OSError as exc:
            raise RuntimeFault(cannot(what, exc)) from exc
        finally:
            packed.unlink(missing_ok=True)

    async def get_file(self, path: str, target: Path, max_bytes: int, what: str) -> None:
        source = shlex.quote(absolute(path))
        said = await self._shell(
            f"if [ -L {source} ] || {{ [ -e {source} ] && [ ! -f {source} ]; }}; then echo {NO_FILE}; "
            f"elif [ ! -e {source} ]; then echo {MISSING}; else stat -c %s -- {source}; fi",
            what,
        )
        word = said.split()[-1] if said.split() else MISSING
        if word in {NO_FILE, MISSING}:
            raise RuntimeFault(
                f"{what}: " + ("it is not a regular file" if word == NO_FILE else "there is no such file")
            )
        if int(word) > max_bytes:
            raise TooLarge(f"{what}: larger than the {max_bytes} bytes that may be fetched")
        inside = f"{self._own_dir}/down.{secrets.token_hex(8)}"
        # A copy of ours, cut: the file may grow, and a provider that follows links follows none.
        await self._shell(f"head -c {max_bytes + 1} -- {source} > {inside}", what)
        await self._fetch(inside, target, what)
        if target.stat().st_size > max_bytes:
            target.unlink()
            raise TooLarge(f"{what}: larger than the {max_bytes} bytes that may be fetched")

    async def get_dir(self, path: str, target: Path, max_bytes: int, max_files: int, what: str) -> Fetched:
        source = shlex.quote(absolute(path))
        inside = f"{self._own_dir}/down.{secrets.token_hex(8)}"
        limit = max_bytes + (max_files + 16) * ENTRY_BYTES + READ_BYTES
        said = await self._shell(
            f"if [ -L {source} ] || [ ! -d {source} ]; then echo {NO_FOLDER}; else cd -- {source} && "
            f"find . -type f -size +{max_bytes}c -print0 | head -z -n 1000 | base64 -w 0 && "
            f"find . ! \\( -type f -size +{max_bytes}c \\) -print0 | head -z -n {max_files + 2} | "
            f"tar --no-recursion --null --ignore-failed-read -T - -cf - 2> /dev/null | head -c {limit} > {inside}; fi",
            what,
        )
        if said.strip() == NO_FOLDER:
            raise RuntimeFault(f"{what}: there is no such folder")
        archive = self._scratch / secrets.token_hex(8)
        try:
            await self._fetch(inside, archive, what)
            unpacker = Unpacker(target, max_bytes, max_files)
            await asyncio.to_thread(_unpack, archive, unpacker)
        except RuntimeFault as exc:
            raise type(exc)(f"{what}: {exc}") from None
        except OSError as exc:
            raise RuntimeFault(cannot(what, exc)) from exc
        finally:
            archive.unlink(missing_ok=True)
        for name in base64.b64decode(said.strip()).split(b"\0"):
            if name:
                unpacker.fetched.refuse(os.fsdecode(name).removeprefix("./"), f"larger than {max_bytes} bytes")
        return unpacker.fetched

    async def _fetch(self, inside: str, target: Path, what: str) -> None:
        try:
            async with asking(what):
                await self._environment.download_file(inside, target)
        finally:
            await self._shell(f"rm -f {inside}", what)


def absolute(path: str) -> str:
    """Raises `RuntimeFault` where it climbs, or is the root."""
    parts = confined.parts_of(path)
    if not parts:
        raise RuntimeFault("names the sandbox's own folder, not something in it")
    return "/" + "/".join(parts)


def mode_of(source: Path) -> int:
    return stat.S_IMODE(source.stat().st_mode) & 0o777


def _pack(source: Path, packed: Path) -> None:
    def ours(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mode &= 0o777
        return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None

    with tarfile.open(packed, "w") as tar:
        tar.add(source, ".", filter=ours)


def _unpack(archive: Path, unpacker: Unpacker) -> None:
    unpacker.begin("")
    try:
        with archive.open("rb") as file:
            while data := file.read(READ_BYTES):
                unpacker.feed(data)
        unpacker.end()
    except TooLong as exc:
        unpacker.fetched.refuse(exc.path, "what follows was too much")
    except BrokenArchive:
        unpacker.fetched.refuse("", "the rest was more than may be fetched")
    finally:
        unpacker.close()
