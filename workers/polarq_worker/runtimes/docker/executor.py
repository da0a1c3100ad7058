"""Runs commands in a container: brings them in, waits, kills, and says how they ended."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiodocker import Docker, DockerError

from polarq.contracts.rollout import ExecKind
from polarq.contracts.specs import RuntimeSpec
from polarq.errors import BackendAway, RuntimeFault
from polarq_worker.runtimes.archives.pack import END, Owner, Packer
from polarq_worker.runtimes.base import ExecResult
from polarq_worker.runtimes.docker import shell
from polarq_worker.runtimes.docker.archive import Archive
from polarq_worker.runtimes.docker.commands import Command, Ending, said
from polarq_worker.runtimes.docker.daemon import asking
from polarq_worker.runtimes.docker.outcome import Outcome, refusal, result_of
from polarq_worker.runtimes.docker.printed import Printed
from polarq_worker.runtimes.processes import uninterrupted

IN_ENVIRONMENT = 64 << 10
"""Bytes of a script that travel with the command; a larger one is uploaded first, which takes as long again."""
BEGIN_S = 120.0
"""How long a command that has to be killed may take to be there at all."""
KILL_S = 60.0
DRAIN_S = 10.0
"""How long the last output of a killed command is waited for."""
MORE_ROOM = (0, 512, 16384)
"""Processes beyond the sandbox's limit that whoever kills may need: a fork bomb takes every place there is."""
NEAR = 8
"""Places that are still free when a command, which needs some itself, finds none."""
LOOK_S = 0.1
PORTABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


