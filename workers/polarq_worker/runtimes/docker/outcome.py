"""How a command ended, in the contract's words."""

from __future__ import annotations

from dataclasses import dataclass

from polarq.contracts.rollout import ExecKind
from polarq_worker.runtimes.base import ExecResult
from polarq_worker.runtimes.docker.commands import Command


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a command, without what it printed. `silent`: nothing of what is on its streams was its own."""

    kind: ExecKind
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    out_of_memory: bool = False
    silent: bool = False


def result_of(outcome: Outcome, running: Command, duration_s: float) -> ExecResult:
    out, err = running.out, running.err
    stdout, stderr = out.value(), err.value()
    loud = not outcome.silent
    return ExecResult(
        outcome.kind,
        exit_code=outcome.exit_code,
        signal=outcome.signal,
        duration_s=duration_s,
        stdout=stdout if loud else b"",
        stderr=stderr if loud else b"",
        stdout_bytes=out.total if loud else 0,
        stderr_bytes=err.total if loud else 0,
        truncated=loud and (out.truncated or err.truncated),
        message="; ".join(text for text in (outcome.message, out.log_error, err.log_error) if text),
        out_of_memory=outcome.out_of_memory,
    )


def refusal(why: str, cwd: str, user: str) -> str:
    return {
        "folder": f"there is no folder '{cwd}' to run in",
        "closed": f"user '{user or 'root'}' may not enter the folder '{cwd}'",
        "script": "the script cannot be written in the sandbox; is its disk full?",
        "shell": "the image has no bash, and its sh has no pipefail; give an argv, or install bash",
    }.get(why, why)
