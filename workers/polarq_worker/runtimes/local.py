"""Runtime `local`: a private folder of the node itself, and every process in it under one warden.

It isolates processes, files by convention, and the environment; not the file system, users, network or hardware. It is
for trusted harnesses, tests and machines without containers. Linux only.

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
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq_worker.runtimes import confined, strays
from polarq_worker.runtimes.base import ExecResult, Runtime, SandboxLayout
from polarq_worker.runtimes.capture import Capture
from polarq_worker.runtimes.confined import Progress
from polarq_worker.runtimes.folder import PrivateFolder, in_thread, write_private
from polarq_worker.runtimes.processes import (
    Command,
    CouldNotStart,
    Descriptors,
    ProcessTree,
    WardenLost,
    uninterrupted,
)
from polarq_worker.runtimes.texts import cannot, could_not_start

DRAIN_S = 0.25
"""How long output is waited for when a command has ended but something it left behind holds its pipe."""
HOST_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")
"""All that a sandbox sees of the worker's environment, with PATH."""


class LocalRuntime(Runtime):
    """See the module's text."""

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path) -> None:
        self._folder = PrivateFolder(root, spec.workdir)
        super().__init__(spec, runtime_id=runtime_id, root=self._folder.root)
        self._tree: ProcessTree | None = None
        self._numbers = itertools.count(1)
        self._commands: set[Command] = set()
        self._captures: set[Capture] = set()
        self._lost = "it was not started"
        self._damaged = False
        """A warden or keeper died unasked, so not all processes may be under one."""

    @classmethod
    def problems(cls, spec: RuntimeSpec) -> list[str]:
        no = "the local runtime cannot"
        wishes: list[tuple[bool, str]] = [
            (bool(spec.image.strip()), f"image: {no} run an image; leave it out or choose another backend"),
            (spec.cpus is not None, f"cpus: {no} limit processors"),
            (spec.memory_mb is not None, f"memory_mb: {no} limit memory"),
            (spec.storage_mb is not None, f"storage_mb: {no} limit storage"),
            (spec.gpus > 0, f"gpus: {no} reserve GPUs; programs see those of the node"),
            (not spec.allow_internet, f"allow_internet: {no} keep programs off the network"),
            (spec.network not in {None, "", "host"}, f"network: {no} join network '{spec.network}'; only 'host'"),
            (bool(spec.internet_volumes), f"internet_volumes: {no} mount; name host paths directly"),
            (spec.direct_exec_init_command is not None, "direct_exec_init_command: is for the apptainer runtime only"),
        ]
        if spec.workdir is not None and ".." in PurePath(spec.workdir).parts:
            wishes.append((True, f"workdir: '{spec.workdir}' has '..' in it; give the path without"))
        wishes += [(True, f"kwargs.{key}: {no} use it") for key in sorted(spec.kwargs)]
        return [problem for wished, problem in wishes if wished]

    @property
    def layout(self) -> SandboxLayout:
        return self._folder.layout

    @property
    def host_log_dir(self) -> Path:
        return self._folder.logs

    @property
    def workdir(self) -> str:
        return str(self._folder.workdir)

    async def start(self) -> None:
        bash = shutil.which("bash", path=self._environment()["PATH"])
        if bash is None:
            raise RuntimeFault("there is no bash on this node; install it")
        self._bash = bash
        await self._folder.make()
        self._tree = ProcessTree(self._folder.run / "warden.stderr")
        await self._tree.start()
        self._lost = ""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        log: str | None = None,
        max_output_bytes: int = 1 << 20,
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
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                folder = self._folder.cwd(cwd)
                if isinstance(command, str):
                    script = self._folder.run / f"{next(self._numbers)}.sh"
                    await uninterrupted(in_thread(write_private, script, command.encode("utf-8", "surrogateescape")))
                    argv = [self._bash, "-o", "pipefail", str(script)]
                else:
                    argv = list(command)
                fed = await self._write_stdin(stdin) if stdin else None
                descriptors, outputs = self._open_streams(fed, log, max_output_bytes)
                running = await self._tree.run(argv, folder, self._env(env, folder), descriptors)
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
        except RuntimeFault as exc:
            kind, message = ExecKind.COULD_NOT_START, str(exc)
        except WardenLost:
            self._lose(f"its first process was killed; {self._tree.last_words()}".rstrip("; "))
            kind, message = ExecKind.SANDBOX_LOST, self._lost
        except OSError as exc:
            kind, message = ExecKind.COULD_NOT_START, cannot("the command could not be brought in", exc)
        finally:
            if script is not None:
                script.unlink(missing_ok=True)
        return await self._result(kind, code, message, outputs, begun)

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

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> None:
        progress = Progress(max_bytes=max_bytes, max_files=max_files)
        await self._transfer("fetch", progress, confined.get_dir, source, target, progress)

    async def stop(self) -> None:
        self._lost = self._lost or "it was stopped"
        await uninterrupted(self._stop())

    async def _stop(self) -> None:
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
        await self._folder.remove()
        if left:
            raise RuntimeFault(f"processes of sandbox {self.runtime_id} do not die; ps e shows its POLARQ_RUNTIME_ID")

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
            "HOME": str(self._folder.home),
            "TMPDIR": str(self._folder.tmp),
            "SHELL": "/bin/bash",
            # A folder that is no repository of its own must not pass for a part of one around the state folder.
            "GIT_CEILING_DIRECTORIES": str(self.root),
        }

    def _env(self, env: Mapping[str, str] | None, folder: str) -> dict[str, str]:
        marker = {"POLARQ_RUNTIME_ID": self.runtime_id, "PWD": folder}
        return {**self._environment(), **self.spec.env, **(env or {}), **marker}

    async def _write_stdin(self, data: bytes) -> Path:
        """A file, not a pipe: it is there whole, ends by itself, and nobody minds when it is not read."""
        path = self._folder.run / f"{next(self._numbers)}.stdin"
        try:
            await uninterrupted(in_thread(write_private, path, data))
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
    ) -> None:
        if self._lost:
            raise RuntimeFault(f"{what} {path}: the sandbox was lost: {self._lost}")
        await self._folder.transfer(what, progress, function, path, *args)
