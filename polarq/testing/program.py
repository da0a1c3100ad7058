"""A child process with a log file: started, asked for its last words, stopped by its process id."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

STOP_TIMEOUT_S = 20.0


class Program:
    """Runs `command` in a session of its own, everything it prints going to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self._env = dict(env) if env is not None else None
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
                start_new_session=True,
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
        """SIGTERM, a deadline, then SIGKILL. The exit code; None when it never ran."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def last_lines(self, count: int = 20) -> str:
        """The end of its log, for an error message."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
