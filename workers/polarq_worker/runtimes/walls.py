# ruff: noqa: PTH110, PTH111, PTH112, PTH113, PTH114, PTH115, PTH119, PTH120, PTH208
# Paths are texts here: bubblewrap's words, and as they are spelt, links and all.
"""What an isolated `local` sandbox sees of the machine: bubblewrap's arguments.

The system read-only; a /tmp, a /dev and a /proc of its own; of home folders, of other temporary folders and of polarq's
own files nothing but the programs that PATH and this worker's Python need, and what `runtimes.local.visible` names.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import polarq
from polarq import bubblewrap
from polarq.settings import Settings
from polarq_worker.runtimes.base import SESSION_DIR
from polarq_worker.runtimes.folder import HOME_DIR, RUN_DIR, TMP_DIR
from polarq_worker.runtimes.nursery import LOADER

SANDBOX_UID = 64_321
"""Whom a worker that is root runs commands as: a number that is nobody's where nobody chose it."""
USER_NAME = "agent"
OWN = ("/polar", "/proc", "/dev", TMP_DIR)
"""Folders that the sandbox has for itself."""
HIDDEN = ("/home", "/root", "/run", "/var/run", "/var/tmp", "/etc/polarq")
SYSTEM = ("/", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/var", "/sys")
"""Never hidden as a whole, whoever calls one of them home."""
BESIDE_BIN = ("bin", "lib", "lib64", "libexec", "include", "pyvenv.cfg")
"""Of the folder around a folder of programs, what these need; what else is there may be somebody's secret."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What is hidden (folders become empty, files unreadable) and what is seen in spite of it."""

    hidden: tuple[str, ...]
    seen: tuple[tuple[str, str], ...]
    """(path on the machine, path in the sandbox)."""
    masked: tuple[str, ...] = ()


def own_ids() -> tuple[int, int]:
    """User and group that commands of an isolated sandbox run as."""
    return (SANDBOX_UID, SANDBOX_UID) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def arguments(root: Path, sight: Sight, *, online: bool, processes: int | None, shm_bytes: int) -> list[str]:
    """bubblewrap's command for the sandbox in the folder `root`, with the warden's own at its end.

    `processes` is the limit that the sandbox's own user namespace is to keep, `shm_bytes` the size of /dev/shm.
    """
    program = bubblewrap.program()
    assert program is not None
    args = [program, *bubblewrap.WALLS]
    if not online:
        args.append("--unshare-net")
    if os.geteuid() == 0:
        # The warden starts commands as another user and ends them; all else that root may do, it does not.
        args += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SETPCAP"):
            args += ["--cap-add", capability]
    else:
        args.append("--unshare-user")
    args += [*_top_level(sight), "--proc", "/proc", "--dev", "/dev"]
    args += ["--size", str(shm_bytes)] if bubblewrap.limits_tmpfs() else []
    args += ["--perms", "1777", "--tmpfs", "/dev/shm"]
    args += ["--bind", str(root / "tmp"), TMP_DIR]
    args += ["--bind", str(root / "tmp"), "/var/tmp"] if "/var/tmp" in sight.hidden else []
    args += _beneath(sight, [*OWN, "/var/tmp"])
    args += ["--dir", "/polar", "--bind", str(root / "session"), SESSION_DIR, "--bind", str(root / "home"), HOME_DIR]
    args += ["--ro-bind", str(root / "run"), RUN_DIR]
    args += [word for name in ("passwd", "group") for word in ("--ro-bind", str(root / "run" / name), f"/etc/{name}")]
    args += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]
    python = os.path.realpath(sys.executable)
    limit = [] if processes is None else [str(processes)]
    return [*args, python, "-E", "-s", "-S", "-P", "-c", LOADER, "ward", "CONTROL", *limit]


def accounts(uid: int, gid: int) -> dict[str, str]:
    """/etc/passwd and /etc/group of the sandbox: the system's own users, and whom commands run as."""
    users = [f"{USER_NAME}:x:{uid}:{gid}::{HOME_DIR}:/bin/bash"]
    users += [":".join(words) for words in _accounts("/etc/passwd") if int(words[2]) not in {uid}]
    groups = [f"{USER_NAME}:x:{gid}:"]
    groups += [":".join([*words[:3], ""]) for words in _accounts("/etc/group") if int(words[2]) not in {gid}]
    return {"passwd": "\n".join(users) + "\n", "group": "\n".join(groups) + "\n"}


def sight(private: Collection[Path], visible: Collection[str]) -> Sight:
    """As this process' environment and settings have it; `private` are polarq's own folders."""
    env = os.environ
    home, path = env.get("HOME", ""), env.get("PATH", os.defpath)
    cached = _sight(home, path, tuple(str(folder) for folder in private), tuple(visible))
    return replace(cached, masked=tuple(sorted(file for file in _secrets() if not _within(file, cached.hidden))))


