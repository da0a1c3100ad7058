"""Runtime `apptainer`: an instance of Apptainer (or Singularity) for each sandbox, where there is no Docker.

    <root>/          0700, gone after stop()
      overlay/       what the sandbox writes, over its image and the layers of its snapshot
      run/  logs/    the instance's own; output of commands as kept for the host
    <node's folder>/apptainer/
      images/  layers/  snapshots/  instances/

Commands do not go through the program: a warden of ours lives in the instance's namespaces (see inside.py), which
starts them in a millisecond and kills their whole trees. The instance itself hangs under another warden on the host and
ends with its worker; its note in `instances/` is for the case that this one was killed too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.network.way_out import WayOut, over
from polarq_worker.runtimes import confined, shm
from polarq_worker.runtimes.apptainer import environment, limits, wishes
from polarq_worker.runtimes.apptainer.files import InsideFiles
from polarq_worker.runtimes.apptainer.images import Image, bring
from polarq_worker.runtimes.apptainer.instance import Instance, Note, kill_within, name_of, stop_noted
from polarq_worker.runtimes.apptainer.layers import Layers
from polarq_worker.runtimes.apptainer.limits import OUT_OF_MEMORY, out_of_memory_kills, with_memory
from polarq_worker.runtimes.apptainer.program import Program, find
from polarq_worker.runtimes.base import SESSION_DIR, ExecResult, Host, SandboxLayout, Snapshot
from polarq_worker.runtimes.commands import Commands, Order
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.folder import in_thread, remove_tree, write_private
from polarq_worker.runtimes.processes import ProcessTree, Walls, WardenLost, uninterrupted
from polarq_worker.runtimes.starting import Starting
from polarq_worker.runtimes.texts import cannot
from polarq_worker.runtimes.transfers import OpenedRuntime

INSIDE = Path(__file__).with_name("inside.py")


class ApptainerRuntime(OpenedRuntime):
    """See the module's text."""

    reach = Reach.NODE

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        root = Path(os.path.realpath(root))
        super().__init__(spec, runtime_id=runtime_id, root=root, host=host)
        self._store = store_of(self.host) or root / "store"
        self._name = name_of(self.host.node_id, runtime_id)
        self._layout = SandboxLayout.below(SESSION_DIR)
        self._numbers = itertools.count(1)
        self._starting = Starting()
        self._instance: Instance | None = None
        self._tree: ProcessTree | None = None
        self._commands: Commands | None = None
        self._files: InsideFiles | None = None
        self._layers: list[Path] = []
        self._held: list[int] = []
        self._environment: dict[str, str] = {}
        self._image_id = ""
        self._made = False
        self._lost = "it was not started"

    # --- what it can do

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        return wishes.problems(spec, host)

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        return find(host) is not None

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return host.folder is not None and find(host) is not None

    @classmethod
    async def resolve_image(cls, spec: RuntimeSpec, host: Host) -> str:
        store = store_of(host)
        return "" if store is None else (await _brought(spec, host, Program.of(host, store))).digest

    @property
    def isolation(self) -> str:
        return "apptainer"

    @property
    def image_id(self) -> str:
        return self._image_id

    # --- when its worker is gone

    @property
    def handle(self) -> str:
        return str(self._store / "instances" / f"{self._name}.json")

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        await stop_noted(Path(record.handle))

    @classmethod
    async def sweep(cls, host: Host, keep: Collection[str]) -> list[str]:
        store = store_of(host)
        if store is None:
            return []
        stopped = []
        for path in sorted((store / "instances").glob("*.json")):
            note = await asyncio.to_thread(Note.read, path)
            if note is None or note.node_id != host.node_id or note.runtime_id in keep:
                continue
            if await stop_noted(path) is not None:
                stopped.append(note.runtime_id)
        await in_thread(Layers(store).sweep)
        return stopped

    # --- its life

    @property
    def layout(self) -> SandboxLayout:
        return self._layout

    @property
    def host_log_dir(self) -> Path:
        return self.root / "logs"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        await self._starting.run(self._start(snapshot, online))

    async def _start(self, snapshot: str | None, online: bool) -> None:
        program = Program.of(self.host, self._store)
        await in_thread(self._make_folders)
        image = await _brought(self.spec, self.host, program)
        self._image_id = image.digest
        if snapshot is not None:
            await in_thread(self._hold, snapshot)
        group = limits.own_group(self.spec, self.host, self.runtime_id)
        note = Note(self._name, self.runtime_id, self.host.node_id, program.path)
        if group is not None:
            note = replace(note, cgroups=tuple(group.folders))
        self._instance = instance = Instance(program, note, Path(self.handle), self.root / "run")
        chosen = wishes.options(self.spec, self.host, online=online, overlay=self.root / "overlay", layers=self._layers)
        await instance.start(image.path, chosen)
        of_image = await environment.of_image(program, self._name, self.spec.image, self.root / "run")
        self._environment = WayOut(cut_off=not online).stripped(of_image)
        try:
            files = await in_thread(self._open, instance.pid)
            inside = Walls(
                [sys.executable, "-E", "-s", "-S", str(INSIDE), "CONTROL", str(instance.pid), str(shm.size(self.spec))]
            )
            self._tree = ProcessTree(self.root / "run" / "warden.stderr", inside)
            await self._tree.start()
            if group is not None:
                await in_thread(group.make)
                await in_thread(group.take_in, self._tree.warden_pid)
            most = limits.most_processes(self.spec, self.host)
            self._commands = Commands(self._tree, walled=False, most_processes=most)
            self._lost = ""
            await in_thread(files.make, self._layout, self.workdir, self.spec.user)
        except OSError as exc:
            raise RuntimeFault(cannot("the instance cannot be entered", exc)) from exc

    async def alive(self) -> bool:
        if self._instance is None or not self._instance.alive:
            return False
        return await super().alive()

    async def snapshot(self, name: str) -> Snapshot:
        if self._lost:
            raise SandboxLost(f"no snapshot of it can be taken: {self._lost}")
        # The files are copied one after the other; nothing that runs may change them meanwhile.
        if not await self.end_background():
            raise RuntimeFault("no snapshot can be taken: something in the sandbox does not die")
        kept: Snapshot = await in_thread(Layers(self._store).keep, name, self.root / "overlay" / "upper", self._layers)
        return kept

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        store = store_of(host)
        return [] if store is None else await in_thread(Layers(store).all)

    @classmethod
    async def drop_snapshot(cls, reference: str, host: Host) -> None:
        if (store := store_of(host)) is not None:
            await in_thread(Layers(store).drop, reference)

    async def open_door(self, port: int) -> socket.socket:
        if self._lost or self._tree is None:
            raise SandboxLost(f"no door of it can be opened: {self._lost}")
        try:
            return await self._tree.door(port)
        except WardenLost:
            self._lost = self._lost or await self._why_lost(0)
            raise SandboxLost(f"no door of it can be opened: {self._lost}") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"port {port} of the sandbox's own network cannot be listened on", exc)) from exc

    async def end_background(self) -> bool:
        if self._lost or self._instance is None or self._tree is None or self._commands is None:
            return False
        self._commands.expect_kill()
        clean: bool = await in_thread(kill_within, self._instance.pid, {self._tree.warden_pid})
        return clean

    async def stop(self) -> None:
        await uninterrupted(self._stop())

    async def _stop(self) -> None:
        await self._starting.end()
        self._lost = self._lost or "it was stopped"
        clean = True
        if self._files is not None:
            self._files.close()
        if self._instance is not None:
            clean = await self._instance.stop()
        if self._commands is not None:
            self._commands.close()
        if self._tree is not None:
            # Nothing can be left: its process namespace went with the instance.
            await self._tree.stop()
        for handle in self._held:
            os.close(handle)
        self._held = []
        try:
            if self._made:
                await in_thread(remove_tree, self.root)
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be removed", exc)) from exc
        if not clean:
            raise RuntimeFault(f"processes of instance {self._name} do not die")

    # --- commands

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
        if self._lost or self._commands is None or self._files is None or self._instance is None:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost)
        number = next(self._numbers)
        folder = str(PurePosixPath(self.workdir) / (cwd or ""))
        killed = out_of_memory_kills(self._instance.pid)
        try:
            who = await in_thread(self._files.user, user or str(os.geteuid()))
            argv = list(command) if not isinstance(command, str) else await self._files.script(number, command)
            fed = self.root / "run" / f"{number}.stdin" if stdin else None
            if fed is not None and stdin is not None:
                await in_thread(write_private, fed, stdin)
        except RuntimeFault as exc:
            return ExecResult(ExecKind.COULD_NOT_START, message=str(exc))
        except OSError as exc:
            return ExecResult(ExecKind.COULD_NOT_START, message=cannot("the command could not be brought in", exc))
        order = Order(
            argv,
            folder,
            {**environment.standard(who), **over(self._environment, {**self.spec.env, **(env or {})}), "PWD": folder},
            who.ids if os.geteuid() == 0 else None,
            fed,
            None if log is None else self.host_log_dir / log,
            max_output_bytes,
        )
        try:
            result = await self._commands.run(order, timeout_s)
        finally:
            if isinstance(command, str):
                await uninterrupted(self._files.remove_script(number))
        if result.kind is ExecKind.SANDBOX_LOST:
            self._lost = self._lost or await self._why_lost(killed)
            return replace(result, message=self._lost)
        if result.ok:
            return result
        told: ExecResult = await in_thread(with_memory, result, self._instance.pid, killed)
        return told

    async def _why_lost(self, killed: int) -> str:
        assert self._instance is not None
        if self._instance.alive:
            if await in_thread(out_of_memory_kills, self._instance.pid) > killed:
                return f"the process that its commands hang under was killed: {OUT_OF_MEMORY}"
            return "the process that its commands hang under was killed"
        return "its instance has ended"

    # --- files

    async def _transfer(
        self, what: str, progress: Progress, function: confined.Transfer, path: str, *args: object
    ) -> object:
        if self._lost or self._files is None:
            raise SandboxLost(f"{what} {path}: the sandbox was lost: {self._lost}")
        return await self._files.move(what, progress, function, str(PurePosixPath(self.workdir) / path), *args)

    # --- its parts

    def _make_folders(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True)
            self._made = True
            for folder in (self.root / "overlay", self.root / "run", self.root / "logs"):
                folder.mkdir(mode=0o700)
        except FileExistsError:
            raise RuntimeFault(f"{self.root} exists already; a sandbox's folder is never shared") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be made", exc)) from exc

    def _hold(self, snapshot: str) -> None:
        self._layers, self._held = Layers(self._store).use(snapshot)

    def _open(self, pid: int) -> InsideFiles:
        self._files = files = InsideFiles(pid)
        return files


async def _brought(spec: RuntimeSpec, host: Host, program: Program) -> Image:
    return await bring(spec.image, program, host.settings.apptainer.images_mb)


def store_of(host: Host) -> Path | None:
    return None if host.folder is None else Path(os.path.realpath(host.folder)) / "apptainer"
