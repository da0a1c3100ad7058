"""What a sandbox is to the rest of the worker: the contract that every backend fulfils.

`polarq.testing.runtime_contract.RuntimeContract` is the same contract as tests.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from polarq.contracts.rollout import ExecKind, StepReport
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault

SESSION_DIR = "/polar/session"
"""Where a session lies in a sandbox. `local` has no file system of its own and maps it into the rollout's folder."""
SCRATCH_DIR = ".polarq"
"""Below the session directory: what polarq itself puts there, and no evaluator takes for the agent's work."""
TAIL_CHARS = 4000


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
        )


class Runtime(abc.ABC):
    """One sandbox. `root` is its private folder on the host: created by `start`, removed by `stop`, shared with nobody.

    Paths: an absolute path is one inside the sandbox; a relative one is below `spec.workdir`, or the session directory
    where the task names none. All methods may be called concurrently.
    """

    reach: ClassVar[Reach] = Reach.WORKER
    """From where a sandbox can be stopped when its worker is dead. One that outlives its worker has a record in the
    ledger from before `start` until after `stop`, and needs `stop_orphan`."""

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path) -> None:
        self.spec = spec
        self.runtime_id = runtime_id
        self.root = root

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
    @abc.abstractmethod
    def problems(cls, spec: RuntimeSpec) -> list[str]:
        """What the task asks for and this backend cannot give: one line each, with the key. Empty: it can run."""

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
    async def start(self) -> None:
        """Raises `RuntimeFault`. What was begun is undone by `stop`, which must be called in any case."""

    @abc.abstractmethod
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
        """Runs a command to its end; says how it ended, and raises nothing but a cancellation, which kills it first.

        A text is a script for `bash -o pipefail`, brought as a file: its size is not limited by an argument list. A
        list is an argv. The environment is the backend's clean one, then `spec.env`, then `env`; nothing of the
        worker's own. Without `stdin` it reads end-of-file at once. `timeout_s` kills the command with all that
        descends from it. A command that ends leaves its background processes alive until `stop`. `log` is a stem:
        the whole output (up to a cap) goes to `<host_log_dir>/<log>.stdout` and `.stderr`; in the result, each stream
        keeps at most about `max_output_bytes`, half from its beginning and half from its end.
        """

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
    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> None:
        """Fetches a folder's regular files; links and special files are left out. Raises `RuntimeFault`."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Kills every process of the sandbox and removes `root`, logs included. May be called again; raises
        `RuntimeFault` when something could not be killed or removed."""
