"""A sandbox's folders: those of its session, and how one is fetched that has files too large to be read past."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from aiodocker import Docker

from polarq_worker.runtimes.archives.pack import END, Owner, Packer, parents_of
from polarq_worker.runtimes.archives.unpack import Unpacker
from polarq_worker.runtimes.base import SESSION_DIR, SandboxLayout
from polarq_worker.runtimes.docker import shell
from polarq_worker.runtimes.docker.archive import Archive
from polarq_worker.runtimes.docker.commands import said
from polarq_worker.runtimes.docker.daemon import Refusal
from polarq_worker.runtimes.docker.users import HOME
from polarq_worker.runtimes.fetched import Fetched

MAX_LEFT_OUT = 32
"""Files of a folder that are too large to be read past; behind so many the rest is not looked for."""


def session_folders(layout: SandboxLayout, workdir: str, owner: Owner, passwd: bytes | None = None) -> Iterator[bytes]:
    """An archive of what every sandbox has, for the container's root. `passwd` is that file, where it gets another one
    and its user a home."""
    top = Packer()
    yield from top.under("polar").folders()
    yield top.folder_entry(shell.RUN_DIR.lstrip("/"), 0o1777)
    below = [layout.session_dir, layout.artifacts_dir, layout.logs_dir, layout.agent_log_dir, layout.eval_log_dir]
    names = [*below, *parents_of(str(PurePosixPath(workdir) / "x"), SESSION_DIR)]
    yield from Packer(owner).under(*(name.lstrip("/") for name in names)).folders()
    if passwd is not None:
        yield from top.entry("etc/passwd", passwd, 0o644)
        yield Packer(owner).folder_entry(HOME.lstrip("/"), 0o700)
    yield END


async def whole_folder(
    docker: Docker, archive: Archive, container: str, what: str, top: str, unpacker: Unpacker
) -> Fetched:
    """Unpacks what lies at `top`. Behind a file that is too large to be read past the archive is given up, and what
    lies beside it is asked for by name. Raises `RuntimeFault`."""
    waiting, left_out = [""], 0
    while waiting:
        base = waiting.pop()
        lies_at = f"{top}/{base}" if base else top
        try:
            too_long = await archive.get_folder(what, lies_at, unpacker, base)
        except Refusal as exc:
            # Gone since it was listed.
            if not base or exc.status != 404:
                raise
            continue
        if too_long is not None:
            left_out += 1
            if left_out > MAX_LEFT_OUT:
                unpacker.fetched.refuse(top, "too many files of it are too large; the rest was not fetched")
                break
            waiting += await _beside(docker, container, top, base, too_long, unpacker.seen)
    return unpacker.fetched


async def _beside(docker: Docker, container: str, top: str, base: str, path: str, seen: set[str]) -> list[str]:
    """What lies beside `path` and beside the folders above it, down from `base`, and was not met yet."""
    found = []
    folder = PurePosixPath(path).parent
    while True:
        inner = "" if str(folder) == "." else str(folder)
        if base and not (inner == base or inner.startswith(f"{base}/")):
            break
        script = ["/bin/sh", "-c", shell.NAMES, "polarq", f"{top}/{inner}"]
        names = (await said(docker, container, script)).decode("utf-8", "surrogateescape").split("\0")[:-1]
        beside = [f"{inner}/{name}" if inner else name for name in names]
        found += [one for one in beside if one not in seen]
        if not inner:
            break
        folder = folder.parent
    return found
