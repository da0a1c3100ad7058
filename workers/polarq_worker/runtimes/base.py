"""What a sandbox is to the rest of the worker: the contract that every backend fulfils.

`polarq.testing.runtime_contract.RuntimeContract` is the same contract as tests.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from polarq.contracts.rollout import ExecKind, StepReport
from polarq.contracts.sandbox import ExecCategory, Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.runtimes.exec_times import ExecTimes
from polarq_worker.runtimes.fetched import Fetched

SESSION_DIR = "/polar/session"
"""Where a session lies in a sandbox. `local` has no file system of its own and maps it into the rollout's folder."""
SCRATCH_DIR = ".polarq"
"""Below the session directory: what polarq itself puts there, and no evaluator takes for the agent's work."""
TAIL_CHARS = 4000
ALIVE_S = 5.0


@dataclass(frozen=True, slots=True)
class SandboxLayout:
    """Absolute paths as seen inside the sandbox."""

    session_dir: str
    artifacts_dir: str
    logs_dir: str
    agent_log_dir: str
    eval_log_dir: str

    @classmethod
    def below(cls, session_dir: str) -> SandboxLayout:
        logs = f"{session_dir}/logs"
        return cls(session_dir, f"{session_dir}/artifacts", logs, f"{logs}/agent", f"{logs}/eval")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended, and what it printed.

    `exit_code` goes with EXITED, `signal` with SIGNALLED; the others have neither. Of each stream the first and last
    bytes are kept (whatever the kind: a timeout keeps them too); `stdout_bytes` and `stderr_bytes` are the real sizes.
    """

    kind: ExecKind
    exit_code: int | None = None
    signal: int | None = None
    duration_s: float = 0.0
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    message: str = ""
    out_of_memory: bool = False
    """The kernel killed something of the sandbox meanwhile because its memory was used up."""

    @property
    def ok(self) -> bool:
        return self.kind is ExecKind.EXITED and self.exit_code == 0

    @property
    def stdout_text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    @property
    def why(self) -> str:
        """One line: how it ended, and the last line it printed to stderr."""
        how = {
            ExecKind.EXITED: f"exit code {self.exit_code}",
            ExecKind.SIGNALLED: f"killed by signal {self.signal}",
            ExecKind.TIMED_OUT: f"timed out after {self.duration_s:.1f} s",
            ExecKind.CANCELLED: "cancelled",
            ExecKind.COULD_NOT_START: "could not start",
            ExecKind.SANDBOX_LOST: "the sandbox was lost",
        }[self.kind]
        lines = [line.strip() for line in self.stderr_text[-TAIL_CHARS:].splitlines() if line.strip()]
        return ": ".join([how, *([self.message] if self.message else []), *(lines[-1:] if not self.ok else [])])

    def report(self, log: str | None = None) -> StepReport:
        return StepReport(
            kind=self.kind,
            exit_code=self.exit_code,
            signal=self.signal,
            duration_s=self.duration_s,
            stdout_tail=self.stdout_text[-TAIL_CHARS:],
            stderr_tail=self.stderr_text[-TAIL_CHARS:],
            truncated=self.truncated or max(len(self.stdout_text), len(self.stderr_text)) > TAIL_CHARS,
            log=log,
            message=self.message,
            out_of_memory=self.out_of_memory,
        )


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that sandboxes are started on, as its node is set up."""

    node_id: str = ""
    incarnation: str = ""
    """The worker; backends label what they start with both."""
    folder: Path | None = None
    """Where backends keep what outlives a sandbox (snapshots, converted images), each in a folder of its own name.
    None: nothing outlives one."""
    settings: RuntimesSection = field(default_factory=RuntimesSection)
    private: tuple[Path, ...] = ()
    """Folders of polarq's own (its state folder), of which no sandbox sees anything."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a recipe left on disk, kept to start from."""

    name: str
    """As it was asked for: a recipe's hash."""
    reference: str
    """What the backend finds it by."""
    size_bytes: int


class Runtime(abc.ABC):
    """One sandbox. `root` is its private folder on the host: created by `start`, removed by `stop`, shared with nobody.

    Paths: an absolute path is one inside the sandbox; a relative one is below `spec.workdir`, or the session directory
    where the task names none. All methods may be called concurrently.
    """

    reach: ClassVar[Reach] = Reach.WORKER
    """From where a sandbox can be stopped when its worker is dead. One that outlives its worker has a record in the
    ledger from before `start` until after `stop`, and needs `stop_orphan`."""

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        self.spec = spec
        self.runtime_id = runtime_id
        self.root = root
        self.host = host or Host()
        self.exec_times = ExecTimes()

    # --- what a backend can do

    @classmethod
    @abc.abstractmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        """What the task asks for and this backend cannot give: one line each, with the key. Empty: it can run."""

    @classmethod
    def keeps_offline(cls, host: Host) -> bool:
        """Whether `start(online=False)` really cuts sandboxes off, and `open_door` works."""
        return False

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        """Whether `snapshot` works, and `start` from one."""
        return False

    @classmethod
    async def resolve_image(cls, spec: RuntimeSpec, host: Host) -> str:
        """What the image's name stands for here and now: a digest, for which the image is brought to the machine where
        `start` would do that. Empty: nothing better than its name is known. Raises `RuntimeFault`."""
        return ""

    @classmethod
    def machine_path(cls, spec: RuntimeSpec) -> str:
        """PATH of sandboxes that have the machine's own programs in place of an image's; empty: they have an image."""
        return ""

    @property
    def isolation(self) -> str:
        """What keeps it apart from the machine, a few words for the record: `bubblewrap`, `container`, `none`."""
        return "none"

    @property
    def image_id(self) -> str:
        """The digest of the image it runs, once started; empty where there is none."""
        return ""

    # --- when its worker is gone

    @property
    def handle(self) -> str:
        """What `stop_orphan` finds the sandbox by. Known before `start`: a name that the backend lets one choose."""
        return self.runtime_id

    @classmethod
    async def stop_orphan(cls, record: SandboxRecord) -> None:
        """Stops a sandbox of a worker that is dead; no harm when it is gone already, or never came to be. Called on the
        machine that it runs on, or, with a `reach` of ANYWHERE, on any. Raises `RuntimeFault`."""
        raise RuntimeFault(f"runtime '{record.runtime}' cannot stop a sandbox whose worker is dead")

    @classmethod
    async def sweep(cls, host: Host, keep: Collection[str]) -> list[str]:
        """Stops and removes whatever carries the label of `host.node_id` and is none of the runtime ids in `keep`, also
        what no record tells of; answers their ids. Called at a worker's start, when its predecessors are dead, and now
        and then. Raises `RuntimeFault`."""
        return []

    # --- its life

    @property
    @abc.abstractmethod
    def layout(self) -> SandboxLayout:
        """Where things lie, as programs in the sandbox see it."""

    @property
    @abc.abstractmethod
    def host_log_dir(self) -> Path:
        """Where logs of commands lie on the host, out of the sandbox's own view where the backend can give that."""

    @property
    def workdir(self) -> str:
        """Where commands run that name no folder."""
        return self.spec.workdir or self.layout.session_dir

    @abc.abstractmethod
    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        """Raises `RuntimeFault`. What was begun is undone by `stop`, which must be called in any case.

        `snapshot` is a `Snapshot.reference` of the same backend and spec: files are as they were, and nothing runs.
        Not `online`: a network of its own with nothing in it but loopback, where `keeps_offline`.
        """

    async def alive(self) -> bool:
        """Whether it can still run commands, looked at cheaply: for one that has waited."""
        return (await self.exec(["true"], timeout_s=ALIVE_S)).ok

    async def snapshot(self, name: str) -> Snapshot:
        """Keeps its files as they are at one moment, whole or not at all, under `host.folder` or in the backend's own
        store. Whatever runs in it stands still meanwhile (docker) or is ended first (local, apptainer); its owner stops
        it afterwards. Raises `CannotBeKept` where its files hold for this sandbox alone, and `RuntimeFault`."""
        raise RuntimeFault(f"runtime '{self.spec.backend}' takes no snapshots")

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        """Those that this machine has, also of earlier workers. Raises `RuntimeFault`."""
        return []

    @classmethod
    async def drop_snapshot(cls, reference: str, host: Host) -> None:
        """No harm when it is gone. Sandboxes that were started from it go on. Raises `RuntimeFault`."""
        raise RuntimeFault(f"{cls.__name__} takes no snapshots")

    async def open_door(self, port: int) -> socket.socket:
        """A socket that listens on 127.0.0.1:`port` of the sandbox's own network, held by the caller outside: what
        connects to it in the sandbox is accepted here. Raises `RuntimeFault`."""
        raise RuntimeFault(f"runtime '{self.spec.backend}' has no way out of an offline sandbox")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float,
        log: str | None = None,
        max_output_bytes: int = 1 << 20,
        category: ExecCategory = ExecCategory.OTHER,
    ) -> ExecResult:
        """Runs a command to its end; says how it ended, and raises nothing but a cancellation, which kills it first.

        A text is a script for `bash -o pipefail`, brought as a file: its size is not limited by an argument list. A
        list is an argv. The environment is the backend's clean one, then `spec.env`, then `env`; nothing of the
        worker's own. Without `stdin` it reads end-of-file at once. `timeout_s` kills the command with all that
        descends from it. A command that ends leaves its background processes alive until `stop`. `log` is a stem:
        the whole output (up to a cap) goes to `<host_log_dir>/<log>.stdout` and `.stderr`; in the result, each stream
        keeps at most about `max_output_bytes`, half from its beginning and half from its end. `user` is a name or
        number of the sandbox; None: `spec.user`, else the backend's own. `category` is what the command is for, for
        `exec_times`.
        """
        with self.exec_times.of(category) as ended:
            result = await self._exec(
                command,
                cwd=cwd,
                env=env,
                user=user or self.spec.user,
                stdin=stdin,
                timeout_s=timeout_s,
                log=log,
                max_output_bytes=max_output_bytes,
            )
            ended(result.kind, result.ok)
        if result.out_of_memory and not result.ok:
            self.exec_times.out_of_memory.add(category)
        return result

    @abc.abstractmethod
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
        """`exec`, as the backend does it."""

    @abc.abstractmethod
    async def put_file(self, source: Path, target: str) -> None:
        """Brings a host file in, with its permission bits. Missing folders are made. Raises `RuntimeFault`."""

    @abc.abstractmethod
    async def put_dir(self, source: Path, target: str) -> None:
        """Brings a host folder in; an existing target is replaced, not merged into. Raises `RuntimeFault`."""

    @abc.abstractmethod
    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None:
        """Writes a file whole or not at all. Raises `RuntimeFault`."""

    @abc.abstractmethod
    async def get_file(self, source: str, target: Path, max_bytes: int) -> None:
        """Fetches a regular file. Raises `RuntimeFault` when it is missing, something else, or larger."""

    @abc.abstractmethod
    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Fetched:
        """Fetches a folder: regular files (never setuid), folders, and links that stay inside. What else is in it, and
        a file beyond `max_bytes`, is left out and named in the answer. Raises `RuntimeFault`; beyond `max_files`
        entries `TooMany`, with whole files in `target` as far as it got."""

    async def end_background(self) -> bool:
        """Kills whatever its commands have left running, and goes on: what is read from it then is changed by nobody.
        Whether it did; False where the backend has no such way."""
        return False

    @abc.abstractmethod
    async def stop(self) -> None:
        """Kills every process of the sandbox and removes `root`, logs included. May be called again; raises
        `RuntimeFault` when something could not be killed or removed."""
