"""OpenAI Responses: POST /v1/responses, whole and streamed. Nothing is stored, so every request brings its history.

What the API means by a request, see `responses_input` and `responses_tools`; what is written back, `responses_output`
and `responses_stream`. Settings that only the vendor's servers understand are accepted and kept from the engine; other
unknown fields go through to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from polarq_proxy.call import Answer, ModelCall
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
from polarq_proxy.dialects.openai_chat import OpenAIChatDialect
from polarq_proxy.dialects.responses_errors import error_of
from polarq_proxy.dialects.responses_input import messages_of
from polarq_proxy.dialects.responses_output import Asked, ended_response, first_choice, items_of, text_logprobs
from polarq_proxy.dialects.responses_stream import ResponsesStream
from polarq_proxy.dialects.responses_tools import Toolbox, tool_choice_of, toolbox_of
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode, encode

_NOT_SENT_ON = frozenset({
    "access_programs", "background", "client_metadata", "context_management", "conversation", "image", "include",
    "input", "instructions", "logprobs", "max_output_tokens", "max_tool_calls", "messages", "metadata", "model",
    "moderation", "n", "parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_diagnostics",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning", "return_token_ids",
    "safety_identifier", "service_tier", "store", "stream", "stream_options", "text", "tool_choice", "tools",
    "truncation", "user",
})  # fmt: skip

_STORED = {
    "previous_response_id": "the whole history in 'input'",
    "conversation": "the whole history in 'input'",
    "prompt": "the prompt's text in 'instructions' or 'input'",
}
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


class OpenAIResponsesDialect(Dialect):
    name: ClassVar[str] = "openai_responses"
    routes: ClassVar[Sequence[Route]] = (
        Route("POST", "responses", Operation.GENERATE),
        Route("POST", "responses/input_tokens", Operation.COUNT_TOKENS),
    )

    def claims(self, request: NativeRequest) -> bool:
        return request.path.partition("/")[0] == "responses"

    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        try:
            body = decode(request.body)
        except NotJson as exc:
            raise CallFault(FaultKind.BAD_REQUEST, f"the request body is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise CallFault(FaultKind.BAD_REQUEST, "the request body must be a JSON object")
        _refuse_stored(body)
        toolbox = toolbox_of(body.get("tools"))
        messages = messages_of(body.get("input"), body.get("instructions"), toolbox)
        options = _options(body, toolbox)
        include = body.get("include")
        include = include if isinstance(include, list) else []
        return ModelCall(
            messages=messages,
            tools=toolbox.offered or None,
            options=options,
            model=body["model"] if isinstance(body.get("model"), str) else "",
            stream=body.get("stream") is True,
            wants_ids=body.get("return_token_ids") is True,
            wants_logprobs=_LOGPROBS in include or bool(options.get("top_logprobs")),
            native=Asked(toolbox, _echo(body), _SEALED in include),
        )

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        choice = first_choice(answer)
        found = items_of(call.native, head.completion_id, choice)
        logprobs = text_logprobs(call, found.items, choice)
        output = [item.closed(found.status(item, choice.finish_reason), logprobs) for item in found.items]
        return Reply(encode(ended_response(call, head, answer, output)))

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return ResponsesStream(call, head)

    def fault(self, fault: CallFault) -> Reply:
        return Reply(encode(error_of(fault)), fault.status, retry_headers(fault))

    def counted(self, call: ModelCall, tokens: int) -> Reply:
        return Reply(encode({"object": "response.input_tokens", "input_tokens": tokens}))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        return OpenAIChatDialect().models(models)  # the same object in all of the vendor's APIs

    def model(self, model: ServedModel) -> Reply:
        return OpenAIChatDialect().model(model)


def _refuse_stored(body: dict[str, Any]) -> None:
    for key, instead in _STORED.items():
        if body.get(key) is not None:
            text = f"'{key}' names something stored, and polarq stores nothing: send {instead}"
            raise CallFault(FaultKind.BAD_REQUEST, text, param=key)


def _options(body: dict[str, Any], toolbox: Toolbox) -> dict[str, Any]:
    """What the engine is told beside messages and tools, in chat names."""
    options = {key: value for key, value in body.items() if key not in _NOT_SENT_ON and value is not None}
    if body.get("max_output_tokens") is not None:
        options["max_completion_tokens"] = body["max_output_tokens"]
    reasoning, text = body.get("reasoning"), body.get("text")
    if isinstance(reasoning, dict) and isinstance(reasoning.get("effort"), str):
        options["reasoning_effort"] = reasoning["effort"]
    form = _response_format(text.get("format")) if isinstance(text, dict) else None
    if form is not None:
        options["response_format"] = form
    choice = tool_choice_of(body.get("tool_choice"), toolbox)
    if toolbox.offered:  # engines refuse both without a tool
        if choice is not None:
            options["tool_choice"] = choice
        if isinstance(body.get("parallel_tool_calls"), bool):
            options["parallel_tool_calls"] = body["parallel_tool_calls"]
    return options


def _response_format(form: Any) -> dict[str, Any] | None:
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return None
    if form.get("type") != "json_schema":
        return {"type": form["type"]}
    schema = {key: value for key, value in form.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": {"name": "answer", **schema}}


def _echo(body: dict[str, Any]) -> dict[str, Any]:
    reasoning = body.get("reasoning")
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **(reasoning if isinstance(reasoning, dict) else {})},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }
