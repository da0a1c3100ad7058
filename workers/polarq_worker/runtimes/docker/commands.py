"""One command in a container, from before it is started until nothing is left that could print on its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiodocker import Docker
from aiodocker.execs import Exec
from aiodocker.stream import Stream
from aiohttp import ClientConnectionError

from polarq.errors import RuntimeFault
from polarq_worker.runtimes.docker.daemon import ANSWER_S, asking
from polarq_worker.runtimes.docker.printed import Printed
from polarq_worker.runtimes.docker.records import Records
from polarq_worker.runtimes.docker.shell import Secrets

STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Ending:
    """What the command's shell told. `how` is N, F, E or K of `shell.RUN`; blank: the streams ended without a word."""

    how: str = ""
    why: str = ""
    code: int = 0
    oom_kills: int = 0
    times_full: int = 0


class Command:
    """See the module. `secrets` are nobody else's."""

    def __init__(self, docker: Docker, container: str, secrets: Secrets, out: Printed, err: Printed) -> None:
        self.secrets = secrets
        self.out = out
        self.err = err
        self.pid = ""
        """Of its docker-init, as the sandbox counts; blank: it was not started."""
        self.begun = asyncio.Event()
        """It runs, or will not."""
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.broken: RuntimeFault | None = None
        """Why the daemon did not carry it out, or stopped telling of it."""
        self._docker = docker
        self._container = container
        self._records = {STDOUT: Records(secrets.token), STDERR: Records(secrets.token)}
        self._before = (0, 0)
        self._not_executed = False
        self._ending: Ending | None = None
        self._out_ended = False
        self._exec: Exec | None = None
        self.reading: asyncio.Task[None] | None = None

    def begin(self, argv: Sequence[str], env: Mapping[str, str], user: str) -> None:
        self.reading = asyncio.ensure_future(self._read(argv, env, user))

    async def exit_code(self) -> int | None:
        """Of the outermost process, by the daemon's word; None: it does not know. Raises `RuntimeFault`."""
        if self._exec is None:
            return None
        async with asking("look at a command"):
            code = (await self._exec.inspect())["ExitCode"]
        return None if code is None else int(code)

    async def _read(self, argv: Sequence[str], env: Mapping[str, str], user: str) -> None:
        try:
            async with asking("run a command", None):
                async with asyncio.timeout(ANSWER_S):
                    container = self._docker.containers.container(self._container)
                    self._exec = await container.exec(argv, user=user, environment=dict(env), stdin=True)
                stream = self._exec.start(detach=False)
                try:
                    await told(stream, self.secrets)
                    while (message := await stream.read_out()) is not None:
                        self._take(message.stream, message.data)
                finally:
                    await closed(stream)
        except RuntimeFault as exc:
            self.broken = exc
        finally:
            for number, printed in ((STDOUT, self.out), (STDERR, self.err)):
                printed.add(self._records[number].rest())
            self._settle(self._ending or Ending())
            self.begun.set()
            self.out.close()
            self.err.close()

    def _take(self, number: int, data: bytes) -> None:
        stream = STDERR if number == STDERR else STDOUT
        output, records = self._records[stream].feed(data)
        (self.err if stream == STDERR else self.out).add(output)
        for record in records:
            self._told(stream, record.split())

    def _told(self, stream: int, words: list[str]) -> None:
        match words:
            case ["S", pid, ooms, full] if all(map(str.isdecimal, (pid, ooms, full))):
                self.pid, self._before = pid, (int(ooms), int(full))
                self.begun.set()
            case ["N", why]:
                self._settle(Ending("N", why))
                self.begun.set()
            case ["E"] if stream == STDOUT:
                self._out_ended = True
            case ["F"]:
                self._not_executed = True
            case ["E" | "K" as how, code, ooms, full] if all(map(str.isdecimal, (code, ooms, full))):
                before = self._before
                kind = "F" if self._not_executed else how
                self._ending = Ending(kind, "", int(code), int(ooms) - before[0], int(full) - before[1])
        # Each record lies behind all that the command itself wrote on that stream.
        if self._ending is not None and self._out_ended:
            self._settle(self._ending)

    def _settle(self, ending: Ending) -> None:
        if not self.ended.done():
            self.ended.set_result(ending)


async def said(
    docker: Docker, container: str, argv: Sequence[str], limit_s: float = ANSWER_S, secrets: Secrets | None = None
) -> bytes:
    """What a small script of ours prints, run as root; `secrets` are what it reads first. Raises `RuntimeFault`."""
    found = bytearray()
    async with asking("run a command", limit_s):
        has_input = secrets is not None
        execution = await docker.containers.container(container).exec(argv, user="0:0", stdin=has_input)
        stream = execution.start(detach=False)
        try:
            if secrets is not None:
                await told(stream, secrets)
            while (message := await stream.read_out()) is not None:
                if message.stream == STDOUT:
                    found += message.data
        finally:
            await closed(stream)
    return bytes(found)


async def told(stream: Stream, secrets: Secrets) -> None:
    """Starts what reads them."""
    # One that ended before it read them says why on its streams.
    with suppress(ConnectionError, ClientConnectionError):
        await stream.write_in(secrets.line)


async def closed(stream: Stream) -> None:
    """Closes it, in whatever state: aiodocker's own `close` expects a connection that is still there."""
    response: Any = stream._resp
    if response is not None and response.connection is not None:
        await stream.close()
    else:
        stream._closed = True