def _secrets() -> set[str]:
    """Files of a deployment that may hold passwords, where they lie open: its topology, variables beside the worker."""
    topology = Settings.from_env().topology_path
    here = Path.cwd()
    files = [*here.glob(".env*"), here / "topology.yaml", *([topology] if topology else [])]
    return {spelt for file in files if file.is_file() for spelt in _spelt(str(file.absolute()))}


@lru_cache(maxsize=64)
def _sight(home: str, path: str, private: tuple[str, ...], visible: tuple[str, ...]) -> Sight:
    hidden = {*HIDDEN, TMP_DIR, *private}
    hidden.update(folder for folder in (home, _home_of(os.geteuid())) if folder.startswith("/"))
    hidden |= {os.path.realpath(folder) for folder in hidden}
    hidden = {os.path.normpath(folder) for folder in hidden if os.path.isdir(folder)} - set(SYSTEM)
    needed = [*_programs(path), *_interpreter(), str(Path(polarq.__file__).parent)]
    wanted = {spelt for one in needed if os.path.exists(one) for spelt in _spelt(one)} - hidden
    named = {spelt for one in visible for spelt in _spelt(os.path.expanduser(one)) if os.path.exists(spelt)}
    seen = {(os.path.realpath(one), one) for one in wanted | named if _within(one, hidden)}
    return Sight(tuple(sorted(hidden - (named - set(private)))), tuple(sorted(seen)))


def _spelt(path: str) -> set[str]:
    return {os.path.normpath(path), os.path.realpath(path)}


def _within(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _top_level(sight: Sight) -> Iterator[str]:
    """Each entry of / by itself, so that / is the sandbox's own and may have folders that the machine has not."""
    for name in sorted(os.listdir("/")):
        path = f"/{name}"
        if path in OWN:
            continue
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif path in sight.hidden:
            yield from ("--dir", path)
        elif os.path.exists(path):
            # What another program has made there for a moment may be gone by then.
            yield from ("--ro-bind-try", path, path)


def _beneath(sight: Sight, own: Sequence[str]) -> Iterator[str]:
    """From the outside in: what is hidden in something seen, and what is seen in something hidden."""
    shown = [named for _, named in sight.seen]
    covered = [
        path
        for path in sight.hidden
        if path.count("/") > 1 and not os.path.islink(path) and (_within(path, shown) or not _within(path, own))
    ]
    steps = [(path, ["--tmpfs", path]) for path in covered]
    steps += [(named, [*_way_to(named, sight.hidden), "--ro-bind-try", real, named]) for real, named in sight.seen]
    for _, words in sorted(steps):
        yield from words
    for path in sight.masked:
        yield from ("--ro-bind-try", "/dev/null", path)
    resolver = os.path.realpath("/etc/resolv.conf")
    if _within(resolver, sight.hidden) and os.path.exists(resolver):
        yield from (*_way_to(resolver, sight.hidden), "--ro-bind", resolver, resolver)
    for path in covered:
        yield from ("--remount-ro", path)


def _way_to(path: str, hidden: Collection[str]) -> Iterator[str]:
    """The folders above it that are not the machine's, for anybody to go through."""
    above = [str(folder) for folder in reversed(Path(path).parents)]
    yield from (word for folder in above if _within(folder, hidden) for word in ("--dir", folder))


def _interpreter() -> list[str]:
    """What this worker's Python is made of."""
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))]


def _programs(path: str) -> Iterator[str]:
    """The folders of PATH, what lies beside them, and where links in them lead."""
    for folder in [os.path.dirname(sys.executable), *path.split(os.pathsep)]:
        if not folder.startswith("/") or not os.path.isdir(folder):
            continue
        yield from _with_libraries(folder)
        with os.scandir(folder) as entries:
            for target in {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}:
                if os.path.basename(os.path.dirname(target)) == "bin":
                    yield from _with_libraries(os.path.dirname(target))
                elif os.path.isfile(target):
                    yield target


def _with_libraries(folder: str) -> Iterator[str]:
    yield folder
    if os.path.basename(folder) == "bin":
        around = os.path.dirname(folder)
        yield from (f"{around}/{name}" for name in BESIDE_BIN)


def _home_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_dir
    except KeyError:
        return ""


def _accounts(file: str) -> Iterator[list[str]]:
    """The system's own entries: people's are nobody's business in a sandbox."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split(":")
        if len(words) > 3 and words[2].isdecimal() and (int(words[2]) < 1000 or words[0] in {"nobody", "nogroup"}):
            yield words
