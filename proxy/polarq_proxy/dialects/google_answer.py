"""Writes Gemini answers: whole ones, streams of events, and streams of one growing JSON array.

A function call is one part with whole arguments, so that it is written when its answer has ended. The thinking goes
into the signature of the first part that is no thought: clients keep signatures and give them back, but drop thoughts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.dialects.base import ReplyHead, StreamWriter
from polarq_proxy.dialects.google_names import signature_of
from polarq_proxy.dialects.messages_arguments import shown_input
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

Part = dict[str, Any]

_ENDS = {"stop": "STOP", "tool_calls": "STOP", "function_call": "STOP", "length": "MAX_TOKENS"}
_ENDS["content_filter"] = "SAFETY"
_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def whole_body(call: ModelCall, answer: Answer, head: ReplyHead) -> dict[str, Any]:
    candidates = [_candidate(call, choice, _Parts(call).whole(choice)) for choice in answer.choices]
    return {
        "candidates": candidates,
        "usageMetadata": usage_metadata(answer.usage),
        **_tail(call.model or answer.model, head),
    }


def error_body(fault: CallFault) -> dict[str, Any]:
    code = status_code(fault)
    status = _STATUSES.get(code, "INVALID_ARGUMENT" if code < 500 else "INTERNAL")
    if fault.kind is FaultKind.NO_SESSION:
        status = "FAILED_PRECONDITION"
    error: dict[str, Any] = {"code": code, "message": _message(fault), "status": status}
    if fault.retry_after_s is not None:
        delay = f"{max(1, round(fault.retry_after_s))}s"
        error["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay}]
    return {"error": error}


def status_code(fault: CallFault) -> int:
    """400 is the status that is known to stop Gemini CLI at once."""
    return 400 if fault.kind is FaultKind.NO_SESSION else fault.status


def usage_metadata(usage: Usage | None) -> dict[str, int]:
    """Thoughts are counted beside the candidates' tokens, not among them, as the API does; clients add them up."""
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return {}
    thought = min(usage.reasoning_tokens or 0, usage.completion_tokens)
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens - thought,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if thought:
        counts["thoughtsTokenCount"] = thought
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    return counts


class GoogleEvents(StreamWriter):
    """`alt=sse`."""

    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._model = call.model
        self._parts: dict[int, _Parts] = {}

    def piece(self, piece: Piece) -> bytes:
        self._model = self._model or piece.model or ""
        candidates = []
        for change in piece.choices:
            parts = self._of(change.index).of_delta(change)
            if parts:
                candidates.append({"content": {"parts": parts, "role": "model"}, "index": change.index})
        return self._framed({"candidates": candidates, **_tail(self._model, self._head)}) if candidates else b""

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        self._model = self._model or answer.model
        candidates = []
        for choice in answer.choices:
            writer = self._of(choice.index)
            changes = [change for piece in held for change in piece.choices if change.index == choice.index]
            parts = [part for change in changes for part in writer.of_delta(change)]
            candidates.append(_candidate(self._call, choice, writer.ended(parts, choice)))
        last = {
            "candidates": candidates,
            "usageMetadata": usage_metadata(answer.usage),
            **_tail(self._model, self._head),
        }
        return self._framed(last) + self._closed()

    def fail(self, fault: CallFault) -> bytes:
        # Google's own SDKs know an error inside a stream by a bare line of JSON, and fail on an event that is none;
        # readers of events skip that line and take the event.
        error = encode(error_body(fault))
        return error + b"\ndata: " + error + b"\n\n"

    def wait(self) -> bytes:
        # Not a comment: Google's SDKs take whatever is neither blank nor data for an error.
        return b"\n"

    def _of(self, index: int) -> _Parts:
        return self._parts.setdefault(index, _Parts(self._call))

    def _framed(self, tree: dict[str, Any]) -> bytes:
        return b"data: " + encode(tree) + b"\n\n"

    def _closed(self) -> bytes:
        return b""


