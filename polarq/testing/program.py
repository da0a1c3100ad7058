"""A child process with a log file: started, asked for its last words, stopped by its process id."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

STOP_TIMEOUT_S = 20.0

_STEP_S = 0.02
_PR_SET_PDEATHSIG = 1


class Program:
    """Runs `command` in a session of its own, everything it prints going to `log`.

    Ctrl-C reaches only whoever started it, which stops its programs in its own order. With `bound` (on Linux) the
    program gets a SIGTERM when the thread that started it ends in whatever way, SIGKILL included.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        bound: bool = False,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self._env = dict(env) if env is not None else None
        self._cwd = cwd
        self._bound = bound
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
                preexec_fn=_ending_with_starter() if self._bound else None,  # noqa: PLW1509 - looked up before the fork
            )
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        self.signal(signal.SIGKILL)
        self.wait(STOP_TIMEOUT_S)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int | None:
        """SIGTERM, a second one at half the time, then SIGKILL for what is left of its session.

        The exit code; None when it never ran. May be called twice.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return None if process is None else process.returncode
        try:
            for _ in range(2):
                process.terminate()
                if _ended(process.pid, timeout_s / 2):
                    break
        finally:
            # Before it is reaped: until then nobody else can have its number.
            _kill_session(process.pid)
        return process.wait()

    def last_lines(self, count: int = 20) -> str:
        """The end of its log, for an error message."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def _ended(pid: int, timeout_s: float) -> bool:
    """Waits for a child's end without reaping it."""
    deadline = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_STEP_S)
    return True


def _kill_session(pid: int) -> None:
    """What is left of the program's own process group, whose number is its pid as it leads its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ending_with_starter() -> Callable[[], None] | None:
    """For the child: asks the kernel for a SIGTERM when its starter ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
