"""Commands in a Harbor environment: each a folder that is brought in, and that inside.sh runs there."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polarq.contracts.rollout import ExecKind
from polarq.errors import RuntimeFault, SandboxLost
from polarq_worker.runtimes.base import ExecResult
from polarq_worker.runtimes.capture import LOG_CAP_BYTES
from polarq_worker.runtimes.harbor.environment import Environment, asking
from polarq_worker.runtimes.harbor.orders import decoded, result_of, write_order
from polarq_worker.runtimes.processes import uninterrupted

INSIDE = Path(__file__).with_name("inside.sh")
OWN_DIR = "/polar/run"
ANSWER_S = 120.0
"""How long the environment may take beyond the command's own time."""
KILL_S = 60.0
_Answer = dict[str, list[str]]
"""What inside.sh says: words by the first of their line."""


class Commands:
    """One environment's, which has been started. `scratch` and `logs` are folders of the host."""

    def __init__(self, environment: Environment, scratch: Path, logs: Path) -> None:
        self.lost = ""
        """Why nothing can be run any more."""
        self._environment = environment
        self._scratch = scratch
        self._logs = logs
        self._numbers = itertools.count(1)
        self._running: set[asyncio.Task[_Answer]] = set()

    def lose(self, why: str) -> None:
        self.lost = self.lost or why

    def close(self) -> None:
        """The environment is gone: nothing is waited for any more."""
        for running in self._running:
            running.cancel()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        where: str,
        env: Mapping[str, str],
        user: str | None,
        stdin: bytes | None,
        timeout_s: float,
        log: str | None,
        max_output_bytes: int,
    ) -> ExecResult:
        """`Runtime.exec`, with everything decided that a spec leaves open."""
        begun = time.monotonic()

        def lost() -> ExecResult:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self.lost, duration_s=time.monotonic() - begun)

        if self.lost:
            return lost()
        token = secrets.token_hex(8)
        folder = f"{OWN_DIR}/{next(self._numbers)}.{token}"
        order = write_order(self._scratch / token, command, env, stdin)
        limits = [str(int(timeout_s * 1000)), str(max(max_output_bytes // 2, 1))]
        runs = shlex.join(["bash", f"{OWN_DIR}/inside.sh", "run", folder, token, *limits, where])
        work = asyncio.ensure_future(self._ran(order, folder, runs, timeout_s, user))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            answer = await asyncio.shield(work)
            named = command if isinstance(command, str) else command[0]
            result = result_of(answer, time.monotonic() - begun, where, named)
            if log is not None:
                await self._keep_log(answer, self._logs / log)
            return result
        except asyncio.CancelledError:
            if self.lost:
                return lost()
            await uninterrupted(self._kill(token, work))
            raise
        except RuntimeFault as exc:
            await self._look(exc)
            if self.lost:
                return lost()
            return ExecResult(ExecKind.COULD_NOT_START, message=str(exc), duration_s=time.monotonic() - begun)
        finally:
            await asyncio.to_thread(shutil.rmtree, order, True)

    async def shell(self, command: str, what: str) -> str:
        """Runs a command of ours as the environment's own user. Raises `RuntimeFault` when it fails."""
        if self.lost:
            raise SandboxLost(f"{what}: the sandbox was lost: {self.lost}")
        async with asking(what):
            ran = await self._environment.exec(command, cwd="/", timeout_sec=int(ANSWER_S))
        if ran.return_code != 0:
            said = (ran.stdout or "").strip().splitlines()
            raise RuntimeFault(f"{what}: {said[-1] if said else f'exit code {ran.return_code}'}")
        return ran.stdout or ""

    async def _ran(self, order: Path, folder: str, runs: str, timeout_s: float, user: str | None) -> _Answer:
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
            await self.shell("true", "the sandbox does not answer")
        except RuntimeFault:
            self.lose(str(failed))

    async def _kill(self, token: str, work: asyncio.Task[_Answer]) -> None:
        try:
            async with asking("the command could not be killed"):
                kill = f"bash {OWN_DIR}/inside.sh kill {token}"
                await self._environment.exec(kill, cwd="/", timeout_sec=int(KILL_S))
        except RuntimeFault as exc:
            self.lose(f"a cancelled command may still run: {exc}")
        await asyncio.wait([work], timeout=KILL_S)
        work.cancel()

    async def _keep_log(self, answer: _Answer, stem: Path) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for stream, name in (("out", "stdout"), ("err", "stderr")):
            target = stem.with_name(f"{stem.name}.{name}")
            size, head, tail = answer.get(stream, ["0", "-", "-"])
            if tail == "-":
                target.write_bytes(decoded(head))
                continue
            kept = f"{answer['kept'][0]}/{stream}"
            if int(size) > LOG_CAP_BYTES:
                await self.shell(f"truncate -s {LOG_CAP_BYTES} {kept}", "the log cannot be cut")
            async with asking(f"the log {target} cannot be fetched"):
                await self._environment.download_file(kept, target)
