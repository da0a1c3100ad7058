"""Who a worker is among all that its node ever had, and which of the others on this machine are known to be dead.

Each worker process has a file `incarnations/<id>` in its node's state folder, locked for as long as it lives: the
kernel lets go of the lock when the process ends, however it does. A file without a lock is that of a worker that was
killed. That holds under one kernel only, so the file says which: one that was left under another (the machine was
started anew, or shares this folder with it) proves nothing, and what its worker held is the reaper's, once its lease is
over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polarq.errors import PolarqError

log = logging.getLogger("polarq.worker.incarnation")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Others:
    """The incarnations of this node that left a file here."""

    dead: tuple[str, ...] = ()
    living: tuple[str, ...] = ()
    """They hold their lock (or it cannot be told): what lies in the state folder may be theirs."""


class Incarnation:
    """This process as a worker of its node. `begin` and `end` block for a moment."""

    def __init__(self, state_dir: Path) -> None:
        self.id = secrets.token_hex(8)
        self._folder = state_dir / "incarnations"
        self._handle: int | None = None

    def begin(self) -> Others:
        """Writes its own file, and looks at the others'. Raises `PolarqError`."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._alone():
                self._handle = os.open(self._folder / self.id, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                os.write(self._handle, _kernel().encode())
                return self._others()
        except OSError as exc:
            raise PolarqError(
                f"{self._folder} cannot be used ({exc.strerror}); set POLARQ_STATE_DIR to a folder of this machine"
            ) from None

    def forget(self, dead: Collection[str]) -> None:
        """What these held has been taken back."""
        for incarnation in dead:
            self._remove(incarnation)

    def end(self) -> None:
        """This worker holds nothing any more."""
        if self._handle is not None:
            self._remove(self.id)
            os.close(self._handle)
            self._handle = None

    def _others(self) -> Others:
        dead, living = [], []
        for path in self._folder.iterdir():
            if path.name in {self.id, _LOCK}:
                continue
            if _locked(path):
                living.append(path.name)
            elif path.read_text() == _kernel():
                dead.append(path.name)
            else:
                # Of another kernel: nothing is known of it, and before long nothing of it is held.
                self._remove(path.name)
        return Others(tuple(sorted(dead)), tuple(sorted(living)))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A file that is made and not yet locked must not pass for a dead worker's."""
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _remove(self, incarnation: str) -> None:
        try:
            (self._folder / incarnation).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed (%s)", self._folder / incarnation, exc.strerror or exc)


_LOCK = "lock"


def _kernel() -> str:
    return _BOOT_ID.read_text().strip()


def _locked(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
