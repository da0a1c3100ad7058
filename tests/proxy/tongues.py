"""A plain conversation in each dialect: how it is asked, and what text an answer holds, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Talk = Sequence[tuple[str, str]]
"""(role, text), role `user` or `assistant`."""


@dataclass(frozen=True)
class Tongue:
    """One dialect. `body` gives the request of a conversation; `said` the text of a whole answer; `told` that of one
    event; `end` stands in the raw bytes of a stream that came to its end."""

    name: str
    path: str
    stream_path: str
    body: Callable[[Talk], dict[str, Any]]
    said: Callable[[Any], str]
    told: Callable[[Any], str]
    end: bytes

    def request(self, talk: Talk, *, stream: bool) -> tuple[str, dict[str, Any]]:
        """(path, body)."""
        body = self.body(talk)
        if self.name == "google":
            return (self.stream_path if stream else self.path), body
        return (self.stream_path if stream else self.path), {**body, "stream": stream}

    def streamed(self, raw: bytes) -> tuple[str, bool]:
        """(the text so far, whether the end came) of whole events; half an event at the end is not read."""
        text = ""
        for block in raw.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
            for line in block.split(b"\n"):
                if line.startswith(b"data: {"):
                    text += self.told(json.loads(line[6:]))
        return text, self.end in raw


def _messages(talk: Talk) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in talk]


def _contents(talk: Talk) -> list[dict[str, Any]]:
    return [{"role": "model" if role == "assistant" else role, "parts": [{"text": text}]} for role, text in talk]


def _input(talk: Talk) -> list[dict[str, Any]]:
    kinds = {"user": "input_text", "assistant": "output_text"}
    return [{"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]} for role, text in talk]


def _google(answer: Any) -> str:
    parts = [part for found in answer.get("candidates", []) for part in found.get("content", {}).get("parts", [])]
    return "".join(part.get("text", "") for part in parts)


def _responses(answer: Any) -> str:
    items = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"])


CHAT = Tongue(
    "chat",
    "/v1/chat/completions",
    "/v1/chat/completions",
    lambda talk: {"model": "asked", "messages": _messages(talk)},
    lambda answer: str(answer["choices"][0]["message"]["content"]),
    lambda event: "".join(choice["delta"].get("content") or "" for choice in event.get("choices", [])),
    b"data: [DONE]\n\n",
)
COMPLETIONS = Tongue(
    "completions",
    "/v1/completions",
    "/v1/completions",
    lambda talk: {
        "model": "asked",
        "max_tokens": 200,
        "prompt": "\n".join(f"{role}: {text}" for role, text in talk) + "\nassistant: ",
    },
    lambda answer: str(answer["choices"][0]["text"]),
    lambda event: "".join(choice.get("text") or "" for choice in event.get("choices", [])),
    b"data: [DONE]\n\n",
)
RESPONSES = Tongue(
    "responses",
    "/v1/responses",
    "/v1/responses",
    lambda talk: {"model": "asked", "input": _input(talk)},
    _responses,
    lambda event: str(event["delta"]) if event["type"] == "response.output_text.delta" else "",
    b"event: response.completed\n",
)
MESSAGES = Tongue(
    "messages",
    "/v1/messages",
    "/v1/messages",
    lambda talk: {"model": "asked", "max_tokens": 200, "messages": _messages(talk)},
    lambda answer: "".join(part["text"] for part in answer["content"] if part["type"] == "text"),
    lambda event: str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else "",
    b"event: message_stop\n",
)
GOOGLE = Tongue(
    "google",
    "/v1beta/models/asked:generateContent",
    "/v1beta/models/asked:streamGenerateContent?alt=sse",
    lambda talk: {"contents": _contents(talk)},
    _google,
    _google,
    b'"finishReason":"STOP"',
)
TONGUES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GOOGLE)
