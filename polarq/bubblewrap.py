"""Whether bubblewrap is here and may do what an isolated sandbox of the backend `local` needs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

PROBE_S = 20.0
WALLS = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1")
"""Its namespaces, beside the mounts (always) and the network (of offline sandboxes)."""
INSTALL = "apt install bubblewrap (0.5 or newer)"


@cache
def program() -> str | None:
    return shutil.which("bwrap")


@cache
def why_not() -> str:
    """One line; blank where it works. Starts it once in the life of this process (blocks for milliseconds)."""
    found = program()
    if found is None:
        return f"bubblewrap is not installed: {INSTALL}"
    command = [found, *WALLS, "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "1777", "--tmpfs", "/dev/shm", "--", "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=PROBE_S, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"{found} cannot be run ({type(exc).__name__})"
    if done.returncode == 0:
        return ""
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{said} (it needs user namespaces, or root with CAP_SYS_ADMIN)"
