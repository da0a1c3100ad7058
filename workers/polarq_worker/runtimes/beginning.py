"""How a `local` sandbox comes to be, and how what was begun is undone: folder, walls, limits, record."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq_worker.runtimes import cgroups, shm, walls, wishes
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.cgroups import Cgroup, Limits
from polarq_worker.runtimes.folder import PrivateFolder, in_thread
from polarq_worker.runtimes.kept import PARTS, Kept, Record, copy_tree
from polarq_worker.runtimes.processes import ProcessTree, Walls
from polarq_worker.runtimes.texts import fault

log = logging.getLogger("polarq.worker.local")

SPARE_PROCESSES = 16
"""Beside those that a task may have: those that watch over them."""
OVERLAY = "overlay"


class Beginning:
    """One sandbox's."""

    _overlays = True
    """Whether this process may lay a sandbox's changes over a snapshot; found out by trying."""

    def __init__(
        self, folder: PrivateFolder, spec: RuntimeSpec, host: Host, runtime_id: str, kept: Kept | None
    ) -> None:
        self._folder = folder
        self._host = host
        self._isolated = folder.owner is not None
        self._kept = kept
        self._cgroup: Cgroup | None = None
        self._record = Record(runtime_id, str(folder.root), host.incarnation)
        self._noted = False
        self._shm_bytes = shm.size(spec)
        memory = None if spec.memory_mb is None else spec.memory_mb * 1_000_000
        most = wishes.most_processes(spec, host, isolated=self._isolated)
        processes = None if most is None else most + SPARE_PROCESSES
        # Only in a user namespace of its own is a limit of processes one of the sandbox, and not of its user.
        self._own_limit = processes if self._isolated and wishes.counts_itself() else None
        limits = Limits(memory, spec.cpus, None if self._own_limit else processes)
        if limits.controllers:
            self._cgroup = Cgroup(runtime_id, limits)

    async def start(self, snapshot: str | None, *, online: bool) -> ProcessTree:
        """Raises `RuntimeFault`. Stops nothing by itself: `undo` does, after the tree."""
        await self._folder.make()
        try:
            await in_thread(self._note, snapshot)
            base = None if snapshot is None else self._find(snapshot)
            over = self._isolated and base is not None and Beginning._overlays
            if over:
                assert base is not None
                try:
                    return await self._under_way(await in_thread(self._over, base), online, inside=True)
                except (RuntimeFault, OSError) as exc:
                    log.info("a snapshot is copied, for it cannot be laid under a sandbox: %s", exc)
            if base is None:
                await in_thread(self._folder.furnish)
            else:
                await in_thread(self._copy, base)
            tree = await self._under_way([], online, inside=False)
            if over:
                # That was the reason: a file system or a kernel that does not let us.
                Beginning._overlays = False
            return tree
        except OSError as exc:
            raise fault("the sandbox cannot be started", exc) from exc

    def memory_kills(self) -> int:
        return 0 if self._cgroup is None else self._cgroup.memory_kills()

    async def undo(self) -> bool:
        """Removes it all, once its processes are gone; whether they were. Raises `RuntimeFault`."""
        if self._folder.inside is not None:
            os.close(self._folder.inside)
            self._folder.inside = None
        over = self._cgroup is None or bool(await in_thread(cgroups.remove, self._cgroup.folders))
        await self._folder.remove()
        if self._kept is not None and self._noted and over:
            await in_thread(self._kept.forget, self._record)
        return over

    async def _under_way(self, overlays: list[tuple[str, str]], online: bool, *, inside: bool) -> ProcessTree:
        walled = await in_thread(self._walls, overlays, online) if self._isolated else None
        tree = ProcessTree(self._folder.run / "warden.stderr", walled)
        try:
            await tree.start()
            if inside:
                self._folder.inside = os.open(
                    f"/proc/{tree.warden_pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                )
            if self._cgroup is not None:
                await in_thread(self._cgroup.take_in, tree.warden_pid)
        except BaseException:
            await tree.stop()
            raise
        return tree

    def _note(self, snapshot: str | None) -> None:
        groups = [] if self._cgroup is None else self._cgroup.folders
        if self._kept is not None:
            record = self._record
            self._record = Record(record.runtime_id, record.root, record.incarnation, groups, snapshot or "")
            self._kept.note(self._record)
            self._noted = True
        if self._cgroup is not None:
            self._cgroup.make()

    def _find(self, snapshot: str) -> Path:
        if self._kept is None:
            raise RuntimeFault("this node keeps nothing: there is no snapshot to start from")
        return self._kept.find(snapshot)

    def _copy(self, base: Path) -> None:
        for part in PARTS:
            copy_tree(base / part, self._folder.root / part)

    def _over(self, base: Path) -> list[tuple[str, str]]:
        """Folders for what will differ from the snapshot, and what is to be mounted where."""
        mounts = []
        for part in PARTS:
            lower, upper, work = (
                base / part,
                self._folder.root / OVERLAY / part,
                self._folder.root / OVERLAY / f".{part}",
            )
            upper.mkdir(parents=True)
            work.mkdir()
            shutil.copystat(lower, upper)
            with contextlib.suppress(PermissionError):
                os.chown(upper, lower.stat().st_uid, lower.stat().st_gid)
            named = ",".join(f"{key}={_quoted(path)}" for key, path in _pairs(lower, upper, work))
            more = "redirect_dir=on" if os.geteuid() == 0 else "userxattr"
            mounts.append((str(self._folder.root / part), f"{named},{more}"))
        return mounts

    def _walls(self, overlays: list[tuple[str, str]], online: bool) -> Walls:
        owner = self._folder.owner
        assert owner is not None
        for name, text in walls.accounts(*owner).items():
            (self._folder.run / name).write_text(text, encoding="utf-8")
        folders = [path for path in (self._host.folder, *self._host.private) if path is not None]
        sight = walls.sight([*folders, self._folder.root.parent], self._host.settings.local.visible)
        arguments = walls.arguments(
            self._folder.root, sight, online=online, processes=self._own_limit, shm_bytes=self._shm_bytes
        )
        return Walls(arguments, overlays, own_users=self._own_limit is not None and os.geteuid() == 0)


def _pairs(lower: Path, upper: Path, work: Path) -> list[tuple[str, Path]]:
    return [("lowerdir", lower), ("upperdir", upper), ("workdir", work)]


def _quoted(path: Path) -> str:
    """As the options of an overlay have it."""
    return str(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
