"""What an agent program's end comes to: its exit code, together with what the proxy saw of its model calls.

Programs exit with 0 when the context overflowed, when the model answered nothing, or when they never asked it. Such an
end is the harness's own, kept beside the reward: the work tree is scored all the same where the model was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.rollout import Boundary, ExecKind, HarnessReport
from polarq.store.grants import GrantUse

_OVERFLOW, _LIMIT, _REFUSED = "context_overflow", "too_many_calls", "refused"
"""Kinds of problems that the proxy names, which are not the inference side's failures."""

_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_RAW_CALL = re.compile(r"^\s*<(?:tool_call>|function=|\|tool_call)", re.MULTILINE)
"""What models are taught to begin a call with; in a fenced block it is only spoken of."""


@dataclass(frozen=True, slots=True)
class CallsSeen:
    """A harness's model calls, as the proxy saw them."""

    sampled: int = 0
    """Steps of the task that the model was sampled for."""
    last: Completion | None = None
    """The newest step of the task that was answered whole."""
    problem: str = ""
    """Kind of what the newest call of all was answered with instead; empty: an answer."""
    problem_text: str = ""

    @property
    def failing(self) -> bool:
        """The inference side did not answer the newest call."""
        return self.problem not in {"", _OVERFLOW, _LIMIT, _REFUSED}

    @classmethod
    def of(cls, calls: Sequence[Completion], use: GrantUse) -> CallsSeen:
        steps = [call for call in calls if call.label is not CompletionLabel.SIDE]
        whole = [call for call in steps if not call.incomplete]
        newest = max((call.seq for call in calls if not call.incomplete), default=-1)
        kind, _, text = use.last_problem.partition(": ") if use.last_problem_seq > newest else ("", "", "")
        sampled = sum(bool(call.sampled_ids) for call in steps)
        return cls(sampled, max(whole, key=lambda call: call.seq, default=None), kind, text)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a harness's end is none of a task that was done. `reason` is `Outcome.reason`."""

    boundary: Boundary
    reason: str
    message: str


def verdict_of(report: HarnessReport, seen: CallsSeen, limit: str = "", *, asks: bool = True) -> Verdict | None:
    """None: nothing beyond what its exit code says. `limit`: which of its own the program says that it stopped at;
    `asks`: it does no task without the model, and goes on until it is told something."""
    step = report.steps[-1] if report.steps else None
    if step is None or step.kind is not ExecKind.EXITED:
        return None
    ended = f"the harness ended with exit code {step.exit_code}"
    if seen.problem == _OVERFLOW:
        return Verdict(Boundary.HARNESS, "context_overflow", f"the context overflowed ({seen.problem_text}); {ended}")
    if seen.problem == _LIMIT:
        return Verdict(Boundary.HARNESS, "call_limit", f"{seen.problem_text}; {ended}")
    if seen.problem == _REFUSED:
        return Verdict(
            Boundary.MODEL, "model_refused", f"the last model call was refused ({seen.problem_text}); {ended}"
        )
    if seen.problem:
        text = f"the last model call failed ({seen.problem_text}); {ended}"
        return Verdict(Boundary.MODEL, "model_failed", text) if report.ok else None
    if limit:
        return Verdict(Boundary.HARNESS, "agent_limit", f"the agent stopped at a limit of its own ({limit}); {ended}")
    if seen.last is not None:
        # Some programs take such an answer for the end, others for a failure of their own.
        if seen.last.finish_reason == "length":
            text = f"the model's last answer was cut at its token limit; {ended}"
            return Verdict(Boundary.HARNESS, "answer_cut", text)
        if _is_unread_call(seen.last):
            text = "the model's last answer was a tool call that the engine's parser could not read"
            return Verdict(Boundary.HARNESS, "invalid_tool_call", f"{text}; {ended}")
    if not report.ok or not asks:
        return None
    if seen.last is None or not seen.sampled:
        return Verdict(Boundary.HARNESS, "no_model_calls", f"{ended}, and the model was never sampled for it")
    if _is_empty(seen.last):
        return Verdict(Boundary.HARNESS, "empty_answer", f"the model's last answer was empty; {ended}")
    return None


def exit_code(report: HarnessReport) -> int | None:
    """Of the command that was the last; None: it did not exit."""
    return report.steps[-1].exit_code if report.steps else None


def _is_empty(call: Completion) -> bool:
    content = call.reply.get("content")
    return not call.reply.get("tool_calls") and not (content.strip() if isinstance(content, str) else content)


def _is_unread_call(call: Completion) -> bool:
    """An answer that was to be a tool call, or is the text of one, with none that could be carried out."""
    content = call.reply.get("content")
    if call.reply.get("tool_calls"):
        return False
    unfenced = _FENCED.sub("", content) if isinstance(content, str) else ""
    return call.finish_reason == "tool_calls" or _RAW_CALL.search(unfenced) is not None
