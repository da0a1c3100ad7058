"""A process of the worker's own that forks the wardens of its sandboxes."""

from __future__ import annotations

import atexit
import marshal
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WARDEN = Path(__file__).with_name("warden.py")
LOADER = "import marshal\nwith open('/proc/self/fd/0', 'rb') as file: exec(marshal.load(file))"
"""Runs a compiled program that is its standard input: compiling would take a third of a warden's start."""
START_S = 60.0
TRIES = 4
"""Nurseries that are tried, each started after the one before was found dead."""
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: process, user, group."""


class WardenLost(Exception):
    """The sandbox's warden is gone, and with it what it kept."""


@dataclass(frozen=True, slots=True)
class Walls:
    """How a warden comes into namespaces of its own: bubblewrap's command, in which the word CONTROL stands for the
    control socket's number, and (where, options) of what is mounted before."""

    bwrap: Sequence[str]
    overlays: Sequence[tuple[str, str]] = ()
    own_users: bool = False
    """Of a warden that is root: in a user namespace of its own, in which everybody is who he is outside."""


class Nursery:
    """This process' nursery of wardens: a process that forks them ready made, since starting a Python for each takes
    ten times as long. Started when it is first needed, and again should somebody have killed it; it ends with us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket | None = None
        self._generation = 0
        """Of the nursery: one that was killed is still seen for a while, by us and by wardens that it forked."""

    def warden(self, stderr: int, walls: Walls | None) -> tuple[socket.socket, int]:
        """A new warden's control socket, and its pid as we see it (blocks).

        Raises `OSError`, or `WardenLost` when it ended at once.
        """
        for _ in range(TRIES):
            ours, theirs = socket.socketpair()
            # Then the kernel says who writes.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            try:
                with theirs:
                    generation = self._ask(walls, theirs.fileno(), stderr)
                ours.settimeout(START_S)
                lines, pid = _until_ready(ours)
            except BaseException:
                ours.close()
                raise
            if b"ready" in lines:
                ours.settimeout(None)
                return ours, pid
            ours.close()
            failed = [line.split()[1] for line in lines if line.startswith(b"failed")]
            if failed:
                raise OSError(int(failed[0]), os.strerror(int(failed[0])))
            if b"born" in lines:
                raise WardenLost
            # The nursery died before it came to us, whatever it looks like yet.
            self._give_up(generation)
        raise WardenLost

    def _ask(self, walls: Walls | None, *fds: int) -> int:
        """Sends a request; which nursery it went to."""
        request: dict[str, object] = {}
        if walls is not None:
            request = {"bwrap": list(walls.bwrap), "overlays": list(walls.overlays), "own_users": walls.own_users}
        body = marshal.dumps(request)
        with self._lock:
            for _ in range(TRIES):
                if self._asked is None:
                    self._start()
                assert self._asked is not None
                try:
                    socket.send_fds(self._asked, [struct.pack("!Q", len(body))], fds)
                    self._asked.sendall(body)
                except (BrokenPipeError, ConnectionResetError):
                    self._end()
                else:
                    return self._generation
        raise WardenLost

    def _give_up(self, generation: int) -> None:
        with self._lock:
            if generation == self._generation:
                self._end()

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs, os.fdopen(os.memfd_create("polarq-warden"), "wb") as source:
            marshal.dump(compile(WARDEN.read_bytes(), WARDEN.name, "exec"), source)
            source.flush()
            # argv[0] and the nameless script keep `pkill -f python` of an agent away from it; through /proc/self/exe
            # the interpreter still finds its library.
            self._process = subprocess.Popen(
                ["/proc/self/exe", "-E", "-s", "-S", "-P", "-c", LOADER, "nursery", str(theirs.fileno())],
                executable=sys.executable,
                stdin=source,
                stdout=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(True)
        self._asked = ours
        if self._generation == 0:
            atexit.register(self._at_exit, os.getpid())
        self._generation += 1

    def _end(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _at_exit(self, of: int) -> None:
        # A fork of the process that started it has no say.
        if os.getpid() == of:
            self._end()


NURSERY = Nursery()
"""This process' own; started when it is first needed."""


def _until_ready(control: socket.socket) -> tuple[list[bytes], int]:
    """What was said until a warden is ready or nobody is left to say it, and the warden's process."""
    said, pid = b"", 0
    while b"ready\n" not in said:
        data, ancillary, _, _ = control.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not data:
            break
        said += data
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
    return said.split(b"\n"), pid
