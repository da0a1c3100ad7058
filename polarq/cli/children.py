"""Programs that the demo starts: each logs to a file, is watched while it starts, and is stopped by its process id."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

from polarq.errors import PolarqError

T = TypeVar("T")

STEP_S = 0.02
TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


class ChildFailed(PolarqError):
    """A program ended, or did not become ready in time. `log` is where it wrote, `last_lines` how that ends."""

    def __init__(self, message: str, log: Path, last_lines: Sequence[str]) -> None:
        self.log = log
        self.last_lines = tuple(last_lines)
        super().__init__(message)


class Child:
    """One program, in a session of its own: Ctrl-C reaches only its starter, which stops it in its own order."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, *, env: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.log = log
        self._env = dict(env)
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> Self:
        """Starts the program. Raises `ChildFailed` when there is no such program."""
        with self.log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    cwd=self._cwd,
                    start_new_session=True,
                    preexec_fn=_dying_with_parent(),  # noqa: PLW1509
                )
            except OSError as exc:
                raise ChildFailed(f"cannot start {self.argv[0]}: {exc.strerror}", self.log, ()) from None
        return self

    def wait_until(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """What `ready` answers first. Raises `ChildFailed` when the program ends or the time is over before."""
        process = self._process
        assert process is not None
        deadline = time.monotonic() + timeout_s
        while (answer := ready()) is None:
            try:
                code = process.wait(STEP_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise self._failed(f"{self.name} was not ready within {timeout_s:g} s") from None
            else:
                how = f"with code {code}" if code >= 0 else f"by signal {-code}"
                raise self._failed(f"{self.name} ended {how} before it was ready")
        return answer

    def stop(self, grace_s: float, *, again_after_s: float | None = None) -> None:
        """SIGTERM, again when asked for, then SIGKILL for what is left of its session. May be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            for wait_s in [grace_s] if again_after_s is None else [again_after_s, grace_s]:
                process.terminate()
                if _exited(process.pid, wait_s):
                    break
        finally:
            # Before it is reaped: until then nobody else can have its number.
            _kill_session(process.pid)
            process.wait()

    def last_lines(self) -> list[str]:
        """The end of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                return log.read().decode("utf-8", "replace").rstrip().splitlines()[-TAIL_LINES:]
        except OSError:
            return []

    def _failed(self, message: str) -> ChildFailed:
        return ChildFailed(message, self.log, self.last_lines())


def _exited(pid: int, timeout_s: float) -> bool:
    """Waits for a child's end without reaping it."""
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(STEP_S)
    return True


def _kill_session(pid: int) -> None:
    """The program's own process group: its pid, as it leads its session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _dying_with_parent() -> Callable[[], None] | None:
    """For the child: asks the kernel for a SIGTERM when the demo itself is killed, so that nothing is left running."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
