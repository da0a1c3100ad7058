"""The relay as a program: `python -m polarq_worker.network FD`, started by a worker that holds the other end of FD.

It gets listening sockets and what they are for, and carries the bytes, so that the worker's own loop does not. It ends
with its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any

from polarq_worker.network.channel import Channel, Message
from polarq_worker.network.denials import Denials
from polarq_worker.network.egress_door import EgressDoor, Model
from polarq_worker.network.model_door import ModelDoor, ProxyAddress, ToProxy
from polarq_worker.network.rules import Rules

log = logging.getLogger("polarq.relay")

TELL_S = 0.1
"""How long refusals are gathered before the worker is told of them."""


class Relay:
    """The doors that one worker has handed over."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._doors: dict[int, ModelDoor | EgressDoor] = {}
        self._proxy = ProxyAddress()
        self._way = ToProxy(lambda: self._proxy, self._lost)
        self._untold: set[int] = set()
        self._telling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the worker is gone."""
        await self._channel.send({"say": "ready"})
        while (received := await self._channel.receive()) is not None:
            message, fds = received
            match message["do"]:
                case "proxy":
                    self._proxy = ProxyAddress(**message["at"])
                case "open":
                    await self._open(message, socket.socket(fileno=fds[0]))
                case "close":
                    await self._close(message["door"])

    async def _open(self, message: Message, listener: socket.socket) -> None:
        number: int = message["door"]
        listener.setblocking(False)
        door: ModelDoor | EgressDoor
        if (rules := message["rules"]) is None:
            door = ModelDoor(self._way)
        else:
            port = rules["model_port"]
            door = EgressDoor(_rules(rules), self._denials(number), model=Model(port, self._way) if port else None)
        try:
            await door.open(listener)
        except OSError as exc:
            listener.close()
            await self._channel.send({"say": "opened", "door": number, "problem": str(exc)})
            return
        self._doors[number] = door
        await self._channel.send({"say": "opened", "door": number, "problem": ""})

    async def _close(self, number: int) -> None:
        if (door := self._doors.pop(number, None)) is not None:
            door.close()
        denied = door.denials if isinstance(door, EgressDoor) else Denials()
        self._untold.discard(number)
        await self._channel.send({"say": "closed", "door": number, "counts": denied.counts, "more": denied.more})

    async def _lost(self) -> None:
        await self._channel.send({"say": "where"})

    def _denials(self, number: int) -> Denials:
        denials = Denials()

        def changed() -> None:
            self._untold.add(number)
            if self._telling is None or self._telling.done():
                self._telling = asyncio.get_running_loop().create_task(self._tell())

        denials.on_change = changed
        return denials

    async def _tell(self) -> None:
        while self._untold:
            await asyncio.sleep(TELL_S)
            untold, self._untold = self._untold, set()
            for number in untold:
                if isinstance(door := self._doors.get(number), EgressDoor):
                    news, more = door.denials.news(), door.denials.more
                    await self._channel.send({"say": "denied", "door": number, "counts": news, "more": more})


def _rules(given: dict[str, Any]) -> Rules:
    return Rules.of(given["policy"], given["allowed"], [(host, port) for host, port in given["closed"]])


def _as_many_files_as_may_be() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    # Ctrl-C in a terminal is the worker's to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _as_many_files_as_may_be()
    end = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(end.fileno(), False)

    async def run() -> None:
        # A worker that is gone ends the relay, in whatever it is.
        with contextlib.suppress(ConnectionError):
            await Relay(Channel(end)).run()

    try:
        import uvloop
    except ImportError:
        asyncio.run(run())
    else:
        uvloop.run(run())


if __name__ == "__main__":
    main()
