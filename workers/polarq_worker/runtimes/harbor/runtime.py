"""Runtime `harbor`: sandboxes of any environment that the package `harbor` knows (its Docker, Daytona, Modal, E2B,
Kubernetes, ...), for tasks like

    runtime: {backend: harbor, image: python:3.12, kwargs: {environment: daytona}}

Credentials are what that environment reads from the worker's own variables. Its exec gives one text at the end and no
way to end a command; the rest of our contract is done by a script inside (inside.sh), which needs bash, coreutils, tar
and setsid there. What cannot be had is a problem at submit, or said at `stop_orphan`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import secrets
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.runtimes.base import SESSION_DIR, ExecResult, Host, Runtime, SandboxLayout
from polarq_worker.runtimes.capture import LOG_CAP_BYTES
from polarq_worker.runtimes.fetched import Fetched
from polarq_worker.runtimes.harbor import environment
from polarq_worker.runtimes.harbor.environment import Environment, asking
from polarq_worker.runtimes.harbor.files import Transfers, mode_of
from polarq_worker.runtimes.harbor.orders import decoded, result_of, write_order
from polarq_worker.runtimes.processes import uninterrupted
from polarq_worker.runtimes.starting import Starting
from polarq_worker.runtimes.texts import cannot

INSIDE = Path(__file__).with_name("inside.sh")
OWN_DIR = "/polar/run"
ANSWER_S = 120.0
"""How long the environment may take beyond the command's own time."""
KILL_S = 60.0


