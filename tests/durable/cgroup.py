"""A memory limit of the kernel's for one program and all that it starts, with cgroups of either version."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

from tests.needs import not_here

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_S = 20.0


class MemoryCgroup:
    """A group of its own below the root of the memory controller."""

    def __init__(self, folder: Path, *, second: bool) -> None:
        self._folder = folder
        self._second = second

    @property
    def before(self) -> list[str]:
        """In front of a command: puts it into the group, and becomes it."""
        return ["sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed in it because it was full."""
        counters = self._folder / ("memory.events" if self._second else "memory.oom_control")
        found = dict(line.split() for line in counters.read_text().splitlines())
        return int(found["oom_kill"])

    def limit(self, most_bytes: int) -> None:
        names = ("memory.max",) if self._second else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        for name in names:
            with suppress(FileNotFoundError):  # memsw: only where swap is accounted for
                (self._folder / name).write_text(str(most_bytes))
        if self._second:
            with suppress(FileNotFoundError):
                (self._folder / "memory.swap.max").write_text("0")

    def remove(self) -> None:
        """Kills what is left in it."""
        until = monotonic() + _EMPTY_S
        while pids := (self._folder / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            assert monotonic() < until, f"{pids} do not leave {self._folder}"
            sleep(0.05)
        self._folder.rmdir()


@contextmanager
def memory_limit(name: str, most_bytes: int) -> Iterator[MemoryCgroup]:
    second = (_ROOT / "cgroup.controllers").exists()
    parent = _ROOT if second else _ROOT / "memory"
    try:
        if second and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder = parent / name
        folder.mkdir()
    except OSError as exc:
        not_here(f"a memory limit needs a cgroup, which cannot be made below {parent} ({exc.strerror})")
    group = MemoryCgroup(folder, second=second)
    try:
        group.limit(most_bytes)
        yield group
    finally:
        group.remove()
