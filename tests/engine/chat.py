"""What a chat completion said about its tokens, whichever way it was asked for: unary or streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .server import EngineName

ASK_FOR_TOKENS: Mapping[str, Any] = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
REQUEST_DEADLINE_S = 120.0
WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look up the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WITHOUT_THINKING: Mapping[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL_CALL_TEXT = 'ok <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass
class Answer:
    """One choice, re-assembled. Lists are empty where the server gave nothing."""

    prompt_ids: list[int] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list)
    """(function name, arguments as text)."""
    frames: list[dict[str, Any]] = field(default_factory=list)
    """The JSON bodies as they came: one for a unary answer, one per event for a stream."""

    @property
    def text(self) -> str:
        return self.reasoning + self.content


def says(text: str, **more: Any) -> dict[str, Any]:
    """A chat request with one user message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def a_word_in(text: str) -> str:
    """Three letters from the second half of `text`, to stop at: no half characters, no blanks that parsers strip."""
    found = re.search(r"[A-Za-z]{3}", text[len(text) // 2 :])
    if found is None:
        raise ValueError(f"no word in {text!r}")
    return found[0]


def forced_tool_call(engine: EngineName = "vllm", **more: Any) -> dict[str, Any]:
    """A chat request whose answer is a tool call whatever the model would have said.

    Thinking is switched off because the grammar applies only to what follows the thinking.
    """
    forced: dict[EngineName, dict[str, Any]] = {
        "vllm": {"structured_outputs": {"choice": [TOOL_CALL_TEXT]}},
        "sglang": {"regex": regex_of_the_call()},
    }
    return says(
        "weather in Paris?",
        tools=[WEATHER_TOOL],
        tool_choice="auto",
        max_tokens=200,
        **WITHOUT_THINKING,
        **forced[engine],
        **more,
    )


def regex_of_the_call() -> str:
    """A pattern that only the forced call matches. Newlines and braces are written as grammars of engines take them."""
    return re.escape(TOOL_CALL_TEXT).replace("\\\n", "\\n").replace("\\ ", " ").replace('\\"', '"')


async def ask(url: str, body: Mapping[str, Any], *, key: str = "none", streamed: bool = False) -> Answer:
    """POST `body` to a chat completions `url` and read the whole answer. Raises httpx.HTTPStatusError."""
    headers = {"Authorization": f"Bearer {key}"}
    if not streamed:
        async with httpx.AsyncClient(timeout=REQUEST_DEADLINE_S) as client:
            response = await client.post(url, json=dict(body), headers=headers)
            response.raise_for_status()
            return read_unary(response.json())
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        httpx.AsyncClient(timeout=REQUEST_DEADLINE_S) as client,
        client.stream("POST", url, json=asked, headers=headers) as response,
    ):
        if response.is_error:
            await response.aread()
            response.raise_for_status()
        return read_stream([line async for line in response.aiter_lines()])


def read_unary(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    message = choice["message"]
    return Answer(
        prompt_ids=body.get("prompt_token_ids") or [],
        sampled_ids=choice.get("token_ids") or [],
        logprobs=_logprobs(choice),
        usage=body.get("usage") or {},
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
        content=message.get("content") or "",
        reasoning=_reasoning(message),
        tool_calls=[(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []],
        frames=[body],
    )


def read_stream(lines: Sequence[str]) -> Answer:
    """Join the events of a stream. A stream that does not end with [DONE] is an error."""
    events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        raise ValueError(f"the stream broke off after {len(events)} events")
    answer = Answer(frames=[json.loads(event) for event in events[:-1]])
    calls: dict[int, tuple[str, str]] = {}
    for frame in answer.frames:
        answer.prompt_ids += frame.get("prompt_token_ids") or []
        answer.usage = frame.get("usage") or answer.usage
        for choice in frame["choices"]:
            answer.sampled_ids += choice.get("token_ids") or []
            answer.logprobs += _logprobs(choice)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if choice.get("stop_reason") is not None:  # 0 is a token id like any other
                answer.stop_reason = choice["stop_reason"]
            delta = choice["delta"]
            answer.content += delta.get("content") or ""
            answer.reasoning += _reasoning(delta)
            for call in delta.get("tool_calls") or []:
                name, arguments = calls.get(call["index"], ("", ""))
                function = call.get("function") or {}
                calls[call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
    answer.tool_calls = [calls[index] for index in sorted(calls)]
    return answer


def _logprobs(choice: Mapping[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]


def _reasoning(message: Mapping[str, Any]) -> str:
    """vLLM says `reasoning`, older servers `reasoning_content`; one that gives both gives the same text twice."""
    return message.get("reasoning") or message.get("reasoning_content") or ""
