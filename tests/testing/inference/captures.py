"""Captures of a real vLLM server, and comparing answers with them by shape."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "fixtures" / "vllm"


@dataclass(frozen=True)
class Capture:
    """One request and what the real server answered: `response` (JSON) or `events` (of a stream, as JSON)."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int
    content_type: str
    response: Any = None
    events: tuple[Any, ...] = ()


def capture(name: str) -> Capture:
    path = FOLDER / name
    if path.suffix == ".sse":
        return _stream(path.read_text())
    data = json.loads(path.read_text())
    request = data["request"]
    kind = data["response_headers"].get("content-type", "")
    return Capture(
        request["method"], request["path"], request["headers"], request["body"], data["status"], kind, data["response"]
    )


def _stream(text: str) -> Capture:
    lines = text.splitlines()
    method, path = lines[0].removeprefix("# ").split()
    body = json.loads(lines[1].removeprefix("# request body: "))
    headers = json.loads(lines[2].removeprefix("# request headers: "))
    found = lines[3].split("response headers: ")[1].rsplit(";", 1)[0]
    return Capture(
        method,
        path,
        headers,
        body,
        200,
        json.loads(found)["content-type"],
        events=tuple(events_of("\n".join(lines[4:]))),
    )


def events_of(text: str) -> list[Any]:
    """The `data:` events of a stream; the closing mark stays a text."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def shape(value: Any) -> Any:
    """Keys in their order, with the kinds of the values: two answers of equal shape differ only in their values.

    A list has the shapes of its objects, each once; a list of plain values is just a list, empty or not.
    """
    if isinstance(value, dict) and value and all(isinstance(item, float) for item in value.values()):
        return f"{len(value)} log-probabilities by token"
    if isinstance(value, dict) and value and all(key.isdecimal() for key in value):
        return ["by token id", *(shape(item) for item in value.values())]
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in value:
            if isinstance(item, dict) and (found := shape(item)) not in shapes:
                shapes.append(found)
        return ["list", *shapes]
    return type(value).__name__
