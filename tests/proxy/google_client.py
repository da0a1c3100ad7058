"""A Gemini request without a server around it, and Gemini streams as their readers take them."""

from __future__ import annotations

import json
from typing import Any

from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.base import NativeRequest
from polarq_proxy.dialects.google_generate import GoogleGenerateDialect

from .rig import Rig, refuse

DIALECT = GoogleGenerateDialect()
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HELLO: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "hello"}]}]


def native(body: Any, path: str, query: dict[str, str] | None = None) -> NativeRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return NativeRequest(path, query or {}, {}, data)


def parsed(body: Any, path: str = "models/m:generateContent", query: dict[str, str] | None = None) -> ModelCall:
    match = next(filter(None, (route.match("POST", path) for route in DIALECT.routes)))
    return DIALECT.parse(native(body, path, query), match)


def asked(*contents: dict[str, Any], **fields: Any) -> ModelCall:
    return parsed({"contents": list(contents) or HELLO, **fields})


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


async def whole(rig: Rig, contents: Any = HELLO, **fields: Any) -> dict[str, Any]:
    status, tree = await rig.post({"contents": contents, **fields}, "/v1beta/models/asked:generateContent")
    assert status == 200, tree
    assert isinstance(tree, dict)
    return tree


async def streamed(rig: Rig, contents: Any = HELLO, *, sse: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    path = "/v1beta/models/asked:streamGenerateContent" + ("?alt=sse" if sse else "")
    status, headers, raw = await rig.raw({"contents": contents, **fields}, path)
    assert status == 200, raw
    assert headers["content-type"].startswith("text/event-stream" if sse else "application/json")
    return events(raw) if sse else array(raw)


def events(raw: bytes) -> list[dict[str, Any]]:
    blocks = [block for block in raw.decode("utf-8").split("\n\n") if block.strip()]
    return [json.loads(block.strip().removeprefix("data: "), parse_constant=refuse) for block in blocks]


def array(raw: bytes) -> list[dict[str, Any]]:
    found = json.loads(raw, parse_constant=refuse)
    assert isinstance(found, list)
    return found


def parts(*answers: dict[str, Any], index: int = 0) -> list[dict[str, Any]]:
    candidates = [candidate for answer in answers for candidate in answer.get("candidates", ())]
    return [part for candidate in candidates if candidate["index"] == index for part in candidate["content"]["parts"]]


def text(*answers: dict[str, Any], index: int = 0) -> str:
    return "".join(part.get("text", "") for part in parts(*answers, index=index) if not part.get("thought"))
