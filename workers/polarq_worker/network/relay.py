"""The worker's side of its relay: a child process that carries what goes through the doors of its sandboxes.

It is started when the first door is opened, watched, and started again. The worker keeps the listening sockets: a new
relay gets them all, so that connections in flight break and new ones work. What a killed relay had refused within its
last tenth of a second is not in the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarq.errors import RuntimeFault
from polarq_worker.network.channel import Channel, Message
from polarq_worker.network.denials import Denials
from polarq_worker.network.model_door import ProxyAddress

log = logging.getLogger("polarq.worker.network")

OPEN_S = 60.0
"""How long a door may take to be open, with a relay that has to be started for it."""
CLOSE_S = 10.0
_STOP_S = 5.0
_TRIES = 4
"""How often in a row it may fail to start before whoever waits for it is told."""
_PAUSE_S = 0.05
_RESTART_CAP_S = 5.0
_RESOLVERS = "16"
"""Names that are looked up at once."""


@dataclass(frozen=True, slots=True)
class EgressRules:
    """What an egress door lets through; see `rules.Rules`."""

    policy: str
    allowed: Sequence[str] = ()
    closed: Sequence[tuple[str, int]] = ()
    model_port: int | None = None
    """Where the same sandbox has the model; None: it has none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "allowed": list(self.allowed),
            "closed": [list(one) for one in self.closed],
            "model_port": self.model_port,
        }


@dataclass(eq=False)
class Door:
    """One listening socket of a sandbox, held here as long as it is open."""

    number: int
    listener: socket.socket
    rules: EgressRules | None
    """None: it leads to the model."""
    open: asyncio.Future[str]
    """Its result: why it could not be opened; empty when it is open."""
    closed: asyncio.Future[None]
    earlier: Denials = field(default_factory=Denials)
    """What relays that are dead had said."""
    now: Denials = field(default_factory=Denials)
    """What the present one has said."""

    @property
    def denials(self) -> Denials:
        both = Denials(self.earlier.counts, self.earlier.more)
        both.add(self.now)
        return both


class Relay:
    """One worker's. `proxy` says where the node's proxy listens now. Used on one loop."""

    def __init__(self, log_path: Path, proxy: Callable[[], ProxyAddress]) -> None:
        self._log_path = log_path
        self._proxy = proxy
        self._doors: dict[int, Door] = {}
        self._numbers = itertools.count(1)
        self._channel: Channel | None = None
        """None: there is none that is ready."""
        self._process: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._stopping = False
        self._problem = "it did not start in time"
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self, listener: socket.socket, rules: EgressRules | None) -> Door:
        """Takes the socket over; without rules it leads to the model. Raises `RuntimeFault`."""
        loop = asyncio.get_running_loop()
        door = Door(next(self._numbers), listener, rules, loop.create_future(), loop.create_future())
        self._doors[door.number] = door
        if self._running is None:
            self._running = loop.create_task(self._keep_running(), name="relay")
        try:
            async with asyncio.timeout(OPEN_S):
                await self._hand_over(door)
                problem = await asyncio.shield(door.open)
        except TimeoutError:
            problem = self._problem
        except BaseException:
            self._forget(door)
            raise
        if problem:
            self._forget(door)
            raise RuntimeFault(f"the relay of the node's sandboxes: {problem} (its log: {self._log_path})")
        return door

    async def close(self, door: Door) -> Denials:
        """No connections through it any more; what it has refused."""
        if door.number in self._doors:
            try:
                async with asyncio.timeout(CLOSE_S):
                    if await self._tell({"do": "close", "door": door.number}):
                        await asyncio.shield(door.closed)
            except TimeoutError:
                log.error("the relay does not answer; it is started anew")
                self._kill()
            finally:
                self._forget(door)
        return door.denials

    async def aclose(self) -> None:
        """Ends it; doors that are open lead nowhere then."""
        self._stopping = True
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()
        for door in list(self._doors.values()):
            self._forget(door)

    # --- its process

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping:
            failures += 1
            try:
                channel = await self._spawn()
            except OSError as exc:
                self._problem = f"it could not be started: {exc}"
                log.error("the relay: %s", self._problem)
            else:
                try:
                    if await self._serve(channel):
                        failures = 0
                finally:
                    self._gone(channel)
                await self._reaped()
            if failures >= _TRIES:
                for door in self._doors.values():
                    if not door.open.done():
                        door.open.set_result(self._problem)
            if not self._stopping:
                await asyncio.sleep(min(_RESTART_CAP_S, _PAUSE_S * 2**failures))

    async def _spawn(self) -> Channel:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs, self._log_path.open("ab") as sink:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "polarq_worker.network", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                    env=_env(),
                )
        except BaseException:
            ours.close()
            raise
        return Channel(ours)

    async def _serve(self, channel: Channel) -> bool:
        """Until it is gone; whether it had become ready."""
        ready = False
        while (received := await channel.receive()) is not None:
            message, _ = received
            with contextlib.suppress(OSError):  # its end is seen by the next receive
                if message["say"] == "ready":
                    ready = True
                    await self._say_where(channel)
                    self._channel = channel
                    for door in list(self._doors.values()):
                        await self._hand_over(door)
                elif message["say"] == "where":
                    await self._say_where(channel)
                else:
                    self._heard(message)
        return ready

    def _heard(self, message: Message) -> None:
        door = self._doors.get(message["door"])
        if door is None:
            return
        if message["say"] == "opened":
            if not door.open.done():
                door.open.set_result(message["problem"])
            elif message["problem"]:
                log.error("the relay that was started again cannot open a door: %s", message["problem"])
            return
        door.now = Denials({**door.now.counts, **message["counts"]}, message["more"])
        if message["say"] == "closed" and not door.closed.done():
            door.closed.set_result(None)

    async def _say_where(self, channel: Channel) -> None:
        await channel.send({"do": "proxy", "at": self._proxy().as_json()})

    async def _hand_over(self, door: Door) -> None:
        rules = None if door.rules is None else door.rules.as_json()
        await self._tell({"do": "open", "door": door.number, "rules": rules}, [door.listener.fileno()])

    async def _tell(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Whether there was one to tell it to."""
        if (channel := self._channel) is None:
            return False
        try:
            await channel.send(message, fds)
        except OSError:
            return False
        return True

    def _gone(self, channel: Channel) -> None:
        self._channel = None
        channel.close()
        for door in self._doors.values():
            door.earlier.add(door.now)
            door.now = Denials()
            if not door.closed.done() and door.open.done():
                # Who waits for its last words waits in vain; it is not closed for that.
                door.closed.set_result(None)
                door.closed = asyncio.get_running_loop().create_future()

    async def _reaped(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(_STOP_S):
                code = await self._process.wait()
        except TimeoutError:
            # It has closed its end: it is of no use.
            self._kill()
            code = await self._process.wait()
        if not self._stopping:
            self.restarts += 1
            self._problem = f"it ended with code {code}"
            log.error("the relay ended with code %s and is started again; its log: %s", code, self._log_path)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _forget(self, door: Door) -> None:
        self._doors.pop(door.number, None)
        door.listener.close()


def _env() -> dict[str, str]:
    """The worker's, without what is polarq's: a process that speaks with sandboxes knows no passwords."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLARQ_")}
    return {**env, "UV_THREADPOOL_SIZE": _RESOLVERS}
