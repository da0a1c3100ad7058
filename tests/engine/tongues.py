"""One question in each dialect, and what its answer says, whole or streamed, in terms that all dialects share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .proxied import Session

ASK_S = 300.0
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = "Look up the weather of a city."


@dataclass
class Said:
    """`end`: why it ended, in the dialect's own word."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(name, arguments parsed)."""
    end: str = ""
    tokens: tuple[int, int] = (-1, -1)
    """Of prompt and answer."""


@dataclass(frozen=True)
class Tongue:
    """`path` and `body` take what is asked; `whole` reads an answer and `events` the events of a stream."""

    name: str
    path: Callable[[bool], str]
    body: Callable[[str, int, bool, bool], dict[str, Any]]
    """(question, most tokens, with the tool, streamed)."""
    whole: Callable[[Any], Said]
    stream: Callable[[Sequence[Any]], Said]
    count: tuple[str, Callable[[Any], int]] | None
    """Where tokens are counted, and how the answer says it."""
    ends: tuple[str, str]
    """Its words for an answer that was cut off and for a call of a tool."""
    overflow: str
    """Part of what it says when the context is too long."""

    async def ask(self, session: Session, question: str, *, most: int = 32, tool: bool = False, stream: bool) -> Said:
        """Raises httpx.HTTPStatusError."""
        response = await self.post(session, self.path(stream), self.body(question, most, tool, stream))
        response.raise_for_status()
        if not stream:
            return self.whole(response.json())
        lines = (line for line in response.text.replace("\r\n", "\n").split("\n") if line.startswith("data: {"))
        return self.stream([json.loads(line[6:]) for line in lines])

    async def counted(self, session: Session, question: str, *, tool: bool) -> int:
        assert self.count is not None
        path, read = self.count
        response = await self.post(session, path, self.body(question, 32, tool, False))
        response.raise_for_status()
        return read(response.json())

    async def post(self, session: Session, path: str, body: dict[str, Any]) -> httpx.Response:
        base = session.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(timeout=ASK_S) as client:
            return await client.post(f"{base}{path}", json=body)


def _chat_body(question: str, most: int, tool: bool, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "gpt-whatever", "messages": [{"role": "user", "content": question}]}
    body |= {"max_tokens": most, "temperature": 1.0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if tool:
        body["tools"] = [{"type": "function", "function": {"name": "get_weather", "description": ABOUT,
                                                          "parameters": PARAMETERS}}]  # fmt: skip
    return body


def _chat_whole(answer: Any) -> Said:
    [choice] = answer["choices"]
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return Said(message.get("content") or "", message.get("reasoning_content") or "", calls, choice["finish_reason"],
                _openai_usage(answer["usage"]))  # fmt: skip


def _chat_stream(events: Sequence[Any]) -> Said:
    said, names, texts = Said(), dict[int, str](), dict[int, str]()
    for event in events:
        if event.get("usage"):
            said.tokens = _openai_usage(event["usage"])
        for choice in event["choices"]:
            delta = choice["delta"]
            said.text += delta.get("content") or ""
            said.reasoning += delta.get("reasoning_content") or ""
            said.end = choice.get("finish_reason") or said.end
            for call in delta.get("tool_calls") or ():
                names[call["index"]] = names.get(call["index"], "") + (call["function"].get("name") or "")
                texts[call["index"]] = texts.get(call["index"], "") + (call["function"].get("arguments") or "")
    said.calls = [(names[index], json.loads(texts[index])) for index in sorted(names)]
    return said


def _openai_usage(usage: Any) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def _completions_body(question: str, most: int, tool: bool, stream: bool) -> dict[str, Any]:
    body = {"model": "gpt-whatever", "prompt": question, "max_tokens": most, "temperature": 1.0, "stream": stream}
    return {**body, "stream_options": {"include_usage": True}} if stream else body


def _completions_whole(answer: Any) -> Said:
    [choice] = answer["choices"]
    return Said(choice["text"], end=choice["finish_reason"], tokens=_openai_usage(answer["usage"]))


def _completions_stream(events: Sequence[Any]) -> Said:
    said = Said()
    for event in events:
        if event.get("usage"):
            said.tokens = _openai_usage(event["usage"])
        for choice in event["choices"]:
            said.text += choice["text"]
            said.end = choice.get("finish_reason") or said.end
    return said


def _responses_body(question: str, most: int, tool: bool, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "gpt-whatever", "input": question, "max_output_tokens": most, "temperature": 1.0}
    if tool:
        body["tools"] = [{"type": "function", "name": "get_weather", "description": ABOUT, "parameters": PARAMETERS}]
    return {**body, "stream": stream}


def _responses_whole(answer: Any) -> Said:
    said = Said(end=(answer.get("incomplete_details") or {}).get("reason") or answer["status"])
    for item in answer["output"]:
        if item["type"] == "message":
            said.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            said.reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
        elif item["type"] == "function_call":
            said.calls.append((item["name"], json.loads(item["arguments"])))
    said.tokens = (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"])
    return said


def _responses_stream(events: Sequence[Any]) -> Said:
    """Its last event holds the whole answer; what the deltas say must be the same."""
    said = _responses_whole(events[-1]["response"])

    def deltas(*kinds: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] in kinds)

    assert deltas("response.output_text.delta") == said.text
    assert deltas("response.reasoning_text.delta", "response.reasoning_summary_text.delta") == said.reasoning
    return said


def _messages_body(question: str, most: int, tool: bool, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "claude-whatever", "messages": [{"role": "user", "content": question}]}
    body |= {"max_tokens": most, "temperature": 1.0, "stream": stream}
    if tool:
        body["tools"] = [{"name": "get_weather", "description": ABOUT, "input_schema": PARAMETERS}]
    return body


def _messages_whole(answer: Any) -> Said:
    said = Said(end=answer["stop_reason"], tokens=_messages_usage(answer["usage"]))
    for block in answer["content"]:
        said.text += block.get("text", "")
        said.reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":
            said.calls.append((block["name"], block["input"]))
    return said


def _messages_stream(events: Sequence[Any]) -> Said:
    said, name, arguments = Said(), "", ""
    for event in events:
        if event["type"] == "content_block_start":
            name, arguments = event["content_block"].get("name", ""), ""
        elif event["type"] == "content_block_delta":
            said.text += event["delta"].get("text", "")
            said.reasoning += event["delta"].get("thinking", "")
            arguments += event["delta"].get("partial_json", "")
        elif event["type"] == "content_block_stop" and name:
            said.calls.append((name, json.loads(arguments)))
            name = ""
        elif event["type"] == "message_delta":
            said.end, said.tokens = event["delta"]["stop_reason"], _messages_usage(event["usage"])
    return said


def _messages_usage(usage: Any) -> tuple[int, int]:
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return usage["input_tokens"] + cached, usage["output_tokens"]


def _google_body(question: str, most: int, tool: bool, stream: bool) -> dict[str, Any]:
    settings = {"maxOutputTokens": most, "temperature": 1.0, "thinkingConfig": {"includeThoughts": True}}
    body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": question}]}], "generationConfig": settings}
    if tool:
        declared = {"name": "get_weather", "description": ABOUT, "parametersJsonSchema": PARAMETERS}
        body["tools"] = [{"functionDeclarations": [declared]}]
    return body


def _google_stream(answers: Sequence[Any]) -> Said:
    said = Said()
    for answer in answers:
        for candidate in answer.get("candidates", ()):
            said.end = candidate.get("finishReason") or said.end
            for part in candidate.get("content", {}).get("parts", ()):
                if part.get("thought"):
                    said.reasoning += part.get("text", "")
                else:
                    said.text += part.get("text", "")
                if "functionCall" in part:
                    said.calls.append((part["functionCall"]["name"], part["functionCall"]["args"]))
        if usage := answer.get("usageMetadata"):
            answered = usage.get("candidatesTokenCount", 0) + usage.get("thoughtsTokenCount", 0)
            said.tokens = (usage["promptTokenCount"], answered)
    return said


_GOOGLE = "/v1beta/models/gemini-whatever:"

CHAT = Tongue("chat", lambda stream: "/v1/chat/completions", _chat_body, _chat_whole, _chat_stream, None,
              ("length", "tool_calls"), "maximum context length is")  # fmt: skip
COMPLETIONS = Tongue("completions", lambda stream: "/v1/completions", _completions_body, _completions_whole,
                     _completions_stream, None, ("length", ""), "maximum context length is")  # fmt: skip
RESPONSES = Tongue("responses", lambda stream: "/v1/responses", _responses_body, _responses_whole, _responses_stream,
                   ("/v1/responses/input_tokens", lambda answer: int(answer["input_tokens"])),
                   ("max_output_tokens", "completed"), "context_length_exceeded")  # fmt: skip
MESSAGES = Tongue("messages", lambda stream: "/v1/messages", _messages_body, _messages_whole, _messages_stream,
                  ("/v1/messages/count_tokens", lambda answer: int(answer["input_tokens"])),
                  ("max_tokens", "tool_use"), "prompt is too long")  # fmt: skip
GOOGLE = Tongue("google",
                lambda stream: _GOOGLE + ("streamGenerateContent?alt=sse" if stream else "generateContent"),
                _google_body, lambda answer: _google_stream([answer]), _google_stream,
                (_GOOGLE + "countTokens", lambda answer: int(answer["totalTokens"])),
                ("MAX_TOKENS", "STOP"), "exceeds the maximum number of tokens")  # fmt: skip
TONGUES = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, GOOGLE)
TALKING = (CHAT, RESPONSES, MESSAGES, GOOGLE)
"""Those with messages, tools and thinking."""
