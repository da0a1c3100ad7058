"""OpenAI chat completions: POST /v1/chat/completions, and the models routes that its SDKs know.

Token ids and log-probabilities go back only to a harness that asked for them. A stream always carries a finish reason
in a chunk of its own end, the usage chunk only if asked, and [DONE]. Thinking is `reasoning_content`, and is taken back
under that name or as `reasoning`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from polarq_proxy.dialects.openai_messages import messages_of
from polarq_proxy.dialects.openai_options import CUSTOM_INPUT, chat_options, custom_names, tools_of
from polarq_proxy.dialects.openai_shapes import (
    body_of,
    choices_of,
    error_body,
    model_of,
    model_shown,
    strict,
    usage_of,
    wants_usage,
)
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode, encode


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """What the answer's form depends on."""

    functions: bool
    """The request offered `functions`, the form of 2023, and so wants a call as `function_call`."""
    custom: frozenset[str] = frozenset()
    """Tools of free text. Their calls are shown whole, because their text lies inside of JSON."""


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
            return _call(body_of(request))
        except RecursionError:
            raise CallFault(FaultKind.BAD_REQUEST, "the request body is nested too deeply") from None

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        body: dict[str, Any] = {
            "id": _reply_id(head),
            "object": "chat.completion",
            "created": head.created,
            "model": call.model or answer.model,
            "choices": [_whole_choice(call, choice) for choice in answer.choices],
            "usage": usage_of(answer.usage),
        }
        if call.wants_ids:
            body["prompt_token_ids"] = answer.prompt_ids
        return Reply(encode(body))

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return _ChatStream(call, head)

    def fault(self, fault: CallFault) -> Reply:
        return Reply(encode(error_body(fault)), fault.status, retry_headers(fault))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        return Reply(encode({"object": "list", "data": [model_shown(model) for model in models]}))

    def model(self, model: ServedModel) -> Reply:
        return Reply(encode(model_shown(model)))


class _ChatStream(StreamWriter):
    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._begun: set[int] = set()
        self._model = call.model
        self._functions = _functions(call)
        self._custom = call.native.custom if isinstance(call.native, ChatAsk) else frozenset()

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
        out = self._calls(answer) if self._custom else b""
        out += b"".join(self.piece(piece) for piece in held)
        unended = [ChoiceDelta(choice.index, finish_reason="stop") for choice in answer.choices if not _ended(choice)]
        if unended:  # readers loop for ever without a reason
            out += self.piece(Piece(unended))
        if self._call.wants_usage:
            out += self._event(choices=[], usage=usage_of(answer.usage))
        return out + b"data: [DONE]\n\n"

    def fail(self, fault: CallFault) -> bytes:
        body = error_body(fault)
        if fault.status >= 500:
            # A stream has no status left to tell; clients that look at the text alone try again at such a number.
            body["error"]["message"] = f"{fault.status}: {fault.message}"
        return b"data: " + encode(body) + b"\n\n"

    def _choice(self, change: ChoiceDelta) -> dict[str, Any] | None:
        delta = {key: value for key, value in change.delta.items() if value is not None}
        if self._functions:
            delta = _as_function_call(delta)
        if self._custom:
            delta.pop("tool_calls", None)
        if change.index not in self._begun:
            self._begun.add(change.index)
            delta = {"role": "assistant", "content": "", **delta}
        elif "role" in delta:
            del delta["role"]
        finish_reason = _finish_reason(change.finish_reason, self._functions)
        choice: dict[str, Any] = {"index": change.index, "delta": delta, "finish_reason": finish_reason}
        if self._call.wants_logprobs and change.logprobs is not None:
            choice["logprobs"] = {"content": strict(change.logprobs)}
        if self._call.wants_ids and change.ids is not None:
            choice["token_ids"] = change.ids
        if change.finish_reason is not None:
            choice["stop_reason"] = change.stop_reason
        # Parsers hold text back while its tokens go by: such an event says nothing to who did not ask for ids.
        return choice if delta or change.finish_reason is not None or len(choice) > 3 else None

    def _calls(self, answer: Answer) -> bytes:
        """All calls at once, for who offered tools of free text."""
        shown = []
        for choice in answer.choices:
            calls = _with_custom(choice.message, self._custom).get("tool_calls")
            if calls:
                delta = {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}
                shown.append({"index": choice.index, "delta": delta, "finish_reason": None})
        return self._event(choices=shown) if shown else b""

    def _event(self, **fields: Any) -> bytes:
        chunk = {
            "id": _reply_id(self._head),
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._model,
            **fields,
        }
        return b"data: " + encode(chunk) + b"\n\n"


def _call(body: dict[str, Any]) -> ModelCall:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise CallFault(
            FaultKind.BAD_REQUEST, "'messages' must be a list of at least one message object", param="messages"
        )
    tools = body.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(item, dict) for item in tools)):
        raise CallFault(FaultKind.BAD_REQUEST, "'tools' must be a list of objects", param="tools")
    options, offered = chat_options(body, tools_of(body))
    return ModelCall(
        messages=messages_of(messages),
        tools=offered or None,
        options=options,
        model=model_of(body),
        stream=body.get("stream") is True,
        choices=choices_of(body.get("n")),
        wants_usage=wants_usage(body),
        wants_ids=body.get("return_token_ids") is True,
        wants_logprobs=body.get("logprobs") is True,
        native=ChatAsk(bool(offered) and not tools, custom_names(body)),
    )


def _reply_id(head: ReplyHead) -> str:
    return f"chatcmpl-{head.completion_id}"


def _functions(call: ModelCall) -> bool:
    return isinstance(call.native, ChatAsk) and call.native.functions


def _whole_choice(call: ModelCall, choice: Choice) -> dict[str, Any]:
    message = choice.message
    if message.get("content") is None and not message.get("tool_calls"):
        message = {**message, "content": ""}  # an empty answer is text, so that no reader stumbles
    if _functions(call):
        message = _as_function_call(message)
    if isinstance(call.native, ChatAsk) and call.native.custom:
        message = _with_custom(message, call.native.custom)
    shown: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "finish_reason": _finish_reason(choice.finish_reason or "stop", _functions(call)),
        "stop_reason": choice.stop_reason,
        "logprobs": None,
    }
    if call.wants_logprobs and choice.logprobs is not None:
        shown["logprobs"] = {"content": strict(choice.logprobs)}
    if call.wants_ids:
        shown["token_ids"] = choice.ids
    return shown


def _finish_reason(reason: str | None, functions: bool) -> str | None:
    return "function_call" if functions and reason == "tool_calls" else reason


def _as_function_call(message: dict[str, Any]) -> dict[str, Any]:
    """A message or a part of one, its first call in the form of 2023, which has room for one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    first = next((call for place, call in enumerate(calls) if call.get("index", place) == 0), None)
    return kept if first is None else {**kept, "function_call": first.get("function") or {}}


def _ended(choice: Choice) -> bool:
    return choice.finish_reason is not None


def _with_custom(message: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """A message whose calls of tools of free text have that form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_custom_call(call) if _name(call) in names else call for call in calls]}


def _name(call: dict[str, Any]) -> str:
    return str((call.get("function") or {}).get("name"))


def _custom_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments") or ""
    try:
        given = decode(arguments.encode())
    except NotJson:
        given = None
    text = given.get(CUSTOM_INPUT) if isinstance(given, dict) else None
    custom = {"name": _name(call), "input": text if isinstance(text, str) else arguments}
    return {"id": call.get("id"), "type": "custom", "custom": custom}
