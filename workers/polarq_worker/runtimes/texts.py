"""One clear line, with what to do about it, for what the system answers when a sandbox wants something."""

from __future__ import annotations

import errno
import os

from polarq.errors import DiskFull, RuntimeFault
from polarq_worker.runtimes.processes import CouldNotStart


def cannot(what: str, exc: OSError) -> str:
    """`what` failed with `exc`."""
    advice = {
        errno.ENOSPC: "; free some space, or set POLARQ_STATE_DIR to a larger disk",
        errno.EDQUOT: "; raise the quota, or set POLARQ_STATE_DIR to another disk",
        errno.EMFILE: "; raise the worker's limit of open files (ulimit -n)",
        errno.ENFILE: "; raise the system's limit of open files (fs.file-max)",
    }.get(exc.errno or 0, "")
    named = f" ({exc.filename})" if isinstance(exc.filename, str) and exc.filename not in what else ""
    return f"{what}: {exc.strerror or exc}{named}{advice}"


def fault(what: str, exc: OSError) -> RuntimeFault:
    """The same, to be raised."""
    full = exc.errno in {errno.ENOSPC, errno.EDQUOT}
    return (DiskFull if full else RuntimeFault)(cannot(what, exc))


def could_not_start(exc: CouldNotStart, program: str, folder: str) -> str:
    """The program was not reached, in that folder."""
    if exc.number in {errno.EAGAIN, errno.ENOMEM}:
        return f"the node has no room for another process ({os.strerror(exc.number)}); see ulimit -u and free memory"
    if exc.stage == "chdir" and exc.number == errno.ENOENT:
        return f"there is no folder '{folder}' to run in"
    if exc.number == errno.E2BIG:
        return "arguments and environment are larger than the system takes; hand them over in a file"
    if exc.number == errno.ENOENT:
        return f"there is no program '{program}' (or the interpreter it names is missing)"
    what = folder if exc.stage == "chdir" else program
    return f"'{what}': {os.strerror(exc.number) if exc.number else 'cannot be started'}"
