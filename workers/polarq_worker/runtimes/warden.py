# ruff: noqa: PTH208, PTH123, PTH110, S302, S606
"""The process that every process of a `local` sandbox descends from. A program of its own; nothing imports it.

    warden.py nursery FD                as the nursery of wardens
    warden.py ward FD [PROCESSES]       as process 1 of a sandbox's own namespaces, with a limit of its processes

A worker starts the nursery once: for a request {bwrap, overlays, own_users} with two descriptors (a sandbox's control
socket, and where its warden says what goes wrong) it forks a warden, ready made, which takes a tenth of the time that
Python takes to start; or, with `bwrap`, that command, which makes the namespaces and becomes a warden in them. It ends
when the worker closes its socket. A warden needs it no more, and is nobody's child once it is gone.

To a warden the worker sends one request a command: eight bytes of length with four descriptors attached (stdin,
stdout, stderr, and the command's control socket), then a marshalled body {argv, cwd, env, and ids (user, group, its
other groups) where it is to run as somebody else}. For each the warden forks a keeper, and the keeper forks the
command. Both are child subreapers (prctl), so a process that daemonises, calls setsid or empties its environment is
handed to its keeper by the kernel and cannot leave the tree. Having no child left
(ECHILD) therefore proves that nothing of the command lives, which no scan of /proc can. A body {door} instead asks for
a socket that listens on that port of the sandbox's loopback: it is sent along with `door`. A body {end} ends all that
runs, whoever its parent is by now, and says `ended`.

A keeper says on the command's socket, a line each: `started <pid>`, or `failed <stage> <errno>`; then `ended <wait
status>`; and closes it when the last descendant is gone. It kills the whole tree when it reads anything, and when the
socket is closed by the other side: a worker that dies leaves nothing running. The warden does the same for all keepers
together, and says `over` when nothing is left. In namespaces of its own it is their process 1: no signal from within
ends it, and the kernel ends all others with it.

It is started with an argv and a process name that no `pkill python` matches.
"""

import array
import ctypes
import errno
import gc
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Each sandbox of its own namespaces loads this anew: what takes long to load is not loaded.
    from collections.abc import Iterator
    from typing import NoReturn

PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
NURSERY_NAME = b"polarq-wardens"
NAME = b"polarq-sandbox"
BIRTH_DESCRIPTORS = 2
DESCRIPTORS = 4
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC = 0x4000
MS_SLAVE = 1 << 19
ARG_END = 46
"""Field 49 of /proc/PID/stat, counted from the state on."""
MORE_KILLABLE = 300
"""Where memory ends, a command goes before the worker, and before those that watch over it."""
BACKLOG = 512
LIBC = ctypes.CDLL(None, use_errno=True)
PROCESSES: list[int] = []
"""How many a command may start, if this sandbox's own user namespace counts them."""


def serve_nursery(nursery_fd: int) -> None:
    # The file this program was read from: a warden that starts anew reads it again. Commands bring their own.
    source = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _prctl(PR_SET_NAME, NURSERY_NAME)
    # Nobody asks how a warden ended; it says so itself. What loses its parent on the way into other namespaces is
    # reaped here as well, and not whenever the machine's first process comes to it: a namespace waits for that.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    nursery = _control_socket(nursery_fd)
    # What is here stays as it is: a collector that touches it would have each fork copy it.
    gc.disable()
    gc.freeze()
    while True:
        request = _receive(nursery, BIRTH_DESCRIPTORS)
        if request is None:
            return
        body, fds = request
        _bear(nursery, source, marshal.loads(body), *fds)
        for fd in fds:
            os.close(fd)


