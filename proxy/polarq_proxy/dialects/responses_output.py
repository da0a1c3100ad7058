"""Answers in the form of the Responses API: output items, and the response object around them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polarq.contracts.completion import Usage
from polarq_proxy.call import Answer, Choice, ModelCall
from polarq_proxy.dialects.base import ReplyHead
from polarq_proxy.dialects.responses_input import RAW_CALL, item_id
from polarq_proxy.dialects.responses_parts import seal
from polarq_proxy.dialects.responses_tools import Toolbox, ToolKind, custom_input, shell_action

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"

UNKNOWN_LOGPROB = -9999.0
"""What the API's reference says stands for "not known"; a harness never sees NaN."""

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer needs to know of the request."""

    toolbox: Toolbox
    echo: dict[str, Any]
    """Settings that a response object repeats."""
    seals: bool
    """Whether thinking is asked for in a form that a harness can carry back."""


class ItemKind(StrEnum):
    THINKING = "reasoning"
    MESSAGE = "message"
    CALL = "call"


@dataclass(slots=True)
class OutputItem:
    """One item of an answer, whole or while it comes in."""

    kind: ItemKind
    answer_id: str
    place: int
    asked: Asked
    name: str = ""
    """Of a call: as the model wrote it."""
    call_id: str = ""
    _parts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self._parts.append(text)

    @property
    def text(self) -> str:
        """Thinking, words or arguments so far."""
        return "".join(self._parts)

    @property
    def native_id(self) -> str:
        return item_id(self._prefix, self.answer_id, self.place)

    @property
    def _prefix(self) -> str:
        if self.kind is not ItemKind.CALL:
            return "rs" if self.kind is ItemKind.THINKING else "msg"
        tool = self.asked.toolbox.native(self.name)
        if tool.kind is ToolKind.CUSTOM:
            return "ctc" if custom_input(self.text) is not None else RAW_CALL
        return "lsc" if tool.kind is ToolKind.LOCAL_SHELL and shell_action(self.text) is not None else "fc"

    @property
    def shown_as_it_comes(self) -> bool:
        """Other forms of calls can only be written once the arguments are whole."""
        return self.kind is not ItemKind.CALL or self.asked.toolbox.native(self.name).kind is ToolKind.FUNCTION

    def part(self, logprobs: list[Any] | None = None) -> dict[str, Any]:
        """The one content part of thinking or a message."""
        if self.kind is ItemKind.THINKING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs or []}

    def opened(self) -> dict[str, Any]:
        """The item before its first word."""
        shown = self.closed(IN_PROGRESS)
        for key, blank in (("content", []), ("arguments", ""), ("input", ""), ("encrypted_content", None)):
            if key in shown:
                shown[key] = blank
        return shown

    def closed(self, status: str, logprobs: list[Any] | None = None) -> dict[str, Any]:
        """The item as it is by now."""
        if self.kind is ItemKind.THINKING:
            return {
                "id": self.native_id,
                "type": "reasoning",
                "summary": [],
                "content": [self.part()],
                "encrypted_content": seal(self.text) if self.asked.seals else None,
                "status": status,
            }
        if self.kind is ItemKind.MESSAGE:
            shown = {"id": self.native_id, "type": "message", "status": status, "role": "assistant"}
            return {**shown, "content": [self.part(logprobs)]}
        return self._call(status)

    def _call(self, status: str) -> dict[str, Any]:
        tool, arguments = self.asked.toolbox.native(self.name), self.text
        shown: dict[str, Any] = {"id": self.native_id, "call_id": self.call_id, "status": status}
        if tool.kind is ToolKind.LOCAL_SHELL and (action := shell_action(arguments)) is not None:
            return {**shown, "type": "local_shell_call", "action": action}
        shown["name"] = tool.name
        if tool.namespace is not None:
            shown["namespace"] = tool.namespace
        if tool.kind is ToolKind.CUSTOM:
            text = custom_input(arguments)
            return {**shown, "type": "custom_tool_call", "input": arguments if text is None else text}
        return {**shown, "type": "function_call", "arguments": arguments}


class ItemList:
    """The items of one answer, in order."""

    def __init__(self, asked: Asked, answer_id: str) -> None:
        self._asked = asked
        self._answer_id = answer_id
        self._call_ids: set[str] = set()
        self.items: list[OutputItem] = []

    def new(self, kind: ItemKind) -> OutputItem:
        item = OutputItem(kind, self._answer_id, len(self.items), self._asked)
        self.items.append(item)
        return item

    def name_call(self, item: OutputItem) -> None:
        """Gives a call an id that no other call of this answer has; engines may give none, or one twice."""
        if not item.call_id or item.call_id in self._call_ids:
            item.call_id = item_id("call", self._answer_id, item.place)
        self._call_ids.add(item.call_id)

    def complete(self, finish_reason: str | None) -> None:
        """An answer without words still is one: harnesses expect a message unless there is a call."""
        spoken = any(item.kind is not ItemKind.THINKING for item in self.items)
        if not spoken and not (self.items and finish_reason in _INCOMPLETE_REASONS):
            self.new(ItemKind.MESSAGE)

    def status(self, item: OutputItem, finish_reason: str | None) -> str:
        return INCOMPLETE if finish_reason in _INCOMPLETE_REASONS and item is self.items[-1] else COMPLETED


def items_of(asked: Asked, answer_id: str, choice: Choice) -> ItemList:
    """The items of a whole answer."""
    found = ItemList(asked, answer_id)
    for kind, key in ((ItemKind.THINKING, "reasoning_content"), (ItemKind.MESSAGE, "content")):
        text = choice.message.get(key)
        if isinstance(text, str) and text:
            found.new(kind).add(text)
    calls = choice.message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            item = found.new(ItemKind.CALL)
            item.name, item.call_id = text_or_blank(function.get("name")), text_or_blank(call.get("id"))
            item.add(text_or_blank(function.get("arguments")))
            found.name_call(item)
    found.complete(choice.finish_reason)
    return found


def first_choice(answer: Answer) -> Choice:
    """The Responses API knows one answer to a request."""
    return answer.choices[0] if answer.choices else Choice(0)


def response_of(
    call: ModelCall, head: ReplyHead, model: str, status: str, output: list[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    """A response object; `fields` replace its blanks."""
    asked: Asked = call.native
    return {
        "id": f"resp_{head.completion_id}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": call.model or model,
        "output": output,
        "usage": None,
        **asked.echo,
        **fields,
    }


def ended_response(
    call: ModelCall, head: ReplyHead, answer: Answer, output: list[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    """The response object of an answer that came to its end."""
    choice = first_choice(answer)
    reason = _INCOMPLETE_REASONS.get(choice.finish_reason or "")
    if reason is not None:
        fields["incomplete_details"] = {"reason": reason}
    if call.wants_ids:
        fields.update(prompt_token_ids=answer.prompt_ids, token_ids=choice.ids)
    status = COMPLETED if reason is None else INCOMPLETE
    return response_of(call, head, answer.model, status, output, usage=_usage(answer.usage), **fields)


def text_logprobs(call: ModelCall, items: list[OutputItem], choice: Choice) -> list[Any]:
    """Of the message's text; blank unless the message is all there is, for engines do not say which entry is whose."""
    if not call.wants_logprobs or choice.logprobs is None or [item.kind for item in items] != [ItemKind.MESSAGE]:
        return []
    return [_entry(entry) for entry in choice.logprobs if isinstance(entry, dict)]


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    value, top = entry.get("logprob"), entry.get("top_logprobs")
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    shown = {
        "token": text_or_blank(entry.get("token")),
        "bytes": entry.get("bytes") or [],
        "logprob": value if finite else UNKNOWN_LOGPROB,
    }
    more = [_entry(other) for other in top if isinstance(other, dict)] if isinstance(top, list) else []
    return {**shown, "top_logprobs": more}


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        # Where the engine does not count thinking it is 0: the field may not be left out.
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def text_or_blank(value: Any) -> str:
    return value if isinstance(value, str) else ""
