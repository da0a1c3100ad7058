"""What a task may ask of a `local` sandbox, and who its commands run as."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath

from polarq import bubblewrap
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import RuntimeFault
from polarq_worker.runtimes import cgroups, shm
from polarq_worker.runtimes.base import SESSION_DIR, Host
from polarq_worker.runtimes.folder import HOME_DIR, TMP_DIR
from polarq_worker.runtimes.walls import USER_NAME, own_ids


def problems(spec: RuntimeSpec, *, isolated: bool) -> list[str]:
    """What cannot be given, one line each, with the key."""
    no = "the local runtime cannot"
    networks = {None, "", "host", *(["none"] if isolated else [])}
    wishes: list[tuple[bool, str]] = [
        (bool(spec.image.strip()), f"image: {no} run an image; leave it out or choose another backend"),
        (spec.cpus is not None and not _groups("cpu"), f"cpus: {no} limit processors: {_NO_GROUPS}"),
        (spec.memory_mb is not None and not _groups("memory"), f"memory_mb: {no} limit memory: {_NO_GROUPS}"),
        (spec.storage_mb is not None, f"storage_mb: {no} limit storage"),
        (spec.gpus > 0, f"gpus: {no} reserve GPUs; programs see those of the node"),
        (not spec.allow_internet and not isolated, f"allow_internet: {no} keep programs off the network{_walls()}"),
        (
            spec.max_processes is not None and not limits_processes(isolated),
            f"max_processes: {no} limit processes: {_NO_GROUPS}",
        ),
        (spec.network not in networks, f"network: {no} join network '{spec.network}'; only 'host'"),
        (bool(spec.internet_volumes), f"internet_volumes: {no} mount; name host paths directly"),
        (spec.direct_exec_init_command is not None, "direct_exec_init_command: is for the apptainer runtime only"),
    ]
    if spec.user is not None:
        try:
            ids_of(spec.user, own_ids() if isolated else None)
        except RuntimeFault as exc:
            wishes.append((True, str(exc)))
    if spec.workdir is not None and ".." in PurePath(spec.workdir).parts:
        wishes.append((True, f"workdir: '{spec.workdir}' has '..' in it; give the path without"))
    elif spec.workdir is not None and isolated and not _is_own(spec.workdir):
        text = f"workdir: an isolated local sandbox has no '{spec.workdir}' of its own; use a path below {SESSION_DIR}"
        wishes.append((True, f"{text}, or set runtimes.local.isolation of the node to none"))
    if isolated:
        wishes += [(True, problem) for problem in shm.problems(spec)]
    known = {shm.KEY} if isolated else set()
    wishes += [(True, f"kwargs.{key}: {no} use it") for key in sorted(set(spec.kwargs) - known)]
    return [problem for wished, problem in wishes if wished]


def most_processes(spec: RuntimeSpec, host: Host, *, isolated: bool) -> int | None:
    """How many it may have; None: as many as its machine."""
    if spec.max_processes is not None or not isolated or not limits_processes(isolated):
        return spec.max_processes
    return host.settings.local.max_processes


def counts_itself() -> bool:
    """Whether an isolated sandbox has a user namespace that counts its processes, and no control group does."""
    return os.geteuid() != 0 or (not _groups("pids") and bubblewrap.own_users())


def limits_processes(isolated: bool) -> bool:
    return _groups("pids") or (isolated and counts_itself())


def ids_of(user: str | None, owner: Sequence[int] | None) -> list[int] | None:
    """User and group that a command runs as; None: as the warden does. `owner`: those of an isolated sandbox. Raises
    `RuntimeFault`."""
    root = os.geteuid() == 0
    if owner is None:
        if user is not None:
            raise RuntimeFault(f"user: commands of a local sandbox run as the worker's own user{_walls()}")
        return None
    if user in {None, USER_NAME, str(owner[0])}:
        return list(owner) if root else None
    assert user is not None
    if not root:
        raise RuntimeFault(f"user: only a worker that is root can run commands as another user than '{USER_NAME}'")
    if not user.isdecimal() or int(user) == 0 or int(user) >= 2**32 - 1 or _is_somebody(int(user)):
        raise RuntimeFault(
            f"user: '{user}' cannot be had in a local sandbox;"
            f" '{USER_NAME}' can, or a number that no user of this machine has"
        )
    return [int(user), int(user)]


_NO_GROUPS = "this worker may not make control groups (as root, or in a systemd unit with Delegate=yes, it may)"


def _groups(controller: str) -> bool:
    return controller in cgroups.usable()


def _walls() -> str:
    why = bubblewrap.why_not()
    return f"; {why}" if why else "; runtimes.local.isolation of the node is none"


def _is_own(path: str) -> bool:
    whole = PurePosixPath(SESSION_DIR) / path
    return any(whole.is_relative_to(own) for own in (SESSION_DIR, HOME_DIR, TMP_DIR))


def _is_somebody(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
