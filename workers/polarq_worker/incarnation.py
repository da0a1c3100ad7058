"""Who a worker is among all that its node ever had, and which of the others on this machine are known to be dead.

Each worker process has a file `incarnations/<id>` in its node's state folder, locked for as long as it lives: the
kernel lets go of the lock when the process ends, however it does. A file without a lock is that of a worker that was
killed. That holds under one kernel only, so the file says which: one that was left under another (the machine was
started anew, or shares this folder with it) proves nothing, and what its worker held is the reaper's, once its lease is
over.

The file also says which deployment its worker serves. The ledger keeps two workers of one node apart, but only those
that ask the same one: a folder that a living worker of another Redis uses is refused, for each would take what the
other started for leftovers.
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polarq.errors import PolarqError

log = logging.getLogger("polarq.worker.incarnation")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_VMSTAT = Path("/proc/vmstat")
_WORD_BYTES = 128
_WORDS = 3


@dataclass(frozen=True, slots=True)
class Dead:
    """A worker that is gone."""

    incarnation: str
    how: str = ""
    """How it ended, as far as it left word; blank: not known (SIGKILL leaves none)."""


NOT_KNOWN = Dead("")


@dataclass(frozen=True, slots=True)
class Others:
    """The incarnations of this node that left a file here."""

    dead: tuple[Dead, ...] = ()
    living: tuple[str, ...] = ()
    """They hold their lock (or it cannot be told): what lies in the state folder may be theirs."""


class Incarnation:
    """This process as a worker of its node. `begin` and `end` block for a moment."""

    def __init__(self, state_dir: Path, deployment: str) -> None:
        """`deployment` names the ledger, whatever words it takes."""
        self.id = secrets.token_hex(8)
        self._deployment = hashlib.sha256(deployment.encode()).hexdigest()[:16]
        self._folder = state_dir / "incarnations"
        self._handle: int | None = None
        self._using = threading.Lock()
        """A beat in its thread must not write to a number that is another file's by then."""

    def begin(self) -> Others:
        """Writes its own file, and looks at the others'. Raises `PolarqError`."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with self._alone():
                self._handle = os.open(self._folder / self.id, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                self._write_word(self._handle)
                try:
                    return self._others()
                except PolarqError:
                    self.end()
                    raise
        except OSError as exc:
            raise PolarqError(
                f"{self._folder} cannot be used ({exc.strerror}); set POLARQ_STATE_DIR to a folder of this machine"
            ) from None

    def forget(self, dead: Iterable[Dead]) -> None:
        """What these held has been taken back."""
        for one in dead:
            self._remove(one.incarnation)

    def beat(self) -> None:
        """Notes what it will be told apart by, should it be killed for memory before the next beat."""
        with self._using:
            if self._handle is not None:
                self._write_word(self._handle)

    def end(self) -> None:
        """This worker holds nothing any more."""
        with self._using:
            if self._handle is not None:
                faulthandler.disable()
                self._remove(self.id)
                os.close(self._handle)
                self._handle = None

    def _others(self) -> Others:
        dead, living = [], []
        for path in self._folder.iterdir():
            if path.name in {self.id, _LOCK}:
                continue
            if _locked(path):
                if self._of_another_deployment(path):
                    raise PolarqError(
                        f"a worker of another Redis (or another key prefix) lives in {self._folder.parent}: stop that"
                        " one, or give each its own POLARQ_STATE_DIR"
                    )
                living.append(path.name)
            elif (how := _how_it_ended(path.read_bytes())) is not None:
                dead.append(Dead(path.name, how))
            else:
                # Of another kernel: nothing is known of it, and before long nothing of it is held.
                self._remove(path.name)
        return Others(tuple(sorted(dead, key=lambda one: one.incarnation)), tuple(sorted(living)))

    def say_how_it_ends(self) -> None:
        """From here on a fault in native code (a plug-in, a library), which ends the process, is told by the file."""
        assert self._handle is not None
        os.lseek(self._handle, _WORD_BYTES, os.SEEK_SET)
        faulthandler.enable(self._handle)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A file that is made and not yet locked must not pass for a dead worker's."""
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write_word(self, handle: int) -> None:
        """The kernel this runs under, how many processes it has killed for want of memory since it started, and the
        deployment. On a disk that does not take it the file stays empty, and proves nothing."""
        said = (_said_by(_BOOT_ID).strip(), str(_killed_for_memory()), self._deployment)
        try:
            os.pwrite(handle, " ".join(said).encode().ljust(_WORD_BYTES - 1) + b"\n", 0)
        except OSError as exc:
            log.warning("the file of this worker cannot be written (%s)", exc.strerror or exc)

    def _of_another_deployment(self, path: Path) -> bool:
        said = _words(path.read_bytes())
        return len(said) == _WORDS and said[-1] != self._deployment

    def _remove(self, incarnation: str) -> None:
        try:
            (self._folder / incarnation).unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed (%s)", self._folder / incarnation, exc.strerror or exc)


_LOCK = "lock"


def _said_by(path: Path) -> str:
    """Blank under a kernel that has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _killed_for_memory() -> int:
    found = re.search(r"^oom_kill (\d+)$", _said_by(_VMSTAT), re.MULTILINE)
    return int(found[1]) if found else 0


def _how_it_ended(left: bytes) -> str | None:
    """How the worker ended that left this file; blank: it left no word; None: it ran under another kernel."""
    boot_id, killed, *_ = (*_words(left), "", "")
    if not boot_id or boot_id != _said_by(_BOOT_ID).strip():
        return None
    if fault := re.search(rb"^Fatal Python error: (.+)$", left[_WORD_BYTES:], re.MULTILINE):
        return fault[1].decode("utf-8", "replace")
    if killed.isdecimal() and _killed_for_memory() > int(killed):
        return "out of memory, it seems: the kernel killed processes for it"
    return ""


def _words(left: bytes) -> list[str]:
    return left[:_WORD_BYTES].decode("utf-8", "replace").split()


def _locked(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
