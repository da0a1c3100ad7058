"""Real requests of harnesses, and what can be made of them."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "fixtures" / "harness"
TOKENS = [
    b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"true", b"1e999", b"-1",
    b"%00", b"9" * 400, b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"[" * 3000, b"//", b"/../", b"?key=",
    b"data: [DONE]\n\n",
    b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Content-Encoding: zstd\r\n",
    b"Content-Length: 3\r\n", b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"Connection: close\r\n",
    b"X-Stainless-Retry-Count: 1\r\n", b"HEAD ", b"GET ", b"HTTP/1.0", b"HTTP/9.9",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, 10**40, 1.5, 1e308, float("nan"), "", "x", "\ud800", "\0", "tool", "assistant",
    "function", "data:image/png;base64,AAAA", [], {}, [[]], [{}], {"type": "text"}, "auto", "required", 3, 100_000,
]  # fmt: skip


@dataclass(frozen=True)
class Captured:
    """A request that a harness sent."""

    method: str
    path: str
    """Below the session."""
    headers: tuple[tuple[str, str], ...]
    body: Any

    def raw(self, secret: str, body: bytes | None = None) -> bytes:
        """As it goes over the wire."""
        data = json.dumps(self.body).encode() if body is None else body
        dropped = {"content-length", "transfer-encoding", "authorization", "x-api-key", "x-goog-api-key", "host"}
        lines = [f"{self.method} /s/{secret}{self.path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in self.headers if name.lower() not in dropped]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + data


@cache
def captured() -> list[Captured]:
    found = []
    for file in sorted(FOLDER.glob("*/*.json")):
        tree = json.loads(file.read_text("utf-8"))
        headers = tuple((str(name), str(value)) for name, value in tree["headers"])
        found.append(Captured(tree["method"], tree["path"].removeprefix("/s/SESS01"), headers, tree["body"]))
    assert found
    return found


def changed(tree: Any, dice: random.Random) -> Any:
    """The same JSON with one to three things in it replaced, left out, doubled or renamed."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            return dice.choice(VALUES)
        holder, key = dice.choice(places)
        match dice.randrange(5):
            case 0 | 1:
                holder[key] = dice.choice(VALUES)
            case 2:
                del holder[key]
            case 3:
                other, there = dice.choice(places)
                if (isinstance(other, dict) and there in other) or (isinstance(other, list) and there < len(other)):
                    holder[key] = copy.deepcopy(other[there])
            case 4 if isinstance(holder, dict):
                holder[dice.choice(["type", "role", "content", "n", "x", "tool_calls"])] = holder.pop(key)
            case 4:
                holder.insert(key, copy.deepcopy(holder[key]))
    return tree


def _places(tree: Any) -> Any:
    if isinstance(tree, dict):
        items: Any = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return
    for key, value in items:
        yield tree, key
        yield from _places(value)


def spoilt(data: bytes, dice: random.Random) -> bytes:
    """The same bytes with some of them changed, lost, moved or added; mostly near the beginning, where heads are."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1) if dice.random() < 0.5 else dice.randrange(min(len(data), 300) + 1)
        to = min(len(data), at + dice.choice([1, 1, 2, 8, 64, 1000]))
        match dice.randrange(5):
            case 0 if at < len(data):
                data = data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[to:]
            case 2:
                data = data[:to] + data[at:to] * dice.randint(1, 3) + data[to:]
            case 3:
                data = data[:at]
            case _:
                data = data[:at] + dice.choice(TOKENS) + data[at:]
    return data


def mutated(secret: str, dice: random.Random) -> bytes:
    """A request that no harness sends, made of one that one sent."""
    real = dice.choice(captured())
    if dice.random() < 0.6:
        return real.raw(secret, json.dumps(changed(real.body, dice)).encode("utf-8", "surrogatepass"))
    if dice.random() < 0.3:
        return real.raw(secret, spoilt(json.dumps(real.body).encode(), dice))
    return spoilt(real.raw(secret), dice)
