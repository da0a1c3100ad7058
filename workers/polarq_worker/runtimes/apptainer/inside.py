# ruff: noqa: PTH110, PTH116, PTH123
"""The process that goes into an instance and becomes its warden. A program of its own.

    inside.py CONTROL_FD PID SHM_BYTES    PID: the instance's first process; SHM_BYTES: the size of its /dev/shm

It enters the namespaces itself, with the worker's own interpreter in its memory: an image needs neither Python nor
anything else of ours, and a command costs one fork instead of a start of the container program. Whatever Python may
need is loaded before it goes in, since afterwards files are the sandbox's.

It keeps no privilege that the sandbox has not, but cannot be traced from there: agents often run as the same user.
"""

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    # It is started by its path, without the worker's environment.
    sys.path.insert(0, str(Path(__file__).parents[3]))

from polarq_worker.runtimes import warden

NAMESPACES = {"user": 0x10000000, "ipc": 0x08000000, "net": 0x40000000, "pid": 0x20000000, "mnt": 0x00020000}
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
CAP_SYS_ADMIN = 21
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/sys")
DEV_BYTES = 4 << 20
"""Of what the program lays devices and a few files of /etc into."""
HIDDEN = ("/proc/kcore", "/proc/keys", "/proc/timer_list")
LIBC = ctypes.CDLL(None, use_errno=True)


def main(control_fd: int, pid: int, shm_bytes: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # What json loads when it is first used; from inside, it would be found among the sandbox's files.
    json.loads('{"a": [1]}')
    control = socket.socket(fileno=control_fd)
    control.setblocking(True)
    control.set_inheritable(False)
    warden._hide_arguments()
    join_cgroups(pid)
    held = capabilities_of(pid)
    ours = devices_here()
    enter(pid)
    if own_capabilities() >> CAP_SYS_ADMIN & 1:
        limit_memory_files(ours, shm_bytes)
        if os.geteuid() == 0:
            shield()
    # Only a child is in the process namespace that was joined.
    if os.fork():
        os._exit(0)
    try:
        os.setsid()
        drop_to(held)
        warden.ward(control)
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        warden.kill_tree()
        os._exit(1)


def enter(pid: int) -> None:
    """Joins those of an instance's namespaces that are not ours already, and its root with the last."""
    others = [kind for kind in NAMESPACES if _namespace(str(pid), kind) != _namespace("self", kind)]
    handles = [(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC), NAMESPACES[kind]) for kind in others]
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for handle, number in handles:
        if LIBC.setns(handle, number) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    os.close(root)


def devices_here() -> set[str]:
    """The file systems that this process sees, by their device numbers (proc(5), mountinfo)."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return {line.split()[2] for line in file}


def limit_memory_files(of_the_machine: set[str], shm_bytes: int) -> None:
    """Gives what the program mounts in memory for this instance alone, and its users may write to, a size."""
    for path, flags, size in (("/dev", MS_NOSUID, DEV_BYTES), ("/dev/shm", MS_NOSUID | MS_NODEV, shm_bytes)):
        device = os.stat(path).st_dev if os.path.ismount(path) else 0
        # Not where the task has mounted something of the machine's.
        if device and f"{os.major(device)}:{os.minor(device)}" not in of_the_machine:
            _mount("tmpfs", path, MS_REMOUNT | flags, f"size={size}")


def shield() -> None:
    """Makes read-only what root may write of the kernel without any capability, and what would reach the machine."""
    quiet = MS_NOSUID | MS_NODEV | MS_NOEXEC
    for path in READ_ONLY:
        if os.path.exists(path):
            _mount(path, path, MS_BIND | MS_REC)
            _mount(path, path, MS_BIND | MS_REMOUNT | MS_RDONLY | quiet)
    for path in HIDDEN:
        if os.path.exists(path):
            _mount("/dev/null", path, MS_BIND)


def _mount(source: str, target: str, flags: int, options: str = "") -> None:
    if LIBC.mount(source.encode(), target.encode(), None, flags, options.encode() or None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount on {target}: {os.strerror(number)}")


def _namespace(pid: str, kind: str) -> tuple[int, int]:
    found = os.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def join_cgroups(pid: int) -> None:
    """Moves this process into the instance's cgroups, so that its limits hold for commands as well."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = set(file.read().splitlines())
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        theirs = [line for line in file.read().splitlines() if line not in own]
    for folder in cgroup_folders(theirs):
        with open(f"{folder}/cgroup.procs", "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))


def cgroup_folders(lines: list[str]) -> list[str]:
    """The folders of lines of /proc/PID/cgroup (cgroups(7))."""
    mounted: dict[str, str] = {}
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, at, kind, options = line.split()[:4]
            if kind == "cgroup2":
                mounted.setdefault("", at)
            elif kind == "cgroup":
                for option in options.split(","):
                    mounted.setdefault(option, at)
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = controllers.split(",")[0]
        if mount in mounted:
            found.append(f"{mounted[mount]}{path}")
    return found


def capabilities_of(pid: int) -> int:
    """Those that the instance's programs may ever have: its first process' bounding set."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd:"))


def drop_to(held: int) -> None:
    """No capability but these for us and all that we start, and none by a program's file."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    number = 0
    while LIBC.prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        if not held >> number & 1 and LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")
        number += 1
    permitted = own_capabilities() & held
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    low, high = permitted & 0xFFFFFFFF, permitted >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    if LIBC.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def own_capabilities() -> int:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    if LIBC.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    return int(data[1]) | int(data[4]) << 32


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
