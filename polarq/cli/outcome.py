"""What a command's exit code means, and how every error becomes one: a clear line, never a traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

import typer

from polarq.cli.terminal import shown, shown_lines
from polarq.contracts.rollout import RolloutState, TaskCounts, TaskState
from polarq.errors import (
    LedgerUnavailable,
    NotPaused,
    PayloadCorrupt,
    PayloadMissing,
    PolarqError,
    QueueFull,
    ResultTimeout,
)

P = ParamSpec("P")


class ExitCode(IntEnum):
    """The outcome, as a shell script sees it."""

    OK = 0
    """All rollouts completed; or the command did what it was asked."""
    FAILED = 1
    """Some rollout failed or timed out; or a check found something wrong."""
    USAGE = 2
    """Bad input: nothing was done."""
    UNREACHABLE = 3
    """Redis or the HTTP shim does not answer."""
    CANCELLED = 4
    """Some rollout was cancelled, and none failed."""
    RUNNING = 5
    """`show`: not every rollout has ended yet, and none failed so far."""
    TRY_LATER = 75
    """The queue is full: nothing was recorded, and later it may fit."""
    WAIT_TIMED_OUT = 124
    """The time to wait was over; the task goes on."""
    INTERRUPTED = 130
    """Ctrl-C."""
    CLOSED_PIPE = 141
    """Whoever read the output went away."""


class Unreachable(PolarqError):
    """The HTTP shim does not answer, or not as one."""


class Unusable(PolarqError):
    """The command cannot do what was asked, as things are: a file that cannot be written, an extra that is missing."""


class Signalled(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def task_code(state: TaskState, counts: TaskCounts) -> ExitCode:
    """The outcome of a whole task."""
    if state is TaskState.CANCELLED:
        return ExitCode.CANCELLED
    if counts.failed or counts.timed_out:
        return ExitCode.FAILED
    if counts.cancelled:
        return ExitCode.CANCELLED
    return ExitCode.OK if state.terminal else ExitCode.RUNNING


def rollout_code(state: RolloutState) -> ExitCode:
    """The outcome of one rollout."""
    ends = {
        RolloutState.COMPLETED: ExitCode.OK,
        RolloutState.FAILED: ExitCode.FAILED,
        RolloutState.TIMED_OUT: ExitCode.FAILED,
        RolloutState.CANCELLED: ExitCode.CANCELLED,
    }
    return ends.get(state, ExitCode.RUNNING)


def code_of(error: PolarqError) -> ExitCode:
    """Which exit code an error ends a command with."""
    if isinstance(error, (LedgerUnavailable, Unreachable)):
        return ExitCode.UNREACHABLE
    if isinstance(error, QueueFull):
        return ExitCode.TRY_LATER
    if isinstance(error, (PayloadMissing, PayloadCorrupt)):
        return ExitCode.FAILED
    if isinstance(error, (ResultTimeout, NotPaused)):
        return ExitCode.WAIT_TIMED_OUT
    return ExitCode.USAGE


def complain(text: str, log: str = "") -> None:
    """One line on stderr, and below it what a log ends with."""
    lines = [text, *(f"| {line}" for line in (shown_lines(log, limit=20) if log else ()))]
    try:
        sys.stderr.writelines(f"polarq: {shown(line, limit=4000)}\n" for line in lines)
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads it


def quiet_stdout() -> None:
    """After a closed pipe: what is still buffered goes nowhere, so that the interpreter does not complain."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def command(function: Callable[P, ExitCode | int | None]) -> Callable[P, None]:
    """Makes a function a command: its return value, or what it raises, is the exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code: int = function(*args, **kwargs) or ExitCode.OK
            sys.stdout.flush()
        except BrokenPipeError:
            quiet_stdout()
            code = ExitCode.CLOSED_PIPE
        except PolarqError as exc:
            complain(str(exc))
            code = code_of(exc)
        except Signalled as exc:
            code = 128 + exc.number
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
        raise typer.Exit(code)

    return run