def _bear(nursery: socket.socket, source: int, request: dict[str, object], control_fd: int, stderr: int) -> None:
    """Forks a warden, or what becomes one. On its socket it is said that it was born, or that it could not be."""
    try:
        pid = os.fork()
    except OSError as exc:
        os.write(control_fd, f"failed {exc.errno}\n".encode())
        return
    if pid:
        try:
            os.write(control_fd, b"born\n")
        except OSError:
            # Whoever asked is gone; the warden sees that too.
            return
        return
    try:
        os.setsid()
        os.dup2(stderr, 2)
        os.close(stderr)
        nursery.close()
        if request:
            _wall_in(request, source, control_fd)
        os.close(source)
        ward(_control_socket(control_fd))
        os._exit(0)
    finally:
        # Only an error of the warden's own leads here: nothing may outlive it.
        sys.excepthook(*sys.exc_info())
        kill_tree()
        os._exit(1)


def _wall_in(request: dict[str, object], source: int, control_fd: int) -> "NoReturn":
    """Becomes bubblewrap, which becomes a warden in namespaces of its own."""
    bwrap, overlays = request["bwrap"], request["overlays"]
    assert isinstance(bwrap, list) and isinstance(overlays, list)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if overlays:
        _own_mounts()
        for target, options in overlays:
            _check(LIBC.mount(b"overlay", str(target).encode(), b"overlay", 0, str(options).encode()), "overlay")
    if request["own_users"]:
        _own_users()
    os.dup2(source, 0)
    os.set_inheritable(control_fd, True)
    os.execv(bwrap[0], [str(control_fd) if word == "CONTROL" else word for word in bwrap])


