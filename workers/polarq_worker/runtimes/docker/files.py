"""Files into a container and out of it, by the daemon's archive calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from aiodocker import Docker

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.archives.pack import Owner, Packer, parents_of
from polarq_worker.runtimes.archives.unpack import Unpacker
from polarq_worker.runtimes.base import SESSION_DIR
from polarq_worker.runtimes.confined import parts_of
from polarq_worker.runtimes.docker.archive import Archive
from polarq_worker.runtimes.docker.commands import said
from polarq_worker.runtimes.docker.daemon import Refusal
from polarq_worker.runtimes.docker.folders import whole_folder
from polarq_worker.runtimes.fetched import Fetched


class Files:
    """One container's. What is put there is its `owner`'s; paths are absolute, or relative to `workdir`.

    The methods are those of `Runtime`; `what` begins the message of the `RuntimeFault` that each may raise.
    """

    def __init__(self, docker: Docker, container: str, owner: Owner, workdir: str) -> None:
        self._docker = docker
        self._container = container
        self._owner = owner
        self._workdir = workdir
        self._archive = Archive(docker, container)

    async def put_file(self, what: str, source: Path, target: str) -> None:
        name, packer = self._target(target)
        await self._put(what, name, packer.file(name, source))

    async def put_dir(self, what: str, source: Path, target: str) -> None:
        name, packer = self._target(target)
        if f"/{name}" in {SESSION_DIR, str(PurePosixPath(SESSION_DIR).parent)}:
            raise RuntimeFault("the sandbox's own folder cannot be replaced; upload into a folder below it")
        await self._put(what, name, packer.folder(name, source), folder=True)

    async def put_bytes(self, what: str, data: bytes, target: str, mode: int) -> None:
        name, packer = self._target(target)
        await self._put(what, name, packer.one(name, data, mode))

    async def get_file(self, what: str, source: str, target: Path, max_bytes: int) -> None:
        await self._archive.get_file(what, absolute(source, self._workdir), target, max_bytes)

    async def get_dir(self, what: str, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        unpacker = Unpacker(target, max_bytes, max_files)
        top = absolute(source, self._workdir)
        return await whole_folder(self._docker, self._archive, self._container, what, top, unpacker)

    async def _put(self, what: str, name: str, parts: Iterator[bytes], *, folder: bool = False) -> None:
        try:
            await self._archive.put(what, parts, replace_folders=folder)
        except Refusal:
            raise
        except RuntimeFault:
            # It broke off in the middle: half of it is worse than nothing.
            with suppress(RuntimeFault):
                await said(self._docker, self._container, ["rm", "-rf" if folder else "-f", "--", f"/{name}"])
            raise

    def _target(self, path: str) -> tuple[str, Packer]:
        """(name in an archive for the container's root, who packs it). Folders on the way below the session are given
        to the sandbox's user; others are made by the daemon where they are missing, and belong to root."""
        whole = absolute(path, self._workdir)
        if whole == "/":
            raise RuntimeFault(f"'{path}' names the sandbox itself, not something in it")
        parents = parents_of(whole, SESSION_DIR) if self._owner.uid else ()
        return whole.lstrip("/"), Packer(self._owner).under(*parents)


def absolute(path: str, workdir: str) -> str:
    """Raises `RuntimeFault` where it climbs."""
    return "/" + "/".join(parts_of(path if path.startswith("/") else f"{workdir}/{path}"))
