"""Limits of a `local` sandbox by control groups, where this worker may make some: version 2, or 1 by controller."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")
OWN = Path("/proc/self/cgroup")
CONTROLLERS = ("memory", "cpu", "pids")
PERIOD_US = 100_000
REMOVE_S = 10.0
"""How long the kernel may take to see killed processes off."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: not limited."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None

    @property
    def controllers(self) -> list[str]:
        wanted = (self.memory_bytes, self.cpus, self.processes)
        return [name for name, value in zip(CONTROLLERS, wanted, strict=True) if value is not None]


class Cgroup:
    """A sandbox's own groups: one folder, or with version 1 one for each controller."""

    def __init__(self, name: str, limits: Limits) -> None:
        places = usable()
        self._limits = limits
        self._name = f"polarq-{name[:120]}-{secrets.token_hex(4)}"
        self._of = {controller: places[controller] / self._name for controller in limits.controllers}

    @property
    def folders(self) -> list[str]:
        """Known before they are made, for the record."""
        return sorted({str(folder) for folder in self._of.values()})

    def make(self) -> None:
        """Blocks. Raises `OSError`."""
        for folder in self.folders:
            Path(folder).mkdir()
        for controller, place in self._of.items():
            for file, text in self._settings(controller, place):
                file.write_text(text)

    def take_in(self, pid: int) -> None:
        """That process, and all that it starts from now on. Raises `OSError`."""
        for folder in self.folders:
            (Path(folder) / "cgroup.procs").write_text(str(pid))

    def memory_kills(self) -> int:
        """How often the kernel has killed in it because its memory was used up."""
        if "memory" not in self._of:
            return 0
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (self._of["memory"] / name).read_text().splitlines()
            except OSError:
                continue
            return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
        return 0

    def _settings(self, controller: str, folder: Path) -> list[tuple[Path, str]]:
        second = (folder / "cgroup.controllers").exists()
        limits = self._limits
        if controller == "memory":
            names = ("memory.max", "memory.swap.max") if second else ("memory.limit_in_bytes", "")
            found = [(folder / names[0], str(limits.memory_bytes))]
            swap = folder / (names[1] or "memory.memsw.limit_in_bytes")
            return [*found, *([(swap, "0" if second else str(limits.memory_bytes))] if swap.exists() else [])]
        if controller == "pids":
            return [(folder / "pids.max", str(limits.processes))]
        quota = max(int((limits.cpus or 0) * PERIOD_US), 1000)
        if second:
            return [(folder / "cpu.max", f"{quota} {PERIOD_US}")]
        return [(folder / "cpu.cfs_period_us", str(PERIOD_US)), (folder / "cpu.cfs_quota_us", str(quota))]


def remove(folders: Sequence[str], *, kill: bool = False) -> bool:
    """Whether they are gone (blocks). With `kill` also processes that are in them."""
    deadline = time.monotonic() + REMOVE_S
    left = [Path(folder) for folder in folders]
    while left:
        for folder in list(left):
            if kill:
                _kill(folder)
            try:
                folder.rmdir()
            except FileNotFoundError:
                left.remove(folder)
            except OSError:
                # Something in it is dying.
                if time.monotonic() > deadline:
                    return False
            else:
                left.remove(folder)
        if left:
            time.sleep(0.01)
    return True


@cache
def usable() -> dict[str, Path]:
    """Below which folder this worker may make groups, for each controller that it may use at all."""
    found: dict[str, Path] = {}
    mounts = _mounts()
    for line in _lines(OWN):
        _, names, path = line.split(":", 2)
        if names:
            for controller in names.split(","):
                mounted = mounts.get(controller)
                if controller in CONTROLLERS and mounted is not None:
                    found.update(_first_usable([mounted / path.lstrip("/"), mounted], [controller]))
        elif (mounted := mounts.get("")) is not None:
            own = mounted / path.lstrip("/")
            there = [name for name in CONTROLLERS if name not in mounts]
            # A group with processes in it takes no limits for groups below: often only one beside ours can be made.
            places = [own, own.parent] if own != mounted else [own]
            found = {**_first_usable(places, there), **found}
    return found


def _first_usable(places: Sequence[Path], controllers: Sequence[str]) -> dict[str, Path]:
    for place in places:
        able = [controller for controller in controllers if _may(place, controller)]
        if able:
            return dict.fromkeys(able, place)
    return {}


def _may(place: Path, controller: str) -> bool:
    probe = place / f"polarq-probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if (place / "cgroup.subtree_control").exists():
            if controller not in (place / "cgroup.controllers").read_text().split():
                return False
            if controller not in (place / "cgroup.subtree_control").read_text().split():
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _mounts() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for line in _lines(MOUNTS):
        _, at, kind, options = line.split()[:4]
        if kind == "cgroup2":
            found.setdefault("", Path(at))
        elif kind == "cgroup":
            for option in options.split(","):
                if option in CONTROLLERS:
                    found.setdefault(option, Path(at))
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _kill(folder: Path) -> None:
    for pid in _lines(folder / "cgroup.procs"):
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue
