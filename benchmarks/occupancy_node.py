"""A clock that jumps, and sandboxes that only take their time: the node of `occupancy.py`."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq_worker.runtimes.base import ExecResult, Host, Runtime, SandboxLayout, Snapshot

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: what there is to wait for is the next timer."""

    jump: Callable[[float], None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits and nothing is due: the simulation has come to a stop")
        self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while all wait, and then at once."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        selector.jump = self._jump
        super().__init__(selector)

    def _jump(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """At once: what a thread does takes no time here."""
        done: asyncio.Future[T] = self.create_future()
        done.set_result(function(*args))
        return done


class SimulatedRuntime(Runtime):
    """`spec.env` says how long its start takes, and keeping it; a command is the seconds that it takes."""

    alive_now: ClassVar[int] = 0
    most_alive: ClassVar[int] = 0
    alive_s: ClassVar[float] = 0.0
    prepared: ClassVar[int] = 0
    _kept: ClassVar[dict[str, Snapshot]] = {}

    def __init__(self, spec: RuntimeSpec, *, runtime_id: str, root: Path, host: Host | None = None) -> None:
        super().__init__(spec, runtime_id=runtime_id, root=root, host=host)
        self._began: float | None = None

    @classmethod
    def problems(cls, spec: RuntimeSpec, host: Host) -> list[str]:
        return []

    @classmethod
    def takes_snapshots(cls, host: Host) -> bool:
        return True

    @property
    def layout(self) -> SandboxLayout:
        return SandboxLayout.below("/polar/session")

    @property
    def host_log_dir(self) -> Path:
        return self.root / "logs"

    async def start(self, *, snapshot: str | None = None, online: bool = True) -> None:
        self._began = asyncio.get_running_loop().time()
        cls = type(self)
        cls.alive_now += 1
        cls.most_alive = max(cls.most_alive, cls.alive_now)
        await asyncio.sleep(float(self.spec.env["from_snapshot_s" if snapshot else "start_s"]))

    async def alive(self) -> bool:
        return True

    async def snapshot(self, name: str) -> Snapshot:
        await asyncio.sleep(float(self.spec.env["keep_s"]))
        return self._kept.setdefault(name, Snapshot(name, name, 1))

    @classmethod
    async def snapshots(cls, host: Host) -> list[Snapshot]:
        return list(cls._kept.values())

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
        type(self).prepared += 1
        await asyncio.sleep(float(str(command)))
        return ExecResult(ExecKind.EXITED, exit_code=0)

    async def put_file(self, source: Path, target: str) -> None: ...

    async def put_dir(self, source: Path, target: str) -> None: ...

    async def put_bytes(self, data: bytes, target: str, mode: int = 0o644) -> None: ...

    async def get_file(self, source: str, target: Path, max_bytes: int) -> None: ...

    async def get_dir(self, source: str, target: Path, max_bytes: int, max_files: int) -> Any: ...

    async def stop(self) -> None:
        if self._began is not None:
            cls = type(self)
            cls.alive_now -= 1
            cls.alive_s += asyncio.get_running_loop().time() - self._began
            self._began = None

    @classmethod
    def forget(cls) -> None:
        """For the next simulation."""
        cls.alive_now = cls.most_alive = cls.prepared = 0
        cls.alive_s = 0.0
        cls._kept = {}
