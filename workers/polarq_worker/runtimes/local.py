"""Runtime `local`: a private folder of the node itself, and every process in it under one warden.

Isolated by bubblewrap where the node has it (`runtimes.local.isolation`): the system read-only, nothing of home folders
or of polarq's own, process, IPC and network namespaces of its own, no privilege, and under a worker that is root
another user. Without, it isolates processes, files by convention, and the environment; that is for trusted harnesses,
tests and machines without containers. Linux only.

    <root>/            0700, gone after stop()
      session/         what the contract calls /polar/session, with artifacts/ and logs/
      home/  tmp/      $HOME and $TMPDIR
      run/  logs/      scripts of commands; their output as kept for the host
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from polarq import bubblewrap
from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.runtimes import confined, strays, walls, wishes
from polarq_worker.runtimes.base import ExecResult, Host, SandboxLayout, Snapshot
from polarq_worker.runtimes.beginning import Beginning
from polarq_worker.runtimes.commands import Commands, Order
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.folder import PrivateFolder, in_thread, write_private
from polarq_worker.runtimes.kept import Kept, Record
from polarq_worker.runtimes.processes import ProcessTree, WardenLost, uninterrupted
from polarq_worker.runtimes.starting import Starting
from polarq_worker.runtimes.surroundings import environment, search_path
from polarq_worker.runtimes.texts import cannot, fault
from polarq_worker.runtimes.transfers import OpenedRuntime


class LocalRuntime(OpenedRuntime):
    """See the module's text."""

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        host = host or Host()
        self._isolated = isolates(host)
        self._owner = walls.own_ids() if self._isolated else None
        self._folder = PrivateFolder(root, spec.workdir, self._owner)
        super().__init__(spec, runtime_id=runtime_id, root=self._folder.root, host=host)
        self._kept = None if host.folder is None else Kept(host.folder)
        self._starting = Starting()
        self._beginning: Beginning | None = None
        self._tree: ProcessTree | None = None
        self._online = True
        self._numbers = itertools.count(1)
        self._commands: Commands | None = None
        self._lost = "it was not started"
        self._damaged = False
        """A warden or keeper died unasked, so not all processes may be under one."""

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        missing = _missing_walls(host)
        return [*([missing] if missing else []), *wishes.problems(spec, isolated=isolates(host))]

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return isolates(host)

    @classmethod
    async def resolve_image(cls, spec: RuntimeSpec, host: Host) -> str:
        """The machine's own programs are found on PATH, and a recipe may have made links to them."""
        return os.environ.get("PATH", os.defpath)

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return host.folder is not None

    @classmethod
    def machine_path(cls, spec: RuntimeSpec) -> str:
        return spec.env.get("PATH") or search_path()

    @property
    def isolation(self) -> str:
        if not self._isolated:
            return "none"
        return "bubblewrap" if wishes.limits_processes(isolated=True) else "bubblewrap, its processes not limited"

    @property
    def layout(self) -> SandboxLayout:
        return self._folder.layout

    @property
    def host_log_dir(self) -> Path:
        return self._folder.logs

    @property
    def workdir(self) -> str:
        return str(self._folder.workdir)

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        bash = shutil.which("bash", path=environment(self._folder)["PATH"])
        if bash is None:
            raise RuntimeFault("there is no bash on this node; install it")
        if missing := _missing_walls(self.host):
            raise RuntimeFault(missing)
        if not online and not self._isolated:
            raise RuntimeFault(f"the local runtime cannot cut a sandbox off the network: {bubblewrap.why_not()}")
        self._bash = bash
        self._online = online
        await self._starting.run(self._start(snapshot))

    async def _start(self, snapshot: str | None) -> None:
        _living[self._key] = self
        self._beginning = Beginning(self._folder, self.spec, self.host, self.runtime_id, self._kept)
        self._tree = await self._beginning.start(snapshot, online=self._online)
        most = wishes.most_processes(self.spec, self.host, isolated=self._isolated)
        self._commands = Commands(self._tree, walled=self._isolated, most_processes=most)
        self._lost = ""

    @property
    def _key(self) -> tuple[Path | None, str]:
        return self.host.folder, self.runtime_id

    async def alive(self) -> bool:
        return not self._lost and self.root.is_dir() and self._tree is not None and not self._tree.hung_up()

    async def open_door(self, port: int) -> socket.socket:
        if self._online or self._lost or self._tree is None:
            raise RuntimeFault(f"no door can be opened: {self._lost or 'the sandbox was started with the network'}")
        try:
            return await self._tree.door(port)
        except OSError as exc:
            raise RuntimeFault(cannot(f"port {port} of the sandbox's own network cannot be listened on", exc)) from exc
        except WardenLost:
            self._lose("its first process was killed")
            raise SandboxLost(f"no door can be opened: {self._lost}") from None

    async def snapshot(self, name: str) -> Snapshot:
        if self._kept is None:
            raise RuntimeFault("this node keeps nothing: snapshots need a folder")
        if self._lost:
            raise SandboxLost(f"no snapshot can be taken: {self._lost}")
        if not await self.end_background():
            raise RuntimeFault("no snapshot can be taken: something in the sandbox does not die")
        unmoved = None if self._isolated else str(self.root)
        try:
            return cast("Snapshot", await in_thread(self._kept.save, name, self._folder.parts(), unmoved))
        except OSError as exc:
            raise fault("the snapshot cannot be kept", exc) from exc

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        return [] if host.folder is None else cast("list[Snapshot]", await _kept(Kept(host.folder).all))

    @classmethod
    async def drop_snapshot(cls, reference: str, host: Host) -> None:
        if host.folder is not None:
            await _kept(Kept(host.folder).drop, reference)

    @classmethod
    async def sweep(cls, host: Host, keep: Collection[str]) -> list[str]:
        if host.folder is None:
            return []
        # At a worker's start, so that no rollout waits for it.
        await asyncio.to_thread(bubblewrap.why_not)
        await asyncio.to_thread(bubblewrap.own_users)
        kept = Kept(host.folder)
        swept, stubborn = [], []
        for record in cast("list[Record]", await _kept(kept.records)):
            if record.runtime_id in keep:
                continue
            own = _living.get((host.folder, record.runtime_id))
            if own is not None:
                await own.stop()
            elif not await _kept(kept.bury, record):
                stubborn.append(record.runtime_id)
                continue
            swept.append(record.runtime_id)
        await _kept(kept.tidy)
        if stubborn:
            raise RuntimeFault(f"processes of these sandboxes do not die: {', '.join(stubborn)}")
        return swept

    async def _exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bytes | None,
        timeout_s: float,
        log: str | None,
        max_output_bytes: int,
    ) -> ExecResult:
        if not self._lost and not self.root.is_dir():
            self._lost = f"its folder {self.root} is gone"
        if self._lost or self._commands is None:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost)
        number, brought = next(self._numbers), list[Path]()
        kills = self._memory_kills()
        try:
            folder = self._folder.cwd(cwd)
            ids = wishes.ids_of(user, self._owner)
            argv = list(command)
            if isinstance(command, str):
                text = command.encode("utf-8", "surrogateescape")
                brought.append(self._folder.run / f"{number}.sh")
                # Behind walls it is somebody else who runs it.
                await in_thread(write_private, brought[-1], text, 0o644 if self._isolated else 0o600)
                argv = [self._bash, "-o", "pipefail", f"{self._folder.seen_run}/{number}.sh"]
            # A file, not a pipe: it is there whole, ends by itself, and nobody minds when it is not read.
            fed = self._folder.run / f"{number}.stdin" if stdin else None
            if fed is not None and stdin is not None:
                brought.append(fed)
                await in_thread(write_private, fed, stdin)
            stem = None if log is None else self.host_log_dir / log
            order = Order(argv, folder, self._env(env, folder), ids, fed, stem, max_output_bytes)
            result = await self._commands.run(order, timeout_s)
        except RuntimeFault as exc:
            return ExecResult(ExecKind.COULD_NOT_START, message=str(exc))
        except OSError as exc:
            return ExecResult(ExecKind.COULD_NOT_START, message=cannot("the command could not be brought in", exc))
        finally:
            for path in brought:
                path.unlink(missing_ok=True)
        if result.kind is ExecKind.SANDBOX_LOST:
            self._lose(f"its first process was killed; {self._last_words()}".rstrip("; "))
            result = replace(result, message=self._lost)
        if self._memory_kills() > kills:
            why = f"out of memory: it may use {self.spec.memory_mb} MB (memory_mb)"
            result = replace(result, out_of_memory=True, message="; ".join(filter(None, (why, result.message))))
        return result

    async def end_background(self) -> bool:
        if self._lost or self._tree is None or self._commands is None:
            return False
        self._commands.expect_kill()
        try:
            return await self._tree.end()
        except WardenLost:
            self._lose("its first process was killed")
            return False

    async def stop(self) -> None:
        await uninterrupted(self._stop())

    async def _stop(self) -> None:
        await self._starting.end()
        self._lost = self._lost or "it was stopped"
        left = False
        if self._commands is not None:
            self._commands.let_go()
        if self._tree is not None:
            clean = await self._tree.stop()
            if self._damaged or not clean:
                marker = (f"POLARQ_RUNTIME_ID={self.runtime_id}".encode(), os.fsencode(self.root))
                left = not await asyncio.to_thread(strays.kill, marker)
        if self._commands is not None:
            self._commands.close()
        if self._beginning is not None:
            left = not await self._beginning.undo() or left
        _living.pop(self._key, None)
        if left:
            raise RuntimeFault(f"processes of sandbox {self.runtime_id} do not die; ps e shows its POLARQ_RUNTIME_ID")

    def _last_words(self) -> str:
        return "" if self._tree is None else self._tree.last_words()

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            self._damaged = True

    def _env(self, env: Mapping[str, str] | None, folder: str) -> dict[str, str]:
        marker = {"POLARQ_RUNTIME_ID": self.runtime_id, "PWD": folder}
        return {**environment(self._folder), **self.spec.env, **(env or {}), **marker}

    def _memory_kills(self) -> int:
        return 0 if self._beginning is None else self._beginning.memory_kills()

    async def _transfer(
        self, what: str, progress: Progress, function: confined.Transfer, path: str, *args: object
    ) -> Any:
        if self._lost:
            raise SandboxLost(f"{what} {path}: the sandbox was lost: {self._lost}")
        return await self._folder.transfer(what, progress, function, path, *args)


_living: dict[tuple[Path | None, str], LocalRuntime] = {}
"""Those of this process, from before `start` until after `stop`."""


def isolates(host: Host) -> bool:
    """Whether sandboxes of this host are walled in. Asks bubblewrap once in the life of this process."""
    return host.settings.local.isolation != "none" and not bubblewrap.why_not()


def _missing_walls(host: Host) -> str:
    """Blank where what the topology asks for is there."""
    why = bubblewrap.why_not() if host.settings.local.isolation == "bubblewrap" else ""
    return f"backend: runtimes.local.isolation of this node is bubblewrap; {why}" if why else ""


async def _kept(function: Callable[..., object], *args: object) -> object:
    try:
        return await in_thread(function, *args)
    except OSError as exc:
        raise fault("what local sandboxes keep on disk cannot be used", exc) from exc
