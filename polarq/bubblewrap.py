"""Whether bubblewrap is here and may do what an isolated sandbox of the backend `local` needs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

PROBE_S = 60.0
WALLS = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1")
"""Its namespaces, beside the mounts (always) and the network (of offline sandboxes)."""
INSTALL = "apt install bubblewrap (0.7 or newer; 0.5 and 0.6 set /dev/shm no limit)"


@cache
def program() -> str | None:
    return shutil.which("bwrap")


def why_not() -> str:
    """One line; blank where it works. Starts it once in the life of this process (blocks for milliseconds)."""
    found = program()
    if found is None:
        return f"bubblewrap is not installed: {INSTALL}"
    try:
        return _refusal(found)
    except (OSError, subprocess.TimeoutExpired) as exc:
        # That may pass, and is asked again.
        return f"{found} cannot be run now ({type(exc).__name__})"


@cache
def limits_tmpfs() -> bool:
    """Whether it can give a file system in memory a size (0.7 and newer). Starts it once (blocks for milliseconds)."""
    found = program()
    if found is None:
        return False
    done = subprocess.run(
        [found, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PROBE_S
    )
    return "--size " in done.stdout + done.stderr


@cache
def own_users() -> bool:
    """Whether a sandbox can have a user namespace of its own, which is what counts its processes where there is no
    control group. Starts it once (blocks for milliseconds)."""
    found = program()
    return found is not None and not _refusal(found, "--unshare-user")


@cache
def _refusal(found: str, *more: str) -> str:
    command = [found, *WALLS, *more, "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--tmpfs", "/dev/shm", "--", "true"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PROBE_S, cwd="/"
    )
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{said} (it needs user namespaces, or root with CAP_SYS_ADMIN)"
