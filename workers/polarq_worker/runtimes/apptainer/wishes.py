"""What a task asks for: what cannot be given, and the program's options for the rest."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from polarq.contracts.specs import RuntimeSpec
from polarq_worker.runtimes import shm
from polarq_worker.runtimes.apptainer import limits
from polarq_worker.runtimes.apptainer.instance import CAPABILITIES
from polarq_worker.runtimes.apptainer.program import find, missing
from polarq_worker.runtimes.base import Host

NVIDIA = Path("/dev/nvidiactl")
KWARGS = {"volumes", shm.KEY}


def problems(spec: RuntimeSpec, host: Host) -> list[str]:
    """One line for each wish that cannot be granted here, with its key."""
    if find(host) is None:
        return [f"backend: {missing(host)}"]
    no = "the apptainer runtime cannot"
    limited = [key for key in ("cpus", "memory_mb", "max_processes") if getattr(spec, key) is not None]
    unlimited = limits.problem() if limited else ""
    lines = [f"{key}: {no} limit it here: {unlimited}" for key in limited if unlimited]
    wishes: list[tuple[bool, str]] = [
        (spec.storage_mb is not None, f"storage_mb: {no} limit storage"),
        (spec.gpus > 0 and not NVIDIA.exists(), f"gpus: this node has no NVIDIA driver ({NVIDIA})"),
        (
            spec.network not in {None, "", "host", "none"},
            f"network: {no} join network '{spec.network}'; only 'host' and 'none'",
        ),
        (
            spec.user is not None and os.geteuid() != 0,
            "user: a worker that is not root runs commands as its own user only; leave it out",
        ),
        (
            spec.direct_exec_init_command is not None,
            "direct_exec_init_command: commands run in an instance here, which needs none; leave it out",
        ),
        (
            spec.workdir is not None and not PurePosixPath(spec.workdir).is_absolute(),
            f"workdir: '{spec.workdir}' is not absolute",
        ),
        (
            spec.workdir is not None and ".." in PurePosixPath(spec.workdir).parts,
            f"workdir: '{spec.workdir}' has '..' in it; give the path without",
        ),
    ]
    lines += [*(line for wished, line in wishes if wished), *shm.problems(spec)]
    volumes = spec.kwargs.get("volumes", [])
    if not isinstance(volumes, list) or not all(isinstance(volume, str) for volume in volumes):
        lines.append("kwargs.volumes: a list of texts like /host/path:/path/in/it:ro is needed")
        volumes = []
    for key, texts in (("kwargs.volumes", volumes), ("internet_volumes", spec.internet_volumes)):
        lines += [f"{key}: '{text}' is not like /host/path:/path/in/it:ro" for text in texts if not _is_volume(text)]
    return lines + [f"kwargs.{key}: {no} use it" for key in sorted(set(spec.kwargs) - KWARGS)]


def _is_volume(text: str) -> bool:
    """One of them: to the program, what follows a comma is another one, which nobody has allowed."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    named = source.startswith("/") and (not rest or target.startswith("/"))
    return named and "," not in text and mode in {"", "ro", "rw"}


def options(spec: RuntimeSpec, *, online: bool, overlay: Path, layers: list[Path]) -> list[str]:
    """Of `instance start`: nothing of the host but what the task mounts."""
    chosen = ["--contain", "--cleanenv", "--ipc", "--no-mount", "home,tmp,cwd,hostfs,bind-paths"]
    if os.geteuid() == 0:
        chosen += ["--no-privs", "--add-caps", ",".join(f"CAP_{name}" for name in CAPABILITIES)]
    else:
        # Also where the program is set-uid root: only in a user namespace of the worker's own may the worker go in.
        chosen += ["--userns"]
    if not online:
        chosen += ["--net", "--network", "none"]
    if spec.gpus > 0:
        chosen += ["--nv"]
    if spec.cpus is not None:
        chosen += ["--cpus", str(spec.cpus)]
    if spec.memory_mb is not None:
        chosen += ["--memory", f"{spec.memory_mb}M"]
    if spec.max_processes is not None:
        chosen += ["--pids-limit", str(spec.max_processes)]
    volumes = [str(volume) for volume in spec.kwargs.get("volumes", [])] + (spec.internet_volumes if online else [])
    for volume in volumes:
        chosen += ["--bind", volume]
    for layer in layers:
        chosen += ["--overlay", f"{layer}:ro"]
    return [*chosen, "--overlay", str(overlay)]
