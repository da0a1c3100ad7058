"""Limits of an instance: whether this machine can set them, and whether one was hit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from polarq.contracts.specs import RuntimeSpec
from polarq_worker.runtimes import cgroups
from polarq_worker.runtimes.apptainer.inside import cgroup_folders
from polarq_worker.runtimes.base import ExecResult, Host
from polarq_worker.runtimes.beginning import SPARE_PROCESSES
from polarq_worker.runtimes.cgroups import Cgroup, Limits

CGROUPS = Path("/sys/fs/cgroup")
OUT_OF_MEMORY = "its memory was used up, and the kernel killed a process of it"


def problem() -> str:
    """Why instances cannot be limited here; empty where they can."""
    if os.geteuid() == 0:
        writable = any(path.is_dir() and os.access(path, os.W_OK) for path in (CGROUPS, CGROUPS / "memory"))
        return "" if writable else f"the worker cannot write {CGROUPS}"
    if not (CGROUPS / "cgroup.controllers").is_file():
        return "without root it takes cgroups of version 2, and this machine has version 1"
    bus = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")) / "systemd"
    return (
        "" if bus.is_dir() else "without root it takes a systemd session of the worker's user (loginctl enable-linger)"
    )


def most_processes(spec: RuntimeSpec, host: Host) -> int | None:
    """How many an instance may have; None: nobody can count them here."""
    if spec.max_processes is not None:
        return spec.max_processes
    return host.settings.apptainer.max_processes if limits_anything(spec) or "pids" in cgroups.usable() else None


def limits_anything(spec: RuntimeSpec) -> bool:
    """Whether the program makes control groups for an instance."""
    return any(limit is not None for limit in (spec.cpus, spec.memory_mb, spec.max_processes))


def own_group(spec: RuntimeSpec, host: Host, name: str) -> Cgroup | None:
    """For the processes of an instance that its task limits in nothing: no sandbox may fill its machine."""
    most = None if limits_anything(spec) else most_processes(spec, host)
    return None if most is None else Cgroup(name, Limits(processes=most + SPARE_PROCESSES))


def out_of_memory_kills(pid: int) -> int:
    """How often the kernel has killed for want of memory in the cgroup of process `pid`; 0: it cannot be told."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    kills = 0
    for folder in cgroup_folders(lines):
        for name in ("memory.events", "memory.oom_control"):
            try:
                text = (Path(folder) / name).read_text(encoding="utf-8")
            except OSError:
                continue
            words = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) >= 2)
            kills += int(words.get("oom_kill", 0))
    return kills


def with_memory(result: ExecResult, pid: int, killed: int) -> ExecResult:
    """The result, which says so when more than the `killed` of before were killed for want of memory meanwhile."""
    if out_of_memory_kills(pid) <= killed:
        return result
    return replace(result, out_of_memory=True, message="; ".join(filter(None, (result.message, OUT_OF_MEMORY))))
