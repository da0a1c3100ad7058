"""Anthropic Messages: POST /v1/messages, whole and streamed, and POST /v1/messages/count_tokens.

Betas, versions, metadata, service tiers, context management and effort are accepted and go nowhere: they steer another
vendor's models. So do budgets for thinking, because an engine keeps them by forcing tokens that the policy did not
sample; only thinking that is switched off is passed on. Of the request's other fields the engine gets those that this
API defines and the few sampling fields in `_ENGINE_FIELDS`, which people add by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
from polarq_proxy.dialects.messages_input import chat_messages, is_prefill, refused
from polarq_proxy.dialects.messages_output import Asked, error_of, message_of
from polarq_proxy.dialects.messages_stream import MessagesStream
from polarq_proxy.dialects.messages_tools import choice, functions
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode, encode

VERSION_HEADER = "anthropic-version"

_NUMBERS = ("temperature", "top_p", "top_k")
_ENGINE_FIELDS = (
    "chat_template_kwargs",
    "frequency_penalty",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
)


class AnthropicMessagesDialect(Dialect):
    name: ClassVar[str] = "anthropic_messages"
    routes: ClassVar[Sequence[Route]] = (
        Route("POST", "messages", Operation.GENERATE),
        Route("POST", "messages/count_tokens", Operation.COUNT_TOKENS),
    )

    def claims(self, request: NativeRequest) -> bool:
        return VERSION_HEADER in request.headers or request.path.split("/", 1)[0] == "messages"

    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        try:
            body = decode(request.body)
        except NotJson as exc:
            raise CallFault(FaultKind.BAD_REQUEST, f"the request body is not JSON: {exc}") from None
        if not isinstance(body, dict):
            raise CallFault(FaultKind.BAD_REQUEST, "the request body must be a JSON object")
        try:
            return _call(body)
        except RecursionError:
            raise CallFault(FaultKind.BAD_REQUEST, "the request body is nested too deeply") from None

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        return Reply(encode(message_of(call, answer, head)), headers={"request-id": f"req_{head.completion_id}"})

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return MessagesStream(call, head)

    def fault(self, fault: CallFault) -> Reply:
        headers = retry_headers(fault)
        if fault.status < 500 and fault.status != 408 and fault.retry_after_s is None:
            # Claude Code tries again at more than a status can stop, but obeys this, as the SDKs do.
            headers["x-should-retry"] = "false"
        return Reply(encode(error_of(fault)), fault.status, headers)

    def counted(self, call: ModelCall, tokens: int) -> Reply:
        return Reply(encode({"input_tokens": tokens}))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        names = [model.name for model in models]
        listed = {"data": [_model(model) for model in models], "has_more": False}
        return Reply(
            encode({**listed, "first_id": names[0] if names else None, "last_id": names[-1] if names else None})
        )

    def model(self, model: ServedModel) -> Reply:
        return Reply(encode(_model(model)))


def _call(body: Mapping[str, Any]) -> ModelCall:
    messages = chat_messages(body.get("system"), body.get("messages"))
    tools = functions(body.get("tools"))
    options = {**_sampling(body), **choice(body.get("tool_choice"), tools), **_thinking(body), **_format(body)}
    if is_prefill(body.get("messages")):
        options.update(continue_final_message=True, add_generation_prompt=False)
    return ModelCall(
        messages=messages,
        tools=tools,
        options=options,
        model=body["model"] if isinstance(body.get("model"), str) else "",
        stream=body.get("stream") is True,
        native=Asked(tuple(options.get("stop", ()))),
    )


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: body[key] for key in _ENGINE_FIELDS if body.get(key) is not None}
    limit = body.get("max_tokens")
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise refused("max_tokens", "must be a whole number from 1")
        options["max_tokens"] = limit
    for key in _NUMBERS:
        value = body.get(key)
        if value is not None:
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise refused(key, "must be a number")
            options[key] = value
    stops = body.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise refused("stop_sequences", "must be a list of strings")
        if stops := [stop for stop in stops if stop]:
            options["stop"] = stops
    return options


def _thinking(body: Mapping[str, Any]) -> dict[str, Any]:
    """Only `disabled` says more than the node's own default: it comes with a limit too small for any thinking."""
    thinking = body.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "disabled":
        return {}
    own = body.get("chat_template_kwargs")
    return {"chat_template_kwargs": {"enable_thinking": False, **(own if isinstance(own, dict) else {})}}


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """`output_config.format`, which was `output_format` before."""
    config = body.get("output_config")
    asked = config.get("format") if isinstance(config, dict) else None
    asked = asked if isinstance(asked, dict) else body.get("output_format")
    if not isinstance(asked, dict) or asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
        return {}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": asked["schema"]}}}


def _model(model: ServedModel) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
    return shown if model.max_context is None else {**shown, "max_input_tokens": model.max_context}
