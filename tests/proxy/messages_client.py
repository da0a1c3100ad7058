"""A Messages request without a server around it, and a Messages stream as its readers take it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.anthropic_messages import AnthropicMessagesDialect
from polarq_proxy.dialects.base import NativeRequest, ReplyHead
from polarq_proxy.dialects.messages_stream import MessagesStream

from .rig import refuse

DIALECT = AnthropicMessagesDialect()
HEAD = ReplyHead("c0ffee", 0)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def native(body: Any, path: str = "messages", headers: dict[str, str] | None = None) -> NativeRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return NativeRequest(path, {}, headers or {}, data)


def parsed(body: Any) -> ModelCall:
    match = re.fullmatch("messages", "messages")
    assert match is not None
    return DIALECT.parse(native(body), match)


def asked(messages: Any = HELLO, **fields: Any) -> ModelCall:
    return parsed({"model": "asked", "max_tokens": 64, "messages": messages, **fields})


def stream(call: ModelCall | None = None) -> MessagesStream:
    writer = DIALECT.writer(call or asked(), HEAD)
    assert isinstance(writer, MessagesStream)
    return writer


@dataclass
class Events:
    """Checks on the way that blocks come one after the other and that nothing follows the end."""

    all: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, data: bytes) -> Events:
        events = cls()
        for block in data.decode("utf-8").split("\n\n"):
            if block:
                name, _, rest = block.partition("\n")
                assert name.startswith("event: ")
                assert rest.startswith("data: ")
                event = json.loads(rest[6:], parse_constant=refuse)
                assert event["type"] == name[7:]
                events.all.append(event)
        events._read()
        return events

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.all]

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.all if event["type"] == name]

    def text(self) -> str:
        return "".join(block.get("text", "") for block in self.blocks)

    def _read(self) -> None:
        opened: int | None = None
        for event in self.all:
            if event["type"] == "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(self.blocks)
                self.blocks.append({**event["content_block"], "pieces": []})
            elif event["type"] == "content_block_delta":
                assert event["index"] == opened
                self._add(self.blocks[-1], event["delta"])
            elif event["type"] == "content_block_stop":
                assert event["index"] == opened
                opened = None
            elif event["type"] in {"message_delta", "message_stop"}:
                assert opened is None
        for block in self.blocks:
            pieces = block.pop("pieces")
            if block["type"] == "tool_use":
                block["json"] = "".join(pieces)

    @staticmethod
    def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
        kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
        if delta["type"] == "input_json_delta":
            assert delta["partial_json"]
            block["pieces"].append(delta["partial_json"])
        else:
            key = kinds[delta["type"]]
            block[key] += delta[key]


def as_whole(blocks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Streamed blocks as they would be in a whole message."""
    whole = []
    for streamed in blocks:
        block = dict(streamed)
        if "json" in block:
            block["input"] = json.loads(block.pop("json"), parse_constant=refuse)
        whole.append(block)
    return whole
