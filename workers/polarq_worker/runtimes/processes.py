"""The worker's end of a sandbox's warden: starts commands, learns how they ended, kills trees."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import marshal
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.nursery import NURSERY, START_S, Walls, WardenLost

__all__ = ["Command", "CouldNotStart", "Descriptors", "ProcessTree", "Walls", "WardenLost", "uninterrupted"]

SPAWN_THREADS = 4
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
    """The command's program was not reached. `stage` is fork, user, chdir or exec."""

    def __init__(self, stage: str, number: int) -> None:
        self.stage = stage
        self.number = number
        super().__init__(f"{stage}: {os.strerror(number)}")


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
        self.killed = False
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
        self.killed = True
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


class ProcessTree:
    """A warden and all that runs under it."""

    def __init__(self, stderr: Path, walls: Walls | None = None) -> None:
        self._stderr = stderr
        self._walls = walls
        self._control: socket.socket | None = None
        self._lock = threading.Lock()
        self.warden_pid = 0
        """As this process sees it; 0 when there is none, or nobody said."""

    async def start(self) -> None:
        """Raises `RuntimeFault`."""
        try:
            await uninterrupted(self._in_thread(self._spawn))
        except OSError as exc:
            raise RuntimeFault(f"the sandbox's first process could not be started: {exc.strerror or exc}") from exc
        except WardenLost:
            raise RuntimeFault(f"the sandbox's first process ended at once: {self.last_words()}") from None

    async def run(
        self,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        fds: Descriptors,
        ids: Sequence[int] | None = None,
    ) -> Command:
        """Hands a command to the warden. `ids`: user, group and other groups that it runs as, None: the warden's own.
        Raises `WardenLost`; the descriptors are closed in any case."""
        as_user = {} if ids is None else {"ids": list(ids)}
        body = marshal.dumps({"argv": list(argv), "cwd": cwd, "env": dict(env), **as_user})
        ours, theirs = socket.socketpair()
        try:
            await uninterrupted(self._in_thread(self._send, body, fds, theirs))
            _, command = await asyncio.get_running_loop().create_unix_connection(Command, sock=ours)
        except BaseException:
            # A keeper whose socket is closed ends what it started.
            ours.close()
            raise
        return command

    async def door(self, port: int) -> socket.socket:
        """A socket that listens on the port of the sandbox's loopback. Raises `WardenLost`, `OSError`."""
        return await uninterrupted(asyncio.to_thread(self._door, port))

    async def end(self) -> bool:
        """Ends all that runs, whoever its parent is by now; whether the kernel confirmed it. Raises `WardenLost`."""
        return await uninterrupted(asyncio.to_thread(self._end))

    def hung_up(self) -> bool:
        """Whether the warden is gone, as far as its socket tells."""
        if self._control is None:
            return True
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLHUP | select.POLLRDHUP)
        return bool(poll.poll(0))

    async def stop(self) -> bool:
        """Kills everything under the warden; whether it confirmed within `KILL_S` that nothing is left."""
        control, self._control = self._control, None
        if control is None:
            return True
        if await uninterrupted(asyncio.to_thread(_over, control)):
            return True
        if self._walls is not None and self.warden_pid:
            # Whatever holds it up, the kernel ends all of its namespace with it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.warden_pid, signal.SIGKILL)
        return False

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
            self._control, self.warden_pid = NURSERY.warden(stderr.fileno(), self._walls)

    def _end(self) -> bool:
        with self._ask({"end": True}) as answer:
            answer.settimeout(KILL_S)
            try:
                said = answer.recv(64)
            except TimeoutError:
                return False
        if not said:
            raise WardenLost
        return said == b"ended\n"

    def _ask(self, request: dict[str, object]) -> socket.socket:
        """Sends what is no command; where it is answered."""
        ours, theirs = socket.socketpair()
        try:
            nothing = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC) for _ in range(3)]
            self._send(marshal.dumps(request), Descriptors(*nothing), theirs)
        except BaseException:
            ours.close()
            raise
        return ours

    def _door(self, port: int) -> socket.socket:
        with self._ask({"door": port}) as ours:
            ours.settimeout(START_S)
            said, fds, _, _ = socket.recv_fds(ours, 64, 1)
            if said.startswith(b"failed"):
                number = int(said.split()[2])
                raise OSError(number, os.strerror(number))
            if not fds:
                raise WardenLost
        return socket.socket(fileno=fds[0])

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
    said = b""
    with control:
        try:
            control.shutdown(socket.SHUT_WR)
            control.settimeout(KILL_S)
            while data := control.recv(64):
                said += data
        except OSError:
            # It was killed, or something of it does not die.
            return b"over\n" in said
    return b"over\n" in said
