"""Asking the scripted server as a token-recording client does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from polarq.testing.inference import CallLedger, Scenario, Script, ScriptedInference, Turn
from tests.testing.inference.captures import events_of

HELLO = [{"role": "system", "content": "You help."}, {"role": "user", "content": "weather in Paris?"}]
TOKENS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "w",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Messages = list[dict[str, Any]]


def scripted(*turns: Turn, **settings: Any) -> Scenario:
    """A scenario of one script with these turns."""
    return Scenario(name="test", scripts=(Script(name="only", turns=turns),), **settings)


@dataclass
class Client:
    """One server and a connection to it."""

    server: ScriptedInference
    http: httpx.AsyncClient

    @property
    def ledger(self) -> CallLedger:
        return self.server.ledger

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def chat(
        self, messages: Messages | None = None, *, headers: dict[str, str] | None = None, **body: Any
    ) -> Any:
        """The JSON of one chat completion that asks for ids and log-probabilities."""
        request = {"model": "tiny", "messages": messages or HELLO, **TOKENS, **body}
        response = await self.http.post("/v1/chat/completions", json=request, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, messages: Messages | None = None, **body: Any) -> Streamed:
        """The same request streamed."""
        request = {"model": "tiny", "messages": messages or HELLO, **TOKENS, **body, "stream": True}
        response = await self.http.post("/v1/chat/completions", json=request)
        assert response.status_code == 200, response.text
        return Streamed.of(events_of(response.text))


@dataclass
class Streamed:
    """One choice put together from its chunks, as a proxy does it."""

    events: list[Any]
    prompt_ids: list[int] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    message: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: dict[str, Any] | None = None
    done: bool = False

    @classmethod
    def of(cls, events: list[Any], index: int = 0) -> Streamed:
        found = cls(events)
        for event in events:
            if event == "[DONE]":
                found.done = True
                continue
            found.usage = event.get("usage") or found.usage
            for choice in event.get("choices", []):
                if choice["index"] == index:
                    found.prompt_ids = event.get("prompt_token_ids") or found.prompt_ids
                    found._add(choice)
        return found

    def _add(self, choice: dict[str, Any]) -> None:
        self.ids += choice.get("token_ids") or []
        self.logprobs += (choice.get("logprobs") or {}).get("content", [])
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason
        for name in ("content", "reasoning"):
            if text := choice["delta"].get(name):
                self.message[name] = self.message.get(name, "") + text
        for part in choice["delta"].get("tool_calls", []):
            calls: list[dict[str, Any]] = self.message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": part["type"], "function": {"name": "", "arguments": ""}})
            for name, text in part["function"].items():
                calls[part["index"]]["function"][name] += text


def logprobs_of(entries: list[dict[str, Any]]) -> list[float]:
    return [entry["logprob"] for entry in entries]