class GoogleArray(GoogleEvents):
    """Without `alt=sse`: one JSON array, an element an event."""

    content_type: ClassVar[str] = "application/json; charset=utf-8"

    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        super().__init__(call, head)
        self._begun = False

    def fail(self, fault: CallFault) -> bytes:
        return self._framed(error_body(fault)) + self._closed()

    def _framed(self, tree: dict[str, Any]) -> bytes:
        before, self._begun = (b",\n" if self._begun else b"["), True
        return before + encode(tree)

    def _closed(self) -> bytes:
        return b"]\n"


class _Parts:
    """The parts of one candidate while they come."""

    def __init__(self, call: ModelCall) -> None:
        self._thoughts = bool(call.native.thoughts)
        self._thought: list[str] = []
        self._signed = 0
        """How many pieces of thinking are in a signature already."""

    def whole(self, choice: Choice) -> list[Part]:
        message = choice.message
        return self.ended(self._said(message.get("reasoning_content"), message.get("content")), choice)

    def of_delta(self, change: ChoiceDelta) -> list[Part]:
        return self._said(change.delta.get("reasoning_content"), change.delta.get("content"))

    def ended(self, parts: list[Part], choice: Choice) -> list[Part]:
        """The parts of the end: what is left, the calls, and a signature if there was none yet."""
        calls = choice.message.get("tool_calls")
        parts += [self._sign(_call_part(call)) for call in calls or () if isinstance(call, dict)]
        if self._signed < len(self._thought):
            parts.append(self._sign({"text": ""}))
        return parts or [{"text": ""}]

    def _said(self, thought: Any, text: Any) -> list[Part]:
        parts: list[Part] = []
        if isinstance(thought, str) and thought:
            self._thought.append(thought)
            if self._thoughts:
                parts.append({"text": thought, "thought": True})
        if isinstance(text, str) and text:
            parts.append(self._sign({"text": text}))
        return parts

    def _sign(self, part: Part) -> Part:
        if self._signed < len(self._thought):
            part["thoughtSignature"] = signature_of("".join(self._thought))
            self._signed = len(self._thought)
        return part


def _call_part(call: dict[str, Any]) -> Part:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    shown: dict[str, Any] = {"name": function.get("name") or "", "args": shown_input(function.get("arguments") or "")}
    if call.get("id"):
        shown = {"id": call["id"], **shown}
    return {"functionCall": shown}


def _candidate(call: ModelCall, choice: Choice, parts: list[Part]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "content": {"parts": parts, "role": "model"},
        "finishReason": _ENDS.get(choice.finish_reason or "", "OTHER"),
        "index": choice.index,
    }
    if call.wants_logprobs and choice.logprobs is not None:
        shown["logprobsResult"] = _logprobs(choice.logprobs)
    return shown


def _logprobs(entries: Sequence[Any]) -> dict[str, Any]:
    good = [entry for entry in entries if isinstance(entry, dict)]
    top = [[other for other in entry.get("top_logprobs") or () if isinstance(other, dict)] for entry in good]
    return {
        "chosenCandidates": [_logprob(entry) for entry in good],
        "topCandidates": [{"candidates": [_logprob(other) for other in others]} for others in top],
    }


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    value = entry.get("logprob")
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    return {"token": entry.get("token") or "", "logProbability": value if finite else None}


def _tail(model: str, head: ReplyHead) -> dict[str, Any]:
    return {"modelVersion": model, "responseId": head.completion_id}


def _message(fault: CallFault) -> str:
    if fault.kind is not FaultKind.CONTEXT_OVERFLOW:
        return fault.message
    count = "" if fault.prompt_tokens is None else f" ({fault.prompt_tokens})"
    limit = "" if fault.max_context is None else f" ({fault.max_context})"
    return f"The input token count{count} exceeds the maximum number of tokens allowed{limit}."