class HarborRuntime(Runtime):
    """See the module's text."""

    reach = Reach.NODE

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        super().__init__(spec, runtime_id=runtime_id, root=Path(os.path.realpath(root)), host=host)
        # Of the folder too: two deployments on one machine may both have a node of that name.
        own = "\0".join((self.host.node_id, str(self.root), runtime_id))
        self._session = f"polarq-{hashlib.sha256(own.encode()).hexdigest()[:20]}"
        self._layout = SandboxLayout.below(SESSION_DIR)
        self._numbers = itertools.count(1)
        self._environment: Environment | None = None
        self._starting = Starting()
        self._running: set[asyncio.Task[dict[str, list[str]]]] = set()
        self._made = False
        self._lost = "it was not started"

    # --- what it can do

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        if why := environment.missing():
            return [f"backend: {why}"]
        no = "the harbor runtime cannot"
        named = spec.kwargs.get("environment")
        wishes: list[tuple[bool, str]] = [
            (
                named not in environment.names(),
                f"kwargs.environment: '{named}' is none of {', '.join(environment.names())}",
            ),
            (not spec.image.strip(), f"image: {no} start without one"),
            (spec.max_processes is not None, f"max_processes: {no} limit processes"),
            (spec.network not in {None, ""}, f"network: {no} join network '{spec.network}'; leave it out"),
            (bool(spec.internet_volumes), f"internet_volumes: {no} mount the node's folders"),
            (spec.direct_exec_init_command is not None, "direct_exec_init_command: is for Polar's apptainer only"),
            (
                spec.workdir is not None and (spec.workdir[0] != "/" or ".." in PurePosixPath(spec.workdir).parts),
                f"workdir: '{spec.workdir}' is no absolute path without '..'",
            ),
        ]
        keys = sorted(set(spec.kwargs) & environment.forbidden_keys() - {"environment"})
        return [line for wrong, line in wishes if wrong] + [f"kwargs.{key}: {no} let a task set it" for key in keys]

    @property
    def isolation(self) -> str:
        return f"harbor {self.spec.kwargs.get('environment', '')}".strip()

    # --- when its worker is gone

    @property
    def handle(self) -> str:
        return environment.handle_of(self.spec, self._session)

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        try:
            spec, session = environment.read_handle(record.handle)
        except (ValueError, KeyError, TypeError):
            raise RuntimeFault(f"'{record.handle}' is no handle of a harbor sandbox") from None
        kind = spec.kwargs["environment"]
        if why := environment.missing():
            raise RuntimeFault(f"harbor's {kind} {session} cannot be stopped: {why}")
        if kind not in environment.FROM_NAME:
            raise RuntimeFault(
                f"harbor's {kind} gives no way to stop a sandbox of a dead worker (session {session}); end it in its "
                "provider's console, or give it a lifetime there"
            )
        folder = Path(tempfile.mkdtemp(prefix="polarq-harbor-"))
        try:
            left = await asyncio.to_thread(environment.make, spec, session, folder)
            async with asking(f"harbor's {kind} {session} cannot be stopped"):
                await left.stop(delete=True)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    @classmethod
    async def sweep(cls, host: Host, keep: Collection[str]) -> list[str]:
        """Goes by what its own workers noted on this machine: Harbor lists nothing."""
        stopped = []
        for path in sorted(_notes(host).glob("*.json")) if host.folder is not None else []:
            try:
                note = SandboxRecord.model_validate_json(await asyncio.to_thread(path.read_text))
            except (OSError, ValueError):
                continue
            kind = environment.read_handle(note.handle)[0].kwargs["environment"]
            if note.node_id != host.node_id or note.runtime_id in keep or kind not in environment.FROM_NAME:
                continue
            await cls.stop_orphan(note)
            path.unlink(missing_ok=True)
            stopped.append(note.runtime_id)
        return stopped

    # --- its life

    @property
    def layout(self) -> SandboxLayout:
        return self._layout

    @property
    def host_log_dir(self) -> Path:
        return self.root / "logs"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        if snapshot is not None or not online:
            raise RuntimeFault("the harbor runtime keeps no snapshots and cuts no sandbox off")
        await self._starting.run(self._start())

    async def _start(self) -> None:
        await uninterrupted(asyncio.to_thread(self._make_folders))
        made = await asyncio.to_thread(environment.make, self.spec, self._session, self.root)
        self._environment = made
        await uninterrupted(asyncio.to_thread(self._write_note))
        async with asking("the sandbox cannot be started"):
            await made.start(False)
        self._lost = ""
        own = [getattr(self._layout, f"{name}_dir") for name in ("session", "artifacts", "agent_log", "eval_log")]
        folders = shlex.join([*own, self.workdir])
        given = f" && chown {shlex.quote(self.spec.user)} {shlex.join(own)}" if self.spec.user else ""
        await self._shell(
            f"mkdir -p {OWN_DIR} {folders} && chmod 1777 {OWN_DIR} && command -v bash setsid tar base64{given}",
            "the image has not all of bash, setsid, tar and base64, or is not to be written by its user",
        )
        async with asking("the sandbox cannot be started"):
            await made.upload_file(INSIDE, f"{OWN_DIR}/inside.sh")
        await self._shell(f"chmod 644 {OWN_DIR}/inside.sh", "the sandbox cannot be started")

    async def stop(self) -> None:
        await uninterrupted(self._stop())

    async def _stop(self) -> None:
        await self._starting.end()
        self._lost = self._lost or "it was stopped"
        made, self._environment = self._environment, None
        try:
            if made is not None:
                async with asking("the sandbox cannot be stopped"):
                    await made.stop(delete=True)
        except RuntimeFault:
            self._environment = made
            raise
        for running in self._running:
            running.cancel()
        if self.host.folder is not None:
            self._note_path.unlink(missing_ok=True)
        if self._made:
            await asyncio.to_thread(shutil.rmtree, self.root, True)

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
        begun = time.monotonic()
        if self._lost or self._environment is None:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost)
        token = secrets.token_hex(8)
        folder = f"{OWN_DIR}/{next(self._numbers)}.{token}"
        where = str(PurePosixPath(self.workdir) / (cwd or ""))
        order = write_order(self.root / "run" / token, command, {**self.spec.env, **(env or {}), "PWD": where}, stdin)
        half = max(max_output_bytes // 2, 1)
        runs = shlex.join(
            ["bash", f"{OWN_DIR}/inside.sh", "run", folder, token, str(int(timeout_s * 1000)), str(half), where]
        )
        work = asyncio.ensure_future(self._ran(order, folder, runs, timeout_s, user))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            answer = await asyncio.shield(work)
            named = command if isinstance(command, str) else command[0]
            result = result_of(answer, time.monotonic() - begun, where, named)
            if log is not None:
                await self._keep_log(answer, log)
            return result
        except asyncio.CancelledError:
            if self._lost:
                return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost, duration_s=time.monotonic() - begun)
            await uninterrupted(self._kill(token, work))
            raise
        except RuntimeFault as exc:
            await self._look(exc)
            if self._lost:
                return ExecResult(ExecKind.SANDBOX_LOST, message=self._lost, duration_s=time.monotonic() - begun)
            return ExecResult(ExecKind.COULD_NOT_START, message=str(exc), duration_s=time.monotonic() - begun)
        finally:
            await asyncio.to_thread(shutil.rmtree, order, True)

    async def _ran(
        self, order: Path, folder: str, runs: str, timeout_s: float, user: str | None
    ) -> dict[str, list[str]]:
        assert self._environment is not None
        async with asking("the command could not be run"):
            await self._environment.upload_dir(order, folder)
            limit = int(timeout_s + ANSWER_S)
            ran = await self._environment.exec(f"chmod -R a+rX {folder}; {runs}", cwd="/", timeout_sec=limit, user=user)
        lines = (line.split() for line in (ran.stdout or "").splitlines())
        answer = {words[0]: words[1:] for words in lines if words}
        if "polarq" not in answer:
            said = " ".join((ran.stdout or "").split())[-200:]
            raise RuntimeFault(f"the sandbox ran no command: exit code {ran.return_code}: {said}")
        return answer

    async def _look(self, failed: RuntimeFault) -> None:
        """Whether it is there at all."""
        try:
            await self._shell("true", "the sandbox does not answer")
        except RuntimeFault:
            self._lost = self._lost or str(failed)

    async def _kill(self, token: str, work: asyncio.Task[dict[str, list[str]]]) -> None:
        try:
            if self._environment is not None:
                async with asking("the command could not be killed"):
                    kill = f"bash {OWN_DIR}/inside.sh kill {token}"
                    await self._environment.exec(kill, cwd="/", timeout_sec=int(KILL_S))
        except RuntimeFault as exc:
            self._lost = self._lost or f"a cancelled command may still run: {exc}"
        await asyncio.wait([work], timeout=KILL_S)
        work.cancel()

    async def _keep_log(self, answer: dict[str, list[str]], log: str) -> None:
        assert self._environment is not None
        stem = self.host_log_dir / log
        stem.parent.mkdir(parents=True, exist_ok=True)
        for stream, name in (("out", "stdout"), ("err", "stderr")):
            target = stem.with_name(f"{stem.name}.{name}")
            size, head, tail = answer.get(stream, ["0", "-", "-"])
            if tail == "-":
                target.write_bytes(decoded(head))
                continue
            kept = f"{answer['kept'][0]}/{stream}"
            if int(size) > LOG_CAP_BYTES:
                await self._shell(f"truncate -s {LOG_CAP_BYTES} {kept}", "the log cannot be cut")
            async with asking(f"the log {target} cannot be fetched"):
                await self._environment.download_file(kept, target)

    async def _shell(self, command: str, what: str) -> str:
        """Runs a command of ours as the environment's own user. Raises `RuntimeFault` when it fails."""
        if self._environment is None or self._lost:
            raise SandboxLost(f"{what}: the sandbox was lost: {self._lost}")
        async with asking(what):
            ran = await self._environment.exec(command, cwd="/", timeout_sec=int(ANSWER_S))
        if ran.return_code != 0:
            said = (ran.stdout or "").strip().splitlines()
            raise RuntimeFault(f"{what}: {said[-1] if said else f'exit code {ran.return_code}'}")
        return ran.stdout or ""

    # --- files

    async def put_file(self, source: Path, target: str) -> None:
        what, moved = self._moves("upload to", target)
        try:
            mode = mode_of(source)
        except OSError as exc:
            raise RuntimeFault(cannot(what, exc)) from exc
        await moved.put_file(source, self._path(target), mode, what)

    async def put_dir(self, source: Path, target: str) -> None:
        what, moved = self._moves("upload to", target)
        await moved.put_dir(source, self._path(target), what)

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        what, moved = self._moves("write", target)
        await moved.put_bytes(data, self._path(target), mode, what)

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        what, moved = self._moves("fetch", source)
        await moved.get_file(self._path(source), target, max_bytes, what)

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        what, moved = self._moves("fetch", source)
        return await moved.get_dir(self._path(source), target, max_bytes, max_files, what)

    def _moves(self, verb: str, path: str) -> tuple[str, Transfers]:
        what = f"{verb} {path}"
        if self._lost or self._environment is None:
            raise SandboxLost(f"{what}: the sandbox was lost: {self._lost}")
        return what, Transfers(self._environment, self._shell, OWN_DIR, self.root / "run")

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self.workdir) / path)

    @property
    def _note_path(self) -> Path:
        return _notes(self.host) / f"{self._session}.json"

    def _write_note(self) -> None:
        if self.host.folder is None:
            return
        note = SandboxRecord(
            runtime="harbor",
            runtime_id=self.runtime_id,
            handle=self.handle,
            reach=self.reach,
            node_id=self.host.node_id,
            incarnation=self.host.incarnation,
            hostname=socket.gethostname(),
        )
        try:
            self._note_path.parent.mkdir(parents=True, exist_ok=True)
            self._note_path.write_text(note.model_dump_json())
        except OSError as exc:
            raise RuntimeFault(cannot("the sandbox cannot be noted", exc)) from exc

    def _make_folders(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True)
            self._made = True
            for name in ("run", "logs"):
                (self.root / name).mkdir()
        except FileExistsError:
            raise RuntimeFault(f"{self.root} exists already; a sandbox's folder is never shared") from None
        except OSError as exc:
            raise RuntimeFault(cannot(f"the sandbox's folder {self.root} cannot be made", exc)) from exc


def _notes(host: Host) -> Path:
    assert host.folder is not None
    return host.folder / "harbor"