class Executor:
    """One container's."""

    def __init__(self, docker: Docker, container: str, spec: RuntimeSpec, *, max_processes: int) -> None:
        self.lost = ""
        """Why nothing can be run any more."""
        self.stopping = False
        self._docker = docker
        self._container = container
        self._spec = spec
        self._max_processes = max_processes
        self._commands: set[Command] = set()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        user: str,
        owner: Owner,
        stdin: bytes | None,
        timeout_s: float,
        log: Path | None,
        max_output_bytes: int,
    ) -> ExecResult:
        """`Runtime.exec`, with everything decided that a spec leaves open."""
        begun = time.monotonic()
        if self.lost:
            return ExecResult(ExecKind.SANDBOX_LOST, message=self.lost)
        outs = [Printed(max_output_bytes, log and log.with_name(f"{log.name}.{end}")) for end in ("stdout", "stderr")]
        running = Command(self._docker, self._container, shell.Secrets.new(), outs[0], outs[1])
        self._commands.add(running)
        kind, ending, message = ExecKind.EXITED, Ending(), ""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                argv, env = await self._brought(running.secrets, command, cwd, env, stdin, owner)
                running.begin(argv, env, user)
                ending = await asyncio.shield(running.ended)
        except TimeoutError:
            kind = ExecKind.TIMED_OUT
            message = await uninterrupted(self._end(running))
        except asyncio.CancelledError:
            await uninterrupted(self._end(running))
            raise
        except RuntimeFault as exc:
            kind, message = ExecKind.COULD_NOT_START, str(exc)
            if await self.why_lost():
                kind, message = ExecKind.SANDBOX_LOST, self.lost
        finally:
            self._watch(running)
        result = Outcome(kind, message=message)
        if kind is ExecKind.EXITED:
            program = command[0] if not isinstance(command, str) and command else "bash"
            result = await self._outcome(running, ending, program, cwd, user)
        return result_of(result, running, time.monotonic() - begun)

    async def why_lost(self) -> str:
        """Looks whether the container still runs; blank: it does."""
        if self.lost:
            return self.lost
        try:
            async with asking("look at the sandbox"):
                state = (await self._docker.containers.container(self._container).show())["State"]
        except BackendAway as exc:
            self.lose(str(exc))
        except RuntimeFault as exc:
            gone = getattr(exc, "status", 0) == 404
            self.lose("its container was removed by somebody else" if gone else str(exc))
        else:
            if state.get("OOMKilled") and not state["Running"]:
                self.lose(f"the kernel killed it: {self._memory()} was used up")
            elif not state["Running"]:
                self.lose(f"its container ended with code {state.get('ExitCode')}")
            elif state.get("Paused"):
                self.lose("its container was paused by somebody else")
        return self.lost

    async def end_background(self) -> bool:
        """Kills what commands have left running; whether nothing of it is left."""
        left = [command for command in self._commands if command.reading is not None and not command.reading.done()]
        await asyncio.gather(*(uninterrupted(self._end(command, whole=True)) for command in left))
        if not self.lost:
            # What killed its own docker-init is nobody's.
            await uninterrupted(self._kill("", shell.Secrets.new()))
        return not self.lost

    def lose(self, why: str) -> None:
        self.lost = self.lost or ("it was stopped" if self.stopping else why)

    async def close(self) -> None:
        """The container is gone: nothing is read any more."""
        tasks = [command.reading for command in self._commands if command.reading is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._commands.clear()

    # --- in

    async def _brought(
        self,
        secrets: shell.Secrets,
        command: str | Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        owner: Owner,
    ) -> tuple[list[str], dict[str, str]]:
        script = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else None
        argv = [] if isinstance(command, str) else list(command)
        by_file = script is not None and (len(script) > IN_ENVIRONMENT or not _is_text(script))
        sent = {**env, shell.SHELL: shell.RUN}
        if script is not None and not by_file:
            sent[shell.SCRIPT] = script.decode()
        files = {"sh": script if by_file else None, "in": stdin or None}
        if any(files.values()):
            await Archive(self._docker, self._container).put("bring a command in", _files(secrets.stem, files, owner))
        odd = [f"{key}={sent.pop(key)}" for key in list(sent) if not PORTABLE.match(key)]
        if odd and script is None:
            # A shell in between may drop a variable with a name that it could not have itself.
            argv = ["env", *odd, *argv]
        elif odd:
            sent |= dict(entry.split("=", 1) for entry in odd)
        line = shell.run(cwd=cwd, argv=argv, script=script is not None, in_file=by_file, has_input=bool(stdin))
        return line, sent

    # --- out

    async def _outcome(self, running: Command, ending: Ending, program: str, cwd: str, user: str) -> Outcome:
        oom = ending.oom_kills > 0
        notes = [f"the kernel killed something in it: {self._memory()} was used up"] if oom else []
        if ending.times_full > 0:
            notes.append(f"its limit of {self._max_processes} processes was reached")
        note = "; ".join(notes)
        if ending.how == "E":
            return Outcome(ExecKind.EXITED, exit_code=ending.code, message=note, out_of_memory=oom)
        if ending.how == "K":
            return Outcome(ExecKind.SIGNALLED, signal=ending.code - 128, message=note, out_of_memory=oom)
        if ending.how == "F":
            why = f"there is no program '{program}' (or the interpreter it names is missing)"
            if ending.code != 127:
                why = f"'{program}' is there and cannot be executed"
            return Outcome(ExecKind.COULD_NOT_START, message="; ".join([why, *notes]), silent=True)
        if ending.how == "N":
            return Outcome(ExecKind.COULD_NOT_START, message=refusal(ending.why, cwd, user), silent=True)
        return await self._without_a_word(running)

    async def _without_a_word(self, running: Command) -> Outcome:
        """The streams ended, and the command's shell did not say how it went."""
        if not await self._still_runs():
            return Outcome(ExecKind.SANDBOX_LOST, message=self.lost)
        try:
            code = await running.exit_code()
            if running.pid and code is not None and code > 128:
                # Whoever killed it meant its whole process group.
                return Outcome(ExecKind.SIGNALLED, signal=code - 128)
            if await self._is_full():
                full = f"the sandbox's limit of {self._max_processes} processes is reached"
                return Outcome(ExecKind.COULD_NOT_START, message=full, silent=True)
        except RuntimeFault:
            if await self.why_lost():
                return Outcome(ExecKind.SANDBOX_LOST, message=self.lost)
        words = [str(running.broken)] if running.broken else []
        words += [
            line for out in (running.out, running.err) for line in out.value().decode("utf-8", "replace").split("\n")
        ]
        first = next((" ".join(word.split()) for word in words if word.strip()), "the daemon does not say why")
        return Outcome(ExecKind.COULD_NOT_START, message=first[:500], silent=True)

    async def _still_runs(self) -> bool:
        """What the daemon says of a container that dies just now comes late: only one that answers runs."""
        try:
            async with asyncio.timeout(BEGIN_S):
                while not await self.why_lost():
                    with suppress(RuntimeFault):
                        if await said(self._docker, self._container, ["/bin/sh", "-c", "echo here"]) == b"here\n":
                            return True
                        if await self._is_full():
                            return True
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            self.lose("its container runs, and no command can be started in it")
        return False

    async def _is_full(self) -> bool:
        async with asking("count the sandbox's processes"):
            stats = await self._docker.containers.container(self._container).stats(stream=False)
        # A container that has just gone has none.
        pids: dict[str, Any] = (stats[0].get("pids_stats") if stats else None) or {}
        return int(pids.get("current") or 0) + NEAR >= self._max_processes

    def _memory(self) -> str:
        limit = self._spec.memory_mb
        return f"the sandbox's memory ({limit} MB)" if limit else "the machine's memory"

    # --- kill

    async def _end(self, running: Command, *, whole: bool = False) -> str:
        """Kills a command with all that descends from it; a note for its result. `whole`: also what a command left that
        has ended by itself."""
        if running.reading is None:
            return ""
        try:
            async with asyncio.timeout(BEGIN_S):
                await running.begun.wait()
        except TimeoutError:
            return await self._kill_all()
        if running.ended.done() and not whole:
            return ""
        note = await self._kill(running.pid, running.secrets)
        if not self.lost and running.reading is not None:
            await asyncio.wait([running.reading], timeout=DRAIN_S)
        return note

    async def _kill(self, pid: str, secrets: shell.Secrets) -> str:
        """As `shell.KILL` says; a note where more than that had to be killed."""
        for room in MORE_ROOM:
            try:
                if room:
                    await self._update(self._max_processes + room)
                words = await said(self._docker, self._container, shell.kill(pid), KILL_S, secrets)
            except RuntimeFault:
                if await self.why_lost():
                    return ""
                continue
            if f"gone {secrets.token}\n".encode() in words:
                if room:
                    await self._update(self._max_processes)
                return ""
        return await self._kill_all()

    async def _kill_all(self) -> str:
        with suppress(RuntimeFault):
            async with asking("kill the sandbox"):
                await self._docker.containers.container(self._container).kill()
        self.lose("a command could not be killed alone, so all of it was")
        return "the whole sandbox had to be killed with it"

    async def _update(self, processes: int) -> None:
        async with asking("change the sandbox's limits"):
            url = f"{self._docker.docker_host}/{self._docker.api_version}/containers/{self._container}/update"
            async with self._docker.session.post(url, json={"PidsLimit": processes}) as answer:
                if answer.status >= 400:
                    raise DockerError(answer.status, await answer.text())

    def _watch(self, running: Command) -> None:
        """Keeps it for as long as something that it left behind may print."""
        if running.reading is None or running.reading.done():
            self._commands.discard(running)
        else:
            running.reading.add_done_callback(lambda _: self._commands.discard(running))


def _is_text(script: bytes) -> bool:
    try:
        return "\0" not in script.decode()
    except UnicodeDecodeError:
        return False


def _files(stem: str, files: Mapping[str, bytes | None], owner: Owner) -> Iterator[bytes]:
    packer = Packer(owner)
    for ending, data in files.items():
        if data is not None:
            yield from packer.entry(f"{stem.lstrip('/')}.{ending}", data, 0o600)
    yield END
