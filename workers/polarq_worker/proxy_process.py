"""The node's proxy as a child process: started, watched, restarted on the same port, stopped by pid."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from pathlib import Path

from polarq.errors import PolarqError
from polarq_worker.network.model_door import ProxyAddress

log = logging.getLogger("polarq.worker.proxy")

_START_S = 60.0
_START_TRIES = 3
_STOP_S = 15.0
_RESTART_CAP_S = 10.0


class ProxyDidNotStart(PolarqError):
    """The proxy ended before it listened; its own last line says why."""


class _Killed(ProxyDidNotStart):
    """By a signal, which says nothing against it."""


class ProxyProcess:
    """`python -m polarq_proxy` for one node."""

    def __init__(self, node_id: str, topology_path: Path | None, state_dir: Path, redis_url: str | None = None) -> None:
        """`redis_url`: how the proxy reaches Redis, where that is not as the worker does."""
        self._node_id = node_id
        self._redis_url = redis_url
        self._topology_path = topology_path
        self.log_path = state_dir / "logs" / "proxy.log"
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._relay = f"polarq-{secrets.token_hex(16)}"
        self._stopping = False
        self.listening = asyncio.Event()
        """Set while it listens, as far as is known."""
        self.restarts = 0

    async def start(self) -> None:
        """Returns when the proxy listens. Raises `ProxyDidNotStart` with one line."""
        for left in reversed(range(_START_TRIES)):
            try:
                await self._spawn()
                break
            except _Killed as exc:
                if not left:
                    raise
                log.error("%s; starting it again", exc)
        self._watch = asyncio.create_task(self._keep_running(), name="proxy watch")

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def relay_address(self) -> ProxyAddress:
        """Where the worker's relay brings what offline sandboxes send: over TCP they would pass for this machine."""
        return ProxyAddress(path=f"\0{self._relay}")

    async def _spawn(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "polarq_proxy", "--node", self._node_id, "--parent-pid", str(os.getpid())]
        command += ["--relay", self._relay]
        if self._topology_path is not None:
            command += ["--topology", str(self._topology_path)]
        before = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as sink:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
                env=self._env(),
            )
        assert self._process.stdout is not None
        try:
            # The proxy prints one line when it listens; its end before that closes the pipe.
            async with asyncio.timeout(_START_S):
                ready = await self._process.stdout.readline()
        except TimeoutError:
            self._process.kill()
            raise ProxyDidNotStart(f"the proxy did not listen within {_START_S:g} s; see {self.log_path}") from None
        if not ready:
            code = await self._process.wait()
            if code < 0:
                raise _Killed(f"the proxy was killed by signal {-code} before it listened")
            raise ProxyDidNotStart(f"the proxy did not start: {self._last_line(before)}")
        self.listening.set()
        self._drain = asyncio.create_task(self._to_log(self._process.stdout), name="proxy output")

    def _env(self) -> dict[str, str]:
        """The worker's, but for the address of Redis: a proxy with rights of its own is not told the worker's."""
        env = dict(os.environ)
        if self._redis_url is not None:
            env["POLARQ_REDIS_URL"] = self._redis_url
            env.pop("POLARQ_PROXY_REDIS_URL", None)
        return env

    async def _to_log(self, stdout: asyncio.StreamReader) -> None:
        with self.log_path.open("ab") as sink:
            while chunk := await stdout.read(65536):
                sink.write(chunk)
                sink.flush()

    def _last_line(self, after: int) -> str:
        with self.log_path.open("rb") as source:
            source.seek(after)
            lines = [line for line in source.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it wrote nothing; see {self.log_path}"

    async def _keep_running(self) -> None:
        pause = 0.2
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self.listening.clear()
            if self._stopping:
                return
            self.restarts += 1
            log.error("the proxy ended with code %s; starting it again (log: %s)", code, self.log_path)
            try:
                await self._spawn()
                pause = 0.2
            except Exception as exc:
                log.error("the proxy did not start again, it is tried anew: %s: %s", type(exc).__name__, exc)
                await asyncio.sleep(pause)
                pause = min(_RESTART_CAP_S, pause * 2)

    async def stop(self) -> None:
        """SIGTERM, a deadline for calls in flight, then SIGKILL."""
        self._stopping = True
        if self._watch is not None:
            self._watch.cancel()
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            log.warning("the proxy did not stop within %g s; killing it", _STOP_S)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
