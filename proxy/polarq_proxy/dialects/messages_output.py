"""Answers of the Messages dialect: content blocks, stop reasons, usage and streams.

A chat message {reasoning_content, content, tool_calls} is shown as blocks thinking, text, tool_use, in that order; a
stream shows them in the order in which they begin. One block at a time is open. What the engine says of a later block
while the open one is not at its end waits, so that parallel calls that come in turns are shown one after the other.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ModelCall, Piece
from polarq_proxy.dialects.base import ReplyHead, StreamWriter
from polarq_proxy.dialects.messages_arguments import ArgumentStream, as_json, shown_input
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer needs of the request."""

    stops: tuple[str, ...] = ()


def message_of(call: ModelCall, answer: Answer, head: ReplyHead) -> dict[str, Any]:
    """A whole answer."""
    choice = answer.choices[0] if answer.choices else Choice(0)
    return {
        **_opening(call, head, answer.model),
        "content": _blocks_of(choice.message, head),
        **_stop(call, choice),
        "usage": _usage(answer),
    }


def error_of(fault: CallFault, request_id: str | None = None) -> dict[str, Any]:
    error = {"type": _error_type(fault), "message": _error_message(fault)}
    return {"type": "error", "error": error, "request_id": request_id}


class MessagesStream(StreamWriter):
    """`message_start` goes first, whatever comes first: Claude Code drops a stream that begins with anything else, even
    with a ping, and asks again without streaming."""

    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._started = False
        self._index = 0
        """Of the open block, else of the next."""
        self._blocks: list[_Block] = []
        """The open one first, then those that wait for it."""
        self._calls: dict[int, _ToolBlock] = {}

    def piece(self, piece: Piece) -> bytes:
        out = self._start(piece.model or "", len(piece.prompt_ids or ()))
        for change in piece.choices:
            if change.index == 0:
                out += self._said(change.delta)
        return out

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        choice = answer.choices[0] if answer.choices else Choice(0)
        out = b"".join(self.piece(piece) for piece in held) or self._start(answer.model, len(answer.prompt_ids or ()))
        while self._blocks:
            out += self._close(cut_off=choice.finish_reason == "length")
        out += _event("message_delta", delta=_stop(self._call, choice), usage=_usage(answer))
        return out + _event("message_stop")

    def fail(self, fault: CallFault) -> bytes:
        return b"event: error\ndata: " + encode(error_of(fault, _request_id(self._head))) + b"\n\n"

    def wait(self) -> bytes:
        return self._start("", 0) + _event("ping")

    def _start(self, model: str, prompt_tokens: int) -> bytes:
        """Usage says what is known so far; the counts that hold come with `message_delta`."""
        if self._started:
            return b""
        self._started = True
        usage = _counts(prompt_tokens, 0, 0)
        opening = _opening(self._call, self._head, model)
        message = {**opening, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def _said(self, delta: dict[str, Any]) -> bytes:
        out = b""
        for key, kind in (("reasoning_content", _ThinkingBlock), ("content", _TextBlock)):
            text = delta.get(key)
            if isinstance(text, str) and text:
                if not self._blocks or not isinstance(self._blocks[-1], kind):
                    self._blocks.append(kind())
                self._blocks[-1].add(text)
                out += self._flow()
        calls = delta.get("tool_calls")
        for place, part in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(part, dict):
                self._tool(part, place)
                out += self._flow()
        return out

    def _tool(self, part: dict[str, Any], place: int) -> None:
        index = part.get("index")
        index = index if isinstance(index, int) else place
        block = self._calls.get(index)
        if block is None:
            block = self._calls[index] = _ToolBlock(f"toolu_{self._head.completion_id}_{index}")
            self._blocks.append(block)
        function = part.get("function")
        block.named(part.get("id"), function if isinstance(function, dict) else {})

    def _flow(self) -> bytes:
        """Shows what is new of the open block; when others wait and it is at its end, closes it."""
        out = b""
        while self._blocks:
            block = self._blocks[0]
            if len(self._blocks) == 1 or not block.at_end:
                return out + self._shown(block, block.take())
            out += self._close()
        return out

    def _close(self, *, cut_off: bool = False) -> bytes:
        block = self._blocks.pop(0)
        out = self._shown(block, block.take() + block.rest(cut_off=cut_off), always=True)
        if isinstance(block, _ThinkingBlock):
            signature = _signature(block.text)
            delta = {"type": "signature_delta", "signature": signature}
            out += _event("content_block_delta", index=self._index, delta=delta)
        out += _event("content_block_stop", index=self._index)
        self._index += 1
        return out

    def _shown(self, block: _Block, text: str, *, always: bool = False) -> bytes:
        out = b""
        if not block.opened and (text or always):
            block.opened = True
            out = _event("content_block_start", index=self._index, content_block=block.opening())
        if text:
            delta = {"type": block.delta_type, block.delta_key: text}
            out += _event("content_block_delta", index=self._index, delta=delta)
        return out


class _Block:
    """A content block while it comes; `take` gives what is new of it and may be shown."""

    delta_type = "text_delta"
    delta_key = "text"

    def __init__(self) -> None:
        self.opened = False
        self._new = ""

    @property
    def at_end(self) -> bool:
        """Whether nothing more belongs to it once another block has begun."""
        return True

    def opening(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def add(self, text: str) -> None:
        self._new += text

    def take(self) -> str:
        new, self._new = self._new, ""
        return new

    def rest(self, *, cut_off: bool) -> str:
        """What was held back until its end."""
        return ""


class _TextBlock(_Block):
    pass


class _ThinkingBlock(_Block):
    delta_type = "thinking_delta"
    delta_key = "thinking"

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def opening(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> None:
        super().add(text)
        self.text += text


class _ToolBlock(_Block):
    """Opened when its arguments begin, by which time its name is whole."""

    delta_type = "input_json_delta"
    delta_key = "partial_json"

    def __init__(self, call_id: str) -> None:
        super().__init__()
        self._id = call_id
        self._name = ""
        self._arguments = ArgumentStream()

    @property
    def at_end(self) -> bool:
        return self._arguments.complete

    def opening(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def named(self, call_id: Any, function: dict[str, Any]) -> None:
        self._id = call_id if isinstance(call_id, str) and call_id else self._id
        self._name += _str(function.get("name"))
        self.add(_arguments(function))

    def add(self, text: str) -> None:
        super().add(self._arguments.feed(text) if text else "")

    def rest(self, *, cut_off: bool) -> str:
        return self._arguments.finish(cut_off=cut_off)


def _opening(call: ModelCall, head: ReplyHead, model: str) -> dict[str, Any]:
    return {
        "id": f"msg_{head.completion_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model or model,
    }


def _blocks_of(message: dict[str, Any], head: ReplyHead) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    thinking, text, calls = (message.get(key) for key in ("reasoning_content", "content", "tool_calls"))
    if isinstance(thinking, str) and thinking:
        blocks.append({"type": "thinking", "thinking": thinking, "signature": _signature(thinking)})
    if isinstance(text, str) and text:
        blocks.append({"type": "text", "text": text})
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            blocks.append(
                {
                    "type": "tool_use",
                    "id": _str(call.get("id")) or f"toolu_{head.completion_id}_{place}",
                    "name": _str(function.get("name")),
                    "input": shown_input(_arguments(function)),
                }
            )
    return blocks


def _stop(call: ModelCall, choice: Choice) -> dict[str, Any]:
    reason, sequence = "end_turn", None
    if choice.finish_reason in _STOP_REASONS:
        reason = _STOP_REASONS[choice.finish_reason]
    elif choice.message.get("tool_calls"):
        reason = "tool_use"  # also when a named call ended as a plain stop
    elif isinstance(call.native, Asked) and choice.stop_reason in call.native.stops:
        reason, sequence = "stop_sequence", choice.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: Answer) -> dict[str, Any]:
    """Input tokens that came out of the engine's cache are counted apart, as the API does; clients add them up."""
    usage = answer.usage or Usage()
    prompt = len(answer.prompt_ids or ()) if usage.prompt_tokens is None else usage.prompt_tokens
    sampled = answer.sampled_tokens if usage.completion_tokens is None else usage.completion_tokens
    return _counts(prompt, min(usage.cached_tokens or 0, prompt), sampled)


def _counts(prompt: int, cached: int, sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _signature(thinking: str) -> str:
    """Opaque to harnesses, which must send it back, and never checked: the same for the same text, so that one answer
    looks the same whole and streamed."""
    return base64.b64encode(b"polarq:" + hashlib.sha256(thinking.encode()).digest()).decode()


def _request_id(head: ReplyHead) -> str:
    return f"req_{head.completion_id}"


_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_type(fault: CallFault) -> str:
    """Harnesses that see an error inside a stream have only this to decide on trying again."""
    if fault.kind in {FaultKind.TOO_MANY_CALLS, FaultKind.REFUSED, FaultKind.CONTEXT_OVERFLOW}:
        return "invalid_request_error"
    return _BY_STATUS.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")


def _error_message(fault: CallFault) -> str:
    """For an overflow the sentence that harnesses look for before they compact their history."""
    if fault.kind is not FaultKind.CONTEXT_OVERFLOW:
        return fault.message
    if fault.max_context is None:
        return "prompt is too long for this model"
    if fault.prompt_tokens is None:
        return f"prompt is too long: it does not fit into {fault.max_context} tokens"
    return f"prompt is too long: {fault.prompt_tokens} tokens > {fault.max_context} maximum"


def _arguments(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else as_json(arguments)


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode({"type": name, **fields}) + b"\n\n"
