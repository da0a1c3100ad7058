"""Several processes behind one address, each session always in the same one.

The front accepts connections, looks at the first bytes without taking them, and hands the connection itself to the
process that the session belongs to; from then on it is not in the way. What a session must be remembered for (calls
under way, sampled turns, its rate) is so in one place. A connection that carries several sessions is right for the
first; calls of the others are passed on from process to process (`peers`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from polarq.errors import PolarqError
from polarq.store.grants import digest_of
from polarq_proxy.carriers import PEEKED, session_in_head
from polarq_proxy.listening import SILENT_S
from polarq_proxy.peer_folder import PeerFolder

log = logging.getLogger("polarq.proxy")

READY = b"r"
_FAILED = b"!"
"""What a process says in place of READY, and then why."""
_SAID_BYTES = 4096
START_S = 60.0
STOP_S = 15.0
_RESTART_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_BUSY_S = 0.005


class DidNotStart(PolarqError):
    """A process of the proxy ended before it was ready; the message is its own."""


def told_front(channel_fd: int, failure: PolarqError) -> bool:
    """Says to the front why this process does not start; False: nobody listens there."""
    try:
        os.write(channel_fd, _FAILED + str(failure).encode()[: _SAID_BYTES - 1])
    except OSError:
        return False
    return True


def owner_of(session: str | None, processes: int) -> int:
    """Which process a session belongs to; without one, the first."""
    return int(digest_of(session)[:8], 16) % processes if session else 0


class Member:
    """One process, started again when it dies."""

    def __init__(self, index: int, command: Sequence[str], keeps: Sequence[int]) -> None:
        """`keeps`: file descriptors that it holds as long as it lives."""
        self.index = index
        self._command = command
        self._keeps = keeps
        self._channel: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()

    async def start(self) -> None:
        """Raises `DidNotStart`."""
        await self._spawn()
        self._watch = asyncio.create_task(self._keep_running())

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            self._process = await asyncio.create_subprocess_exec(
                *self._command, "--channel", str(theirs.fileno()), pass_fds=[theirs.fileno(), *self._keeps]
            )
        finally:
            theirs.close()
        try:
            async with asyncio.timeout(START_S):
                said = await asyncio.get_running_loop().sock_recv(ours, _SAID_BYTES)
        except TimeoutError:
            said = b""
        if said != READY:
            ours.close()
            if self._process.returncode is None:
                self._process.kill()
            raise DidNotStart(
                said.removeprefix(_FAILED).decode("utf-8", "replace")
                or f"process {self.index} of the proxy did not start; see what it said before"
            )
        self._channel = ours
        self.ready.set()

    async def _keep_running(self) -> None:
        tries = 0
        while True:
            assert self._process is not None
            await self._process.wait()
            self.ready.clear()
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            log.error("process %d of the proxy ended (%s) and is started again", self.index, self._process.returncode)
            await asyncio.sleep(_RESTART_S[min(tries, len(_RESTART_S) - 1)])
            try:
                await self._spawn()
                tries = 0
            except (DidNotStart, OSError) as exc:
                tries += 1
                log.error("process %d of the proxy does not start: %s", self.index, exc)

    async def take(self, connection: socket.socket) -> None:
        """Hands a connection over; waits while the process is being started."""
        while True:
            await self.ready.wait()
            channel = self._channel
            if channel is None:
                continue
            try:
                socket.send_fds(channel, [b"c"], [connection.fileno()])
                return
            except BlockingIOError:
                await asyncio.sleep(_BUSY_S)
            except OSError:
                self.ready.clear()  # it has just died; the watch starts it again

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class Front:
    """Accepts on `listening` and hands connections to `processes` members."""

    def __init__(self, listening: Sequence[socket.socket], processes: int, arguments: Sequence[str]) -> None:
        self._listening = listening
        self._peers = PeerFolder()
        command = [sys.executable, "-m", "polarq_proxy", *arguments, "--parent-pid", str(os.getpid())]
        command += ["--peers", str(self._peers.path), "--processes", str(processes)]
        self.members = [
            Member(index, [*command, "--process", str(index)], [self._peers.held]) for index in range(processes)
        ]
        self._running: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises `DidNotStart`; `stop` ends what was started."""
        starting = [asyncio.create_task(member.start()) for member in self.members]
        await asyncio.wait(starting, return_when=asyncio.FIRST_EXCEPTION)
        failed = [failure for task in starting if task.done() and (failure := task.exception()) is not None]
        if failed:
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            raise failed[0]
        for listening in self._listening:
            self._begin(self._accept(listening))

    async def stop(self) -> None:
        for task in set(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))
        for listening in self._listening:
            listening.close()
        await asyncio.gather(*(member.stop() for member in self.members))
        self._peers.close()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as exc:  # no file descriptors left, or the peer has gone already
                log.warning("a connection could not be accepted: %s", exc)
                await asyncio.sleep(0.05)
                continue
            self._begin(self._hand_over(connection))

    async def _hand_over(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(SILENT_S):
                    session = await peeked_session(connection)
            except (TimeoutError, OSError):
                return  # it said nothing
            await self.members[owner_of(session, len(self.members))].take(connection)


async def peeked_session(connection: socket.socket) -> str | None:
    """The session that a connection's first request carries. Nothing is taken from the connection. Raises `OSError`
    when it is closed before it says."""
    connection.setblocking(False)
    seen = -1
    while True:
        try:
            head = connection.recv(PEEKED, socket.MSG_PEEK)
        except BlockingIOError:
            await _readable(connection)
            continue
        if not head:
            raise ConnectionResetError("closed before it said anything")
        enough, session = session_in_head(head)
        if enough:
            return session
        if len(head) == seen:
            # What is there is not enough and stays readable: look again when more may have come.
            await asyncio.sleep(_BUSY_S)
        seen = len(head)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


def peer_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"
