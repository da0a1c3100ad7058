"""OpenAI chat completions: POST /v1/chat/completions, and the models routes that its SDKs know.

Unknown fields go through to the engine. Token ids and log-probabilities go back only to a harness that asked for them.
A stream always carries a finish reason in a chunk of its own end, the usage chunk only if asked, and [DONE].
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.dialects.base import (
    Dialect,
    NativeRequest,
    Operation,
    Reply,
    ReplyHead,
    Route,
    ServedModel,
    StreamWriter,
    retry_headers,
)
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode, encode

MAX_CHOICES = 64
UNKNOWN_LOGPROB = -9999.0
"""What the API's reference says stands for "not known"; a harness never sees NaN."""

_TYPES = {
    FaultKind.NO_SUCH_ROUTE: "not_found_error",
    FaultKind.NO_SESSION: "not_found_error",
    FaultKind.OVERLOADED: "overloaded_error",
    FaultKind.TIMED_OUT: "timeout_error",
}
_OURS = frozenset({"messages", "tools", "model", "stream"})


class OpenAIChatDialect(Dialect):
    name: ClassVar[str] = "openai_chat"
    fallback: ClassVar[bool] = True
    routes: ClassVar[Sequence[Route]] = (
        Route("POST", "chat/completions", Operation.GENERATE),
        Route("GET", "models", Operation.LIST_MODELS),
        Route("GET", r"models/(?P<model>.+)", Operation.SHOW_MODEL),
    )

    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        try:
            body = decode(request.body)
        except NotJson as exc:
            raise CallFault(FaultKind.BAD_REQUEST, f"the request body is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise CallFault(FaultKind.BAD_REQUEST, "the request body must be a JSON object")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
            raise CallFault(
                FaultKind.BAD_REQUEST, "'messages' must be a list of at least one message object", param="messages"
            )
        tools = body.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(item, dict) for item in tools)):
            raise CallFault(FaultKind.BAD_REQUEST, "'tools' must be a list of objects", param="tools")
        stream_options = body.get("stream_options")
        return ModelCall(
            messages=[_normalised(message) for message in messages],
            tools=tools or None,
            options={key: value for key, value in body.items() if key not in _OURS and value is not None},
            model=body["model"] if isinstance(body.get("model"), str) else "",
            stream=body.get("stream") is True,
            choices=_choices(body.get("n")),
            wants_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
            wants_ids=body.get("return_token_ids") is True,
            wants_logprobs=body.get("logprobs") is True,
        )

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        body: dict[str, Any] = {
            "id": _reply_id(head),
            "object": "chat.completion",
            "created": head.created,
            "model": call.model or answer.model,
            "choices": [_whole_choice(call, choice) for choice in answer.choices],
            "usage": _usage(answer.usage),
        }
        if call.wants_ids:
            body["prompt_token_ids"] = answer.prompt_ids
        return Reply(encode(body))

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return _ChatStream(call, head)

    def fault(self, fault: CallFault) -> Reply:
        return Reply(encode(_error(fault)), fault.status, retry_headers(fault))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        return Reply(encode({"object": "list", "data": [_model(model) for model in models]}))

    def model(self, model: ServedModel) -> Reply:
        return Reply(encode(_model(model)))


class _ChatStream(StreamWriter):
    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._begun: set[int] = set()
        self._model = call.model

    def piece(self, piece: Piece) -> bytes:
        self._model = self._model or piece.model or ""
        shown = [choice for choice in (self._choice(change) for change in piece.choices) if choice is not None]
        prompt_ids = piece.prompt_ids if self._call.wants_ids else None
        if not shown and prompt_ids is None:
            return b""
        extra: dict[str, Any] = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
        return self._event(choices=shown, **extra)

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        self._model = self._model or answer.model
        out = b"".join(self.piece(piece) for piece in held)
        if self._call.wants_usage:
            out += self._event(choices=[], usage=_usage(answer.usage))
        return out + b"data: [DONE]\n\n"

    def fail(self, fault: CallFault) -> bytes:
        return b"data: " + encode(_error(fault)) + b"\n\n"

    def _choice(self, change: ChoiceDelta) -> dict[str, Any] | None:
        delta = {key: value for key, value in change.delta.items() if value is not None}
        if change.index not in self._begun:
            self._begun.add(change.index)
            delta = {"role": "assistant", "content": "", **delta}
        elif "role" in delta:
            del delta["role"]
        choice: dict[str, Any] = {"index": change.index, "delta": delta, "finish_reason": change.finish_reason}
        if self._call.wants_logprobs and change.logprobs is not None:
            choice["logprobs"] = {"content": _strict(change.logprobs)}
        if self._call.wants_ids and change.ids is not None:
            choice["token_ids"] = change.ids
        if change.finish_reason is not None:
            choice["stop_reason"] = change.stop_reason
        # Parsers hold text back while its tokens go by: such an event says nothing to who did not ask for ids.
        return choice if delta or change.finish_reason is not None or len(choice) > 3 else None

    def _event(self, **fields: Any) -> bytes:
        chunk = {
            "id": _reply_id(self._head),
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._model,
            **fields,
        }
        return b"data: " + encode(chunk) + b"\n\n"


def _reply_id(head: ReplyHead) -> str:
    return f"chatcmpl-{head.completion_id}"


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _choices(value: Any) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CHOICES:
        raise CallFault(FaultKind.BAD_REQUEST, f"'n' must be a number from 1 to {MAX_CHOICES}", param="n")
    return value


def _whole_choice(call: ModelCall, choice: Choice) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "index": choice.index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": None,
    }
    if call.wants_logprobs and choice.logprobs is not None:
        shown["logprobs"] = {"content": _strict(choice.logprobs)}
    if call.wants_ids:
        shown["token_ids"] = choice.ids
    return shown


def _strict(entries: list[Any]) -> list[Any]:
    """Log-probability entries as strict JSON can hold them."""
    return [_strict_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


def _strict_entry(entry: dict[str, Any]) -> dict[str, Any]:
    value = entry.get("logprob")
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    strict = entry if finite else {**entry, "logprob": UNKNOWN_LOGPROB}
    top = entry.get("top_logprobs")
    return {**strict, "top_logprobs": _strict(top)} if isinstance(top, list) and top else strict


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
    }


def _model(model: ServedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": model.name, "object": "model", "created": 0, "owned_by": "polarq"}
    return shown if model.max_context is None else {**shown, "max_model_len": model.max_context}


def _error(fault: CallFault) -> dict[str, Any]:
    code: str | None = str(fault.kind)
    message, param = fault.message, fault.param
    kind = _TYPES.get(fault.kind, "invalid_request_error" if fault.status < 500 else "server_error")
    if fault.kind is FaultKind.CONTEXT_OVERFLOW:
        code, param, message = "context_length_exceeded", "messages", _overflow(fault)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _overflow(fault: CallFault) -> str:
    """The sentence that harnesses look for before they compact their history."""
    limit = "the server's limit of" if fault.max_context is None else str(fault.max_context)
    said = "are too long" if fault.prompt_tokens is None else f"resulted in {fault.prompt_tokens} tokens"
    return (
        f"This model's maximum context length is {limit} tokens. However, your messages {said}. "
        "Please reduce the length of the messages."
    )
