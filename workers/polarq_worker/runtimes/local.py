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
import errno
import itertools
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from polarq import bubblewrap
from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.runtimes import confined, strays, walls, wishes
from polarq_worker.runtimes.base import ExecResult, Host, Runtime, SandboxLayout, Snapshot
from polarq_worker.runtimes.beginning import Beginning
from polarq_worker.runtimes.capture import Capture
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.fetched import Fetched
from polarq_worker.runtimes.folder import PrivateFolder, in_thread, write_private
from polarq_worker.runtimes.kept import Kept, Record
from polarq_worker.runtimes.processes import (
    Command,
    CouldNotStart,
    Descriptors,
    ProcessTree,
    WardenLost,
    uninterrupted,
)
from polarq_worker.runtimes.starting import Starting
from polarq_worker.runtimes.texts import cannot, could_not_start, fault

DRAIN_S = 0.25
"""How long output is waited for when a command has ended but something it left behind holds its pipe."""
HOST_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")
"""All that a sandbox sees of the worker's environment, with PATH."""


class LocalRuntime(Runtime):
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
        self._commands: set[Command] = set()
        self._captures: set[Capture] = set()
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
    def takes_snapshots(cls, host: Host) -> bool:
        return host.folder is not None

    @property
    def isolation(self) -> str:
        return "bubblewrap" if self._isolated else "none"

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
        bash = shutil.which("bash", path=self._environment()["PATH"])
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
        begun = time.monotonic()
        if not self._lost and not self.root.is_dir():
            self._lost = f"its folder {self.root} is gone"
        if self._lost or self._tree is None:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost)
        running: Command | None = None
        outputs: tuple[Capture, Capture] | None = None
        script: Path | None = None
        folder, argv = "", [""]
        kind, code, message = ExecKind.EXITED, 0, ""
        kills = self._memory_kills()
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                folder = self._folder.cwd(cwd)
                ids = wishes.ids_of(user, self._owner)
                if isinstance(command, str):
                    script = self._folder.run / f"{next(self._numbers)}.sh"
                    text = command.encode("utf-8", "surrogateescape")
                    await in_thread(write_private, script, text, 0o644 if self._isolated else 0o600)
                    argv = [self._bash, "-o", "pipefail", f"{self._folder.seen_run}/{script.name}"]
                else:
                    argv = list(command)
                fed = await self._write_stdin(stdin) if stdin else None
                descriptors, outputs = self._open_streams(fed, log, max_output_bytes)
                running = await self._tree.run(argv, folder, self._env(env, folder), descriptors, ids)
                self._commands.add(running)
                running.gone.add_done_callback(partial(self._forget_command, running))
                await running.started()
                code = await running.ended()
        except TimeoutError:
            kind = ExecKind.TIMED_OUT
            message = await self._kill(running)
        except asyncio.CancelledError:
            await uninterrupted(self._kill(running))
            self._forget(outputs)
            raise
        except CouldNotStart as exc:
            kind, message = ExecKind.COULD_NOT_START, could_not_start(exc, argv[0], folder)
            most = wishes.most_processes(self.spec, self.host, isolated=self._isolated)
            if exc.number == errno.EAGAIN and most is not None:
                message = f"the sandbox has as many processes as it may (max_processes: {most})"
        except RuntimeFault as exc:
            kind, message = ExecKind.COULD_NOT_START, str(exc)
        except WardenLost:
            kind, code, message = self._unwatched(running)
        except OSError as exc:
            kind, message = ExecKind.COULD_NOT_START, cannot("the command could not be brought in", exc)
        finally:
            if script is not None:
                script.unlink(missing_ok=True)
        result = await self._result(kind, code, message, outputs, begun)
        if self._memory_kills() > kills:
            why = f"out of memory: it may use {self.spec.memory_mb} MB (memory_mb)"
            result = replace(result, out_of_memory=True, message="; ".join(filter(None, (why, result.message))))
        return result

    async def put_file(self, source: Path, target: str) -> None:
        progress = Progress()
        await self._transfer("upload to", progress, confined.put_file, target, source, progress)

    async def put_dir(self, source: Path, target: str) -> None:
        progress = Progress()
        await self._transfer("upload to", progress, confined.put_dir, target, source, progress)

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        await self._transfer("write", Progress(), confined.put_bytes, target, data, mode)

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        progress = Progress(max_bytes=max_bytes)
        await self._transfer("fetch", progress, confined.get_file, source, target, progress)

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        progress = Progress(max_bytes=max_bytes, max_files=max_files)
        fetched: Fetched = await self._transfer("fetch", progress, confined.get_dir, source, target, progress)
        return fetched

    async def end_background(self) -> bool:
        if self._lost or self._tree is None:
            return False
        for command in self._commands:
            command.killed = True
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
        for command in list(self._commands):
            command.close()
        if self._tree is not None:
            clean = await self._tree.stop()
            if self._damaged or not clean:
                marker = (f"POLARQ_RUNTIME_ID={self.runtime_id}".encode(), os.fsencode(self.root))
                left = not await asyncio.to_thread(strays.kill, marker)
        for capture in self._captures:
            capture.close()
        self._captures.clear()
        if self._beginning is not None:
            left = not await self._beginning.undo() or left
        _living.pop(self._key, None)
        if left:
            raise RuntimeFault(f"processes of sandbox {self.runtime_id} do not die; ps e shows its POLARQ_RUNTIME_ID")

    def _unwatched(self, command: Command | None) -> tuple[ExecKind, int, str]:
        """How a command ended whose keeper is gone."""
        assert self._tree is not None
        if command is not None and command.killed and not self._lost:
            return ExecKind.EXITED, -signal.SIGKILL, "it was ended with all others"
        if self._isolated and not self._lost and not self._tree.hung_up():
            # Something of its own user killed the keeper; whatever is left cannot leave the namespaces.
            return ExecKind.EXITED, -signal.SIGKILL, "what watched over it was killed with it"
        self._lose(f"its first process was killed; {self._tree.last_words()}".rstrip("; "))
        return ExecKind.SANDBOX_LOST, 0, self._lost

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            self._damaged = True

    def _environment(self) -> dict[str, str]:
        """What a program starts with: no secret of the worker, no proxy of its network, a home of its own."""
        host = os.environ
        path = host.get("PATH") or os.defpath
        beside_python = str(Path(sys.executable).parent)
        if beside_python not in path.split(os.pathsep):
            # A worker run as .venv/bin/celery has the programs of its environment, activated or not.
            path = f"{beside_python}{os.pathsep}{path}"
        return {
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **{name: host[name] for name in HOST_VARIABLES if name in host},
            "PATH": path,
            "HOME": self._folder.seen_home,
            "TMPDIR": self._folder.seen_tmp,
            "SHELL": "/bin/bash",
            # A folder that is no repository of its own must not pass for a part of one around the state folder.
            "GIT_CEILING_DIRECTORIES": "/polar" if self._isolated else str(self.root),
            **({"USER": walls.USER_NAME, "LOGNAME": walls.USER_NAME} if self._isolated else {}),
        }

    def _env(self, env: Mapping[str, str] | None, folder: str) -> dict[str, str]:
        marker = {"POLARQ_RUNTIME_ID": self.runtime_id, "PWD": folder}
        return {**self._environment(), **self.spec.env, **(env or {}), **marker}

    async def _write_stdin(self, data: bytes) -> Path:
        """A file, not a pipe: it is there whole, ends by itself, and nobody minds when it is not read."""
        path = self._folder.run / f"{next(self._numbers)}.stdin"
        try:
            await in_thread(write_private, path, data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _open_streams(
        self, stdin: Path | None, log: str | None, limit: int
    ) -> tuple[Descriptors, tuple[Capture, Capture]]:
        opened: list[int] = []
        try:
            opened.append(os.open(stdin or os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.extend(os.pipe())
            opened.extend(os.pipe())
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        finally:
            if stdin is not None:
                stdin.unlink(missing_ok=True)
        standard_input, out, out_w, err, err_w = opened
        stem = None if log is None else self.host_log_dir / log
        captures = (
            Capture(out, limit, stem and stem.with_name(f"{stem.name}.stdout")),
            Capture(err, limit, stem and stem.with_name(f"{stem.name}.stderr")),
        )
        self._captures.update(captures)
        return Descriptors(standard_input, out_w, err_w), captures

    def _memory_kills(self) -> int:
        return 0 if self._beginning is None else self._beginning.memory_kills()

    async def _kill(self, command: Command | None) -> str:
        if command is None:
            return ""
        return "" if await uninterrupted(command.kill()) else "some of its processes have not died yet"

    def _forget_command(self, command: Command, _: object) -> None:
        self._commands.discard(command)

    def _forget(self, outputs: tuple[Capture, Capture] | None) -> None:
        for capture in outputs or ():
            capture.close()
            self._captures.discard(capture)

    async def _result(
        self, kind: ExecKind, code: int, message: str, outputs: tuple[Capture, Capture] | None, begun: float
    ) -> ExecResult:
        duration_s = time.monotonic() - begun
        if outputs is None:
            return ExecResult(kind, duration_s=duration_s, message=message)
        out, err = outputs
        try:
            async with asyncio.timeout(DRAIN_S):
                await out.finished.wait()
                await err.finished.wait()
        except TimeoutError:
            # Something the command left behind holds the pipe; the captures go on reading for it until stop().
            pass
        signalled = kind is ExecKind.EXITED and code < 0
        result = ExecResult(
            ExecKind.SIGNALLED if signalled else kind,
            exit_code=code if kind is ExecKind.EXITED and not signalled else None,
            signal=-code if signalled else None,
            duration_s=duration_s,
            stdout=out.value(),
            stderr=err.value(),
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            truncated=out.truncated or err.truncated,
            message="; ".join(text for text in (message, out.log_error, err.log_error) if text),
        )
        self._captures.difference_update([capture for capture in outputs if capture.finished.is_set()])
        return result

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
