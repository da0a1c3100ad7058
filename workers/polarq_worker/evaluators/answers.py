"""Where a policy's final answer is: in a file of its sandbox, or in the last message of the assistant."""

from __future__ import annotations

from typing import Any

from polarq.contracts.answers import AnswerConfig
from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.trajectory import BranchCause, Trace, Trajectory
from polarq.errors import EvaluatorFault, SandboxLost
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, as_seen
from polarq_worker.evaluators.snapshot_scripts import QUIET_SHELL
from polarq_worker.runtimes.base import Runtime

MAX_ANSWER_BYTES = 1024 * 1024
READ_S = 60.0
_READ = """
[ -e "$1" ] || [ -L "$1" ] || exit 3
[ -f "$1" ] && [ -r "$1" ] && { [ ! -L "$1" ] || [ "$3" = links ]; } || exit 4
exec head -c "$2" -- "$1"
"""
_NO_FILE, _NO_REGULAR_FILE = 3, 4


class NoAnswer(Exception):
    """The policy gave none; the text says what is missing."""


async def find_answer(context: EvaluationContext, config: AnswerConfig) -> str:
    """The answer, without blanks around it. Raises `NoAnswer`, and `EvaluatorFault` or `RuntimeFault` where it cannot
    be looked for."""
    if config.answer_file is None:
        text = last_words(context.trajectory)
    else:
        # Nobody writes on while it is read.
        await context.runtime.end_background()
        data = await read_file(context.runtime, config.answer_file, MAX_ANSWER_BYTES)
        if data is None:
            raise NoAnswer(f"there is no file {config.answer_file}")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise NoAnswer(f"{config.answer_file} is not UTF-8 text") from None
    if config.answer_after is not None:
        _, found, text = text.rpartition(config.answer_after)
        if not found:
            raise NoAnswer(f"there is no '{config.answer_after}' in it")
    if config.answer_before is not None:
        text, found, _ = text.partition(config.answer_before)
        if not found:
            raise NoAnswer(f"there is no '{config.answer_before}' behind it")
    if not text.strip():
        raise NoAnswer("it is blank")
    return text.strip()


def last_words(trajectory: Trajectory) -> str:
    """The text of the assistant's last message, of its main conversation. Raises `NoAnswer`."""
    own = [trace for trace in trajectory.traces if trace.response_messages and not _aside(trace)]
    if not own:
        raise NoAnswer("the assistant said nothing")
    last = max(own, key=lambda trace: max(trace.completion_seqs, default=-1))
    said = [message for message in last.response_messages if message.get("role", "assistant") == "assistant"]
    if not said:
        raise NoAnswer("the assistant said nothing")
    return text_of(said[-1])


def text_of(message: dict[str, Any]) -> str:
    """A chat message's own text, without its thinking and its calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text", "") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


async def read_file(
    runtime: Runtime, path: str, max_bytes: int, *, links: bool = True, cwd: str | None = None
) -> bytes | None:
    """A file's content; None where there is none, and a `NoAnswer` where it is larger or no file that can be read
    (nor a link to one, without `links`). Raises `EvaluatorFault` and `RuntimeFault` where it cannot be looked at."""
    result = await runtime.exec(
        ["bash", "-c", _READ, "bash", as_seen(runtime, path), str(max_bytes + 1), "links" if links else "none"],
        cwd=cwd,
        env=QUIET_SHELL,
        timeout_s=READ_S,
        max_output_bytes=2 * max_bytes + 16,
        category=ExecCategory.VERIFIER,
    )
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"reading {path}: {result.why}")
    if result.kind is ExecKind.SANDBOX_LOST:
        raise SandboxLost(f"reading {path}: {result.why}")
    if result.exit_code == _NO_FILE:
        return None
    if result.exit_code == _NO_REGULAR_FILE:
        raise NoAnswer(f"{path} is no regular file that can be read")
    if not result.ok:
        raise EvaluatorFault(f"reading {path}: {result.why}")
    if len(result.stdout) > max_bytes:
        raise NoAnswer(f"{path} has more than {max_bytes} bytes")
    return result.stdout


def _aside(trace: Trace) -> bool:
    return trace.cause in {BranchCause.SIDE, BranchCause.SUB_AGENT} or trace.metadata.get("label") == "side"
