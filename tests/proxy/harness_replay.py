"""A captured run of an unmodified harness, played to a proxy as that harness would have: its later requests carry what
this proxy answered to the earlier ones, in the harness's own hand."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from polarq.registry import names, plugin
from polarq.testing.inference import Script, ToolCall, Turn
from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.base import Dialect, NativeRequest, Operation

from .google_client import events as google_events
from .messages_client import Events as MessagesEvents
from .responses_client import Events as ResponsesEvents
from .rig import Rig, Sse

FOLDER = Path(__file__).parent.parent / "fixtures" / "harness"
HARNESSES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())

_MARKS = {"id", "call_id", "signature", "encrypted_content", "thoughtSignature"}
"""What an answer carries for the harness to bring back as it is."""
_OWN_HEADERS = {"authorization", "x-api-key", "x-goog-api-key", "connection", "accept-encoding"}


def captured(harness: str) -> list[dict[str, Any]]:
    """The requests for the model, in order."""
    return [json.loads(path.read_text("utf-8")) for path in sorted((FOLDER / harness).glob("turn*.json"))]


def parsed(request: dict[str, Any]) -> ModelCall:
    """A captured request, as its dialect reads it."""
    path = re.sub(r"^/s/[^/]+/((v1|v1beta)/)*", "", request["path"])
    native = NativeRequest(path, {}, dict(request["headers"]), json.dumps(request["body"]).encode())
    for name in names("dialects"):
        dialect: Dialect = plugin("dialects", name)()
        for route in dialect.routes:
            match = route.match(request["method"], path)
            if match is not None and route.operation is Operation.GENERATE:
                return dialect.parse(native, match)
    raise AssertionError(f"no dialect has a route for {path}")


def script(harness: str) -> Script:
    """The model does what it did then, as later requests tell it, and thinks before it acts."""
    calls = [parsed(request) for request in captured(harness)]
    told = [
        next((message for message in after.messages[len(before.messages) :] if message["role"] == "assistant"), None)
        for before, after in pairwise(calls)
    ]
    turns = [_turn(message) for message in told if message is not None]
    return Script(name="replay", turns=(*turns, Turn(content="Done \U0001f9ea.")))


def _turn(message: dict[str, Any]) -> Turn:
    calls = [
        ToolCall(name=call["function"]["name"], arguments=_tree(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return Turn(reasoning="A file, then.", content=_text(message.get("content")), tool_calls=tuple(calls))


def _tree(arguments: Any) -> dict[str, Any]:
    tree = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert isinstance(tree, dict)
    return tree


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


@dataclass
class Replay:
    """One run. `answers`: what came back, each as its whole native message."""

    rig: Rig
    harness: str
    stream: bool
    answers: list[Any] = field(default_factory=list)
    _new: dict[str, str] = field(default_factory=dict)

    async def play(self) -> None:
        """Sends every request, each after the answer to the one before. Asserts that all are well-formed."""
        requests = captured(self.harness)
        for request, after in zip(requests, [*requests[1:], None], strict=True):
            answer = await self._ask(request)
            self.answers.append(answer)
            if after is not None:
                self._learn(request["body"], after["body"], answer)

    async def _ask(self, request: dict[str, Any]) -> Any:
        body = _replaced(request["body"], self._new)
        path = request["path"].removeprefix("/s/SESS01")
        google = "enerateContent" in path
        if google:
            operation = "streamGenerateContent?alt=sse" if self.stream else "generateContent"
            path = f"{path.partition(':')[0]}:{operation}"
        else:
            body["stream"] = self.stream
            path += f"?{request['query']}" if request["query"] else ""
        headers = {name: value for name, value in request["headers"] if name.lower() not in _OWN_HEADERS}
        status, answered, raw = await self.rig.raw(body, path, headers=headers)
        assert status == 200, raw
        kind = answered["content-type"].partition(";")[0]
        assert kind == ("text/event-stream" if self.stream else "application/json")
        if google:
            return [candidate["content"] for one in _google(raw, self.stream) for candidate in one["candidates"]]
        if "/messages" in path:
            return _messages(raw, self.stream)
        return _responses(raw, self.stream) if path.endswith("/responses") else _chat(raw, self.stream)

    def _learn(self, body: dict[str, Any], after: dict[str, Any], answer: Any) -> None:
        """Which of the captured marks of this turn's answer stand for which of ours."""
        theirs = _marks(_history(after)[len(_history(body)) :])
        ours = _marks(answer)
        for kind, values in theirs.items():
            self._new.update(zip(values, ours.get(kind, ()), strict=False))


def _history(body: dict[str, Any]) -> list[Any]:
    for key in ("messages", "input", "contents"):
        if key in body:
            return list(body[key])
    raise AssertionError("a request without a history")


def _marks(tree: Any) -> dict[tuple[str, str], list[str]]:
    """By what carries them (an item's type) and their name, in order."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for kind, name, value in _walk(tree, ""):
        found[kind, name].append(value)
    return found


def _walk(tree: Any, kind: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(tree, list):
        for item in tree:
            yield from _walk(item, kind)
    elif isinstance(tree, dict):
        kind = str(tree.get("type", kind))
        for key, value in tree.items():
            if key in _MARKS and isinstance(value, str):
                yield kind, key, value
            else:
                yield from _walk(value, kind if key != "functionCall" else key)


def _replaced(tree: Any, new: dict[str, str]) -> Any:
    if isinstance(tree, list):
        return [_replaced(item, new) for item in tree]
    if isinstance(tree, dict):
        return {key: _replaced(value, new) for key, value in tree.items()}
    return new.get(tree, tree) if isinstance(tree, str) else tree


def _google(raw: bytes, stream: bool) -> list[dict[str, Any]]:
    found = google_events(raw) if stream else [json.loads(raw)]
    assert found[-1]["candidates"][0]["finishReason"] == "STOP"
    assert found[-1]["usageMetadata"]["candidatesTokenCount"] > 0
    return found


def _messages(raw: bytes, stream: bool) -> Any:
    if not stream:
        message = json.loads(raw)
        assert (message["type"], message["role"]) == ("message", "assistant")
        assert message["stop_reason"] in {"end_turn", "tool_use"}
        return message["content"]
    events = MessagesEvents.of(raw)
    assert (events.types[0], events.types[-1]) == ("message_start", "message_stop")
    assert events.named("message_delta")[0]["delta"]["stop_reason"] in {"end_turn", "tool_use"}
    return events.blocks


def _responses(raw: bytes, stream: bool) -> Any:
    response = ResponsesEvents.of(raw).response() if stream else json.loads(raw)
    assert (response["object"], response["status"]) == ("response", "completed")
    return response["output"]


def _chat(raw: bytes, stream: bool) -> Any:
    if not stream:
        [choice] = json.loads(raw)["choices"]
        assert choice["finish_reason"] in {"stop", "tool_calls"}
        return choice["message"]
    sse = Sse.of(200, {}, raw)
    assert sse.ended
    [reason] = sse.finish_reasons
    assert reason in {"stop", "tool_calls"}
    return [choice["delta"] for choice in sse.choices]
