"""The worker's end of a sandbox's warden: starts commands, learns how they ended, kills trees."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from polarq.errors import RuntimeFault

WARDEN = Path(__file__).with_name("warden.py")
SPAWN_THREADS = 4
START_S = 60.0
KILL_S = 10.0
"""How long the kernel may take to end killed processes (one in uninterruptible I/O ends only when that returns)."""

_spawners = ThreadPoolExecutor(SPAWN_THREADS, thread_name_prefix="polarq-spawn")
"""Starting a process blocks for milliseconds, and hundreds may start at once: off the event loop, few at a time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a command gets as its 0, 1 and 2; closed here as soon as the command has them."""

    stdin: int
    stdout: int
    stderr: int

    def close(self) -> None:
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)


class CouldNotStart(Exception):
    """The command's program was not reached. `stage` is fork, chdir or exec."""

    def __init__(self, stage: str, number: int) -> None:
        self.stage = stage
        self.number = number
        super().__init__(f"{stage}: {os.strerror(number)}")


class WardenLost(Exception):
    """The sandbox's warden is gone, and with it what it kept."""


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Finishes `work` even when this task is cancelled (once or many times), then lets the cancellation go on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            if task.cancelled():
                raise
            cancelled = exc
        except Exception:
            break
    if cancelled is not None:
        task.exception()
        raise cancelled
    return task.result()


class Command(asyncio.Protocol):
    """One started command: its end, and its whole tree's."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._lines: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.gone: asyncio.Future[None] = loop.create_future()
        """Done when nothing of the tree is left (or its keeper was killed, which `WardenLost` tells)."""

    async def started(self) -> None:
        """Raises `CouldNotStart` or `WardenLost`."""
        words = await self._lines.get()
        if words[:1] == [b"failed"]:
            raise CouldNotStart(words[1].decode(), int(words[2]))
        if words[:1] != [b"started"]:
            raise WardenLost

    async def ended(self) -> int:
        """The exit code of the main process, negative for the signal that killed it. Raises `WardenLost`."""
        words = await self._lines.get()
        if words[:1] != [b"ended"]:
            raise WardenLost
        return os.waitstatus_to_exitcode(int(words[1]))

    async def kill(self) -> bool:
        """Kills the whole tree; whether the kernel confirmed within `KILL_S` that nothing of it is left."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"k")
        try:
            await asyncio.wait_for(asyncio.shield(self.gone), KILL_S)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Lets go of the command. What still lives of it is killed."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line.split())

    def connection_lost(self, exc: Exception | None) -> None:
        self._lines.put_nowait([])
        if not self.gone.done():
            self.gone.set_result(None)


class Nursery:
    """This process' nursery of wardens: a process that forks them ready made, since starting a Python for each takes
    ten times as long. Started when it is first needed, and again should somebody have killed it; it ends with us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: socket.socket | None = None

    def warden(self, stderr: int) -> socket.socket:
        """A new warden's control socket (blocks). Raises `OSError`, or `WardenLost` when it ended at once."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._ask(theirs.fileno(), stderr)
                ours.settimeout(START_S)
                word, *number = ours.recv(64).split() or [b""]
                if word == b"ready":
                    ours.settimeout(None)
                    return ours
                if word == b"failed":
                    raise OSError(int(number[0]), os.strerror(int(number[0])))
            except BaseException:
                ours.close()
                raise
            # The nursery was killed before it came to us.
            ours.close()
        raise WardenLost

    def _ask(self, *fds: int) -> None:
        with self._lock:
            for _ in range(2):
                if self._asked is None:
                    self._start()
                assert self._asked is not None
                try:
                    socket.send_fds(self._asked, [b"w"], fds)
                except (BrokenPipeError, ConnectionResetError):
                    self._end()
                else:
                    return
        raise WardenLost

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs, WARDEN.open("rb") as source:
            # argv[0] and the script's name keep `pkill -f python` of an agent away from it; through /proc/self/exe
            # the interpreter still finds its library.
            self._process = subprocess.Popen(
                ["/proc/self/exe", "-E", "-s", "-S", "-P", "/proc/self/fd/0", str(theirs.fileno())],
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

    def _end(self) -> None:
        if self._asked is not None:
            self._asked.close()
            self._asked = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_nursery = Nursery()


class ProcessTree:
    """A warden and all that runs under it."""

    def __init__(self, stderr: Path) -> None:
        self._stderr = stderr
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    async def start(self) -> None:
        """Raises `RuntimeFault`."""
        try:
            await uninterrupted(self._in_thread(self._spawn))
        except OSError as exc:
            raise RuntimeFault(f"the sandbox's first process could not be started: {exc.strerror or exc}") from exc
        except WardenLost:
            raise RuntimeFault(f"the sandbox's first process ended at once: {self.last_words()}") from None

    async def run(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], fds: Descriptors) -> Command:
        """Hands a command to the warden. Raises `WardenLost`; the descriptors are closed in any case."""
        body = json.dumps({"argv": list(argv), "cwd": cwd, "env": dict(env)}).encode()
        ours, theirs = socket.socketpair()
        try:
            await uninterrupted(self._in_thread(self._send, body, fds, theirs))
            _, command = await asyncio.get_running_loop().create_unix_connection(Command, sock=ours)
        except BaseException:
            # A keeper whose socket is closed ends what it started.
            ours.close()
            raise
        return command

    async def stop(self) -> bool:
        """Kills everything under the warden; whether it confirmed within `KILL_S` that nothing is left."""
        control, self._control = self._control, None
        if control is None:
            return True
        return await uninterrupted(asyncio.to_thread(_over, control))

    def last_words(self) -> str:
        """What the warden printed before it died, one line."""
        try:
            lines = self._stderr.read_text(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")

    @staticmethod
    async def _in_thread(function: Callable[..., None], *args: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(_spawners, function, *args)

    def _spawn(self) -> None:
        with self._stderr.open("wb") as stderr:
            self._control = _nursery.warden(stderr.fileno())

    def _send(self, body: bytes, fds: Descriptors, reply: socket.socket) -> None:
        try:
            with self._lock:
                if self._control is None:
                    raise WardenLost
                header = struct.pack("!Q", len(body))
                handed = [fds.stdin, fds.stdout, fds.stderr, reply.fileno()]
                socket.send_fds(self._control, [header], handed)
                self._control.sendall(body)
        except OSError as exc:
            if exc.errno in {errno.EPIPE, errno.ECONNRESET, errno.EBADF}:
                raise WardenLost from exc
            raise
        finally:
            reply.close()
            fds.close()


def _over(control: socket.socket) -> bool:
    """Ends a warden (blocks); whether it said within `KILL_S` that nothing is left."""
    with control:
        try:
            control.shutdown(socket.SHUT_WR)
            control.settimeout(KILL_S)
            return control.recv(64) == b"over\n"
        except OSError:
            # It was killed, or something of it does not die.
            return False
