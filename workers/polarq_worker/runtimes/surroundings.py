"""The environment that programs of a `local` sandbox start with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from polarq_worker.runtimes.folder import PrivateFolder
from polarq_worker.runtimes.walls import USER_NAME

HOST_VARIABLES = ("LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ")
"""All that a sandbox sees of the worker's environment, with PATH."""


def search_path() -> str:
    path = os.environ.get("PATH") or os.defpath
    beside_python = str(Path(sys.executable).parent)
    if beside_python not in path.split(os.pathsep):
        # A worker run as .venv/bin/celery has the programs of its environment, activated or not.
        path = f"{beside_python}{os.pathsep}{path}"
    return path


def environment(folder: PrivateFolder) -> dict[str, str]:
    """No secret of the worker, no proxy of its network, a home of its own."""
    host, isolated = os.environ, folder.owner is not None
    return {
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **{name: host[name] for name in HOST_VARIABLES if name in host},
        "PATH": search_path(),
        "HOME": folder.seen_home,
        "TMPDIR": folder.seen_tmp,
        "SHELL": "/bin/bash",
        # A folder that is no repository of its own must not pass for a part of one around the state folder.
        "GIT_CEILING_DIRECTORIES": "/polar" if isolated else str(folder.root),
        **({"USER": USER_NAME, "LOGNAME": USER_NAME} if isolated else {}),
    }