def _own_mounts() -> None:
    """A mount namespace in which this process may mount; for one that is not root in a user namespace too."""
    uid, gid = os.geteuid(), os.getegid()
    _check(LIBC.unshare(CLONE_NEWNS | (CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _check(LIBC.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "mount")


def _own_users() -> None:
    """A user namespace with all users as they are: the kernel counts their processes in it apart from all others'."""
    unshared, unshared_w = os.pipe()
    process = os.getpid()
    mapper = os.fork()
    if mapper == 0:
        # Only who has stayed outside may write down more than one user.
        try:
            os.close(unshared_w)
            os.read(unshared, 1)
            for name in ("uid_map", "gid_map"):
                with open(f"/proc/self/{name}") as file:
                    ranges = [line.split() for line in file]
                with open(f"/proc/{process}/{name}", "w") as file:
                    file.write("".join(f"{first} {first} {count}\n" for first, _, count in ranges))
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    _check(LIBC.unshare(CLONE_NEWUSER), "unshare")
    os.close(unshared_w)
    os.close(unshared)
    _check(os.waitpid(mapper, 0)[1], "users")


def _check(answer: int, what: str) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def ward_alone(control_fd: int, processes: str = "") -> None:
    """A warden as process 1 of its namespaces."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _hide_arguments()
    # What is no handler of ours does not reach process 1 from within.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Nothing in the sandbox may look into it, or take its descriptors.
    _prctl(PR_SET_DUMPABLE, 0)
    gc.disable()
    gc.freeze()
    # No command may have any, whatever a file that it starts is marked with. (Without the right to say so there is
    # none to lose.)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if processes:
        PROCESSES.append(int(processes))
    try:
        ward(_control_socket(control_fd))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    # With process 1 ends whatever is left.
    os._exit(0)


def _hide_arguments() -> None:
    """No `pkill python` from within shall find a keeper by the command line that it has from here."""
    fields = _stat(os.getpid())
    if fields is not None and len(fields) > ARG_END:
        begin, end = int(fields[ARG_END - 1]), int(fields[ARG_END])
        if 0 < begin < end:
            ctypes.memmove(begin, NAME[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def ward(control: socket.socket) -> None:
    """Serves one sandbox to its end."""
    _prctl(PR_SET_NAME, NAME)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _wakeup_on_child()
    _say(control, "ready")
    while True:
        ready, _, _ = select.select([control.fileno(), wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap()
        if control.fileno() in ready:
            request = _receive(control, DESCRIPTORS)
            if request is None:
                kill_tree()
                # Its file is in the sandbox's folder, which somebody may want to unmount next.
                os.dup2(0, 2)
                _say(control, "over")
                return
            body, fds = request
            _serve(control, wakeup, marshal.loads(body), fds)
            for fd in fds:
                os.close(fd)


def _serve(control: socket.socket, wakeup: int, request: dict[str, object], fds: list[int]) -> None:
    reply = fds[-1]
    if "door" in request:
        _open_door(reply, int(str(request["door"])))
        return
    if "end" in request:
        kill_tree()
        _write(reply, b"ended\n")
        return
    try:
        pid = os.fork()
    except OSError as exc:
        # Its limit of processes is reached: that is the command's misfortune, not the sandbox's end.
        _write(reply, f"failed fork {exc.errno}\n".encode())
        return
    if pid == 0:
        try:
            control.close()
            os.close(wakeup)
            keep(request, fds)
        finally:
            # Only an error of the keeper's own leads here: nothing may outlive it.
            sys.excepthook(*sys.exc_info())
            kill_tree()
            os._exit(1)


def _write(reply: int, line: bytes) -> None:
    try:
        os.write(reply, line)
    except OSError:
        # Whoever asked has gone.
        return


def _open_door(reply: int, port: int) -> None:
    with socket.socket(fileno=os.dup(reply)) as worker:
        worker.setblocking(True)
        try:
            with socket.create_server(("127.0.0.1", port), backlog=BACKLOG) as door:
                socket.send_fds(worker, [b"door\n"], [door.fileno()])
        except OSError as exc:
            _say(worker, f"failed door {exc.errno or 0}")


def keep(request: dict[str, object], fds: list[int]) -> "NoReturn":
    """Runs one command, reports its end, and stays until none of its descendants is left."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _wakeup_on_child()
    stdin, stdout, stderr, reply = fds
    worker = socket.socket(fileno=reply)
    worker.setblocking(True)
    failure, failure_w = os.pipe()
    try:
        pid = os.fork()
    except OSError as exc:
        _say(worker, f"failed fork {exc.errno}")
        os._exit(0)
    if pid == 0:
        _become(request, (stdin, stdout, stderr), failure_w)
    for fd in (stdin, stdout, stderr, failure_w):
        os.close(fd)
    del request
    with os.fdopen(failure, "rb") as pipe:
        failed = pipe.read()
    if failed:
        os.waitpid(pid, 0)
        _say(worker, f"failed {failed.decode()}")
        os._exit(0)
    _say(worker, f"started {pid}")
    while True:
        ended, alone = _reap(pid)
        if ended is not None:
            _say(worker, f"ended {ended}")
        if alone:
            os._exit(0)
        ready, _, _ = select.select([worker.fileno(), wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
        if worker.fileno() in ready:
            # Whether it said something or closed (ECONNRESET where it left lines unread): the tree has to end.
            kill_tree()
            os._exit(0)


def _become(request: dict[str, object], fds: tuple[int, int, int], failure: int) -> "NoReturn":
    """The child: a session of its own, three descriptors, default signals; then the command's program."""
    stage = "prepare"
    try:
        argv = request["argv"]
        env = request["env"]
        assert isinstance(argv, list) and isinstance(env, dict)
        os.setsid()
        os.umask(0o022)
        # Move the three out of the way first: one of them may itself be 0, 1 or 2.
        high = [os.dup(fd) for fd in fds]
        for target, fd in enumerate(high):
            os.dup2(fd, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != failure:
                try:
                    os.close(int(name))
                except OSError:
                    continue
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        stage = "user"
        _limit_and_become(request.get("ids"))
        stage = "chdir"
        os.chdir(str(request["cwd"]))
        stage = "exec"
        os.execvpe(argv[0], argv, env)
    except OSError as exc:
        os.write(failure, f"{stage} {exc.errno}".encode())
    except BaseException:
        os.write(failure, f"{stage} 0".encode())
    os._exit(127)


def _limit_and_become(ids: object) -> None:
    """The command's place in the queue when memory ends, its limits, and its own user."""
    _prctl(PR_SET_DUMPABLE, 1)
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) < MORE_KILLABLE:
                file.write(str(MORE_KILLABLE))
    except OSError:
        # A kernel, or a /proc, that does not let it: then all are as likely.
        pass
    if PROCESSES:
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES[0], PROCESSES[0]))
    if isinstance(ids, list):
        uid, gid, *others = ids
        os.setgroups(others)
        os.setgid(gid)
        os.setuid(uid)


def kill_tree() -> None:
    """Kills every descendant of this process and reaps them.

    All are stopped before any is killed, so that none can fork while its siblings die. Ends only when the kernel says
    that there is no child left.
    """
    pause = 0.001
    while True:
        stopped: set[tuple[int, int]] = set()
        for _ in range(100):
            new = [process for process in descendants(os.getpid()) if process not in stopped]
            if not new:
                break
            for process in new:
                _signal(process, signal.SIGSTOP)
            stopped.update(new)
        for process in stopped:
            _signal(process, signal.SIGKILL)
        _, alone = _reap()
        if alone:
            return
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def descendants(root: int) -> "Iterator[tuple[int, int]]":
    """(pid, start time) of all that descends from `root`, without it."""
    waiting = [root]
    while waiting:
        for pid in _children(waiting.pop()):
            started = _start_time(pid)
            if started is not None:
                yield pid, started
                waiting.append(pid)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.extend(int(child) for child in file.read().split())
    except FileNotFoundError:
        # Gone meanwhile, or a kernel without this file.
        return found if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else _children_by_scan(pid)
    except (ProcessLookupError, PermissionError):
        pass
    return found


def _children_by_scan(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat(int(name))
            if fields and int(fields[1]) == parent:
                found.append(int(name))
    return found


def _start_time(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on (proc(5), fields 3 and up)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _signal(process: tuple[int, int], number: signal.Signals) -> None:
    """Signals a process through a pidfd, and only if the pid still means the process that was seen."""
    pid, started = process
    try:
        handle = os.pidfd_open(pid)
    except OSError as exc:
        if exc.errno == errno.ENOSYS and _start_time(pid) == started:
            os.kill(pid, number)
        return
    try:
        if _start_time(pid) == started:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        pass
    finally:
        os.close(handle)


def _reap(main_pid: int | None = None) -> tuple[int | None, bool]:
    """Reaps what has ended: (wait status of `main_pid` if it was among them, whether no child is left)."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, True
        if pid == 0:
            return status, False
        if pid == main_pid:
            status = ended


def _receive(control: socket.socket, descriptors: int) -> tuple[bytes, list[int]] | None:
    """One request: its body and descriptors; None at the end of the stream."""
    header, fds = _receive_fds(control, 8, descriptors)
    header = header + _read(control, 8 - len(header)) if header else header
    if len(header) < 8:
        return None
    (length,) = struct.unpack("!Q", header)
    body = _read(control, length)
    return (body, fds) if len(body) == length and len(fds) == descriptors else None


def _receive_fds(control: socket.socket, length: int, most: int) -> tuple[bytes, list[int]]:
    """At most `length` bytes and the descriptors that came with them; no bytes at the end of the stream."""
    fds = array.array("i")
    sent, ancillary, _, _ = control.recvmsg(length, socket.CMSG_SPACE(most * fds.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return sent, list(fds)


def _control_socket(fd: int) -> socket.socket:
    control = socket.socket(fileno=fd)
    # Celery and kombu set a limit for all new sockets of the worker now and then, which makes them non-blocking.
    control.setblocking(True)
    control.set_inheritable(False)
    return control


def _read(control: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = control.recv(min(length - len(data), 1 << 20))
        if not more:
            break
        data += more
    return bytes(data)


def _say(worker: socket.socket, line: str) -> None:
    try:
        worker.sendall(line.encode() + b"\n")
    except OSError:
        # Nobody listens any more: the closed socket is seen by the next select, which ends the tree.
        return


def _wakeup_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return read


def _prctl(option: int, value: int | bytes) -> None:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if LIBC.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        serve_nursery(int(sys.argv[2]))
    else:
        ward_alone(int(sys.argv[2]), *sys.argv[3:])
