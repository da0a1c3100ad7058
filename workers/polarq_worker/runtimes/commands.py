"""Commands of one sandbox that a warden of ours keeps: their descriptors, output, time limits and ends."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polarq.contracts.rollout import ExecKind
from polarq_worker.runtimes.base import ExecResult
from polarq_worker.runtimes.capture import Capture
from polarq_worker.runtimes.processes import (
    Command,
    CouldNotStart,
    Descriptors,
    ProcessTree,
    WardenLost,
    uninterrupted,
)
from polarq_worker.runtimes.texts import cannot, could_not_start

DRAIN_S = 0.25
"""How long output is waited for when a command has ended but something it left behind holds its pipe."""


@dataclass(frozen=True, slots=True)
class Order:
    """A command to be run."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    ids: Sequence[int] | None
    stdin: Path | None
    """A file on the host, unlinked as soon as it is open."""
    log: Path | None
    """Stem of its log files on the host."""
    max_output_bytes: int


class Commands:
    """Those that run under one tree, of which there may be so many processes (None: nobody counts them).

    `walled`: what a keeper leaves behind that was killed cannot leave the sandbox.
    """

    def __init__(self, tree: ProcessTree, *, walled: bool, most_processes: int | None) -> None:
        self._tree = tree
        self._walled = walled
        self._most_processes = most_processes
        self._running: set[Command] = set()
        self._captures: set[Capture] = set()

    def let_go(self) -> None:
        """Ends all that run. What they print until they are dead is still taken."""
        for command in list(self._running):
            command.close()

    def close(self) -> None:
        self.let_go()
        for capture in self._captures:
            capture.close()
        self._captures.clear()

    def expect_kill(self) -> None:
        """What runs now is about to be killed from elsewhere: that is how it ends, and no loss."""
        for command in self._running:
            command.killed = True

    async def run(self, order: Order, timeout_s: float) -> ExecResult:
        """Says how it ended; the caller knows why where the sandbox was lost. Raises nothing but a cancellation, once
        the command is dead."""
        begun = time.monotonic()
        running: Command | None = None
        outputs: tuple[Capture, Capture] | None = None
        kind, code, message = ExecKind.EXITED, 0, ""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                descriptors, outputs = self._open_streams(order)
                running = await self._tree.run(order.argv, order.cwd, order.env, descriptors, order.ids)
                self._running.add(running)
                running.gone.add_done_callback(partial(self._forget_command, running))
                await running.started()
                code = await running.ended()
        except TimeoutError:
            kind = ExecKind.TIMED_OUT
            message = await self._kill(running)
        except CouldNotStart as exc:
            kind, message = ExecKind.COULD_NOT_START, could_not_start(exc, order.argv[0], order.cwd)
            if exc.number == errno.EAGAIN and self._most_processes is not None:
                message = f"the sandbox has as many processes as it may (max_processes: {self._most_processes})"
        except WardenLost:
            kind, code, message = self._unwatched(running)
        except OSError as exc:
            kind, message = ExecKind.COULD_NOT_START, cannot("the command could not be brought in", exc)
        except BaseException:
            await uninterrupted(self._kill(running))
            self._forget(outputs)
            raise
        return await self._result(kind, code, message, outputs, begun)

    def _unwatched(self, command: Command | None) -> tuple[ExecKind, int, str]:
        """How a command ended whose keeper is gone."""
        if command is not None and command.killed:
            return ExecKind.EXITED, -signal.SIGKILL, "it was ended with all others"
        if self._walled and not self._tree.hung_up():
            # Something of its own user killed the keeper.
            return ExecKind.EXITED, -signal.SIGKILL, "what watched over it was killed with it"
        return ExecKind.SANDBOX_LOST, 0, ""

    def _open_streams(self, order: Order) -> tuple[Descriptors, tuple[Capture, Capture]]:
        opened: list[int] = []
        try:
            opened.append(os.open(order.stdin or os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            opened.extend(os.pipe())
            opened.extend(os.pipe())
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        finally:
            if order.stdin is not None:
                order.stdin.unlink(missing_ok=True)
        standard_input, out, out_w, err, err_w = opened
        stem, limit = order.log, order.max_output_bytes
        captures = (
            Capture(out, limit, stem and stem.with_name(f"{stem.name}.stdout")),
            Capture(err, limit, stem and stem.with_name(f"{stem.name}.stderr")),
        )
        self._captures.update(captures)
        return Descriptors(standard_input, out_w, err_w), captures

    async def _kill(self, command: Command | None) -> str:
        if command is None:
            return ""
        return "" if await uninterrupted(command.kill()) else "some of its processes have not died yet"

    def _forget_command(self, command: Command, _: object) -> None:
        self._running.discard(command)

    def _forget(self, outputs: tuple[Capture, Capture] | None) -> None:
        for capture in outputs or ():
            capture.close()
            self._captures.discard(capture)

    async def _result(
        self, kind: ExecKind, code: int, message: str, outputs: tuple[Capture, Capture] | None, begun: float
    ) -> ExecResult:
        duration_s = time.monotonic() - begun
        if outputs is None:
            return ExecResult(kind, duration_s=duration_s, message=message)
        out, err = outputs
        try:
            async with asyncio.timeout(DRAIN_S):
                await out.finished.wait()
                await err.finished.wait()
        except TimeoutError:
            # Something the command left behind holds the pipe; the captures go on reading for it until the end.
            pass
        signalled = kind is ExecKind.EXITED and code < 0
        result = ExecResult(
            ExecKind.SIGNALLED if signalled else kind,
            exit_code=code if kind is ExecKind.EXITED and not signalled else None,
            signal=-code if signalled else None,
            duration_s=duration_s,
            stdout=out.value(),
            stderr=err.value(),
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            truncated=out.truncated or err.truncated,
            message="; ".join(text for text in (message, out.log_error, err.log_error) if text),
        )
        self._captures.difference_update([capture for capture in outputs if capture.finished.is_set()])
        return result
