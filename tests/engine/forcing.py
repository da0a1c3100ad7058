"""Answers that a random model is made to give, and the log-probabilities that forced tokens must bear.

A grammar masks logits before vLLM takes log-probabilities, so that each is the policy's, renormalised over the tokens
that the grammar allows next. For a choice of texts these are the tokens whose bytes go on in one of the texts: known
here without the engine's grammar library, so that forced tokens are held against a forward pass like free ones.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from .reference import ReferenceModel, largest_difference
from .server import Server

END_OF_THINKING = "</think>"
EASILY_ENDED = 6.0
"""A bias on the end of thinking with which a random model thinks for about ten tokens. Raw log-probabilities do not
see biases."""


def call_text(name: str, arguments: str, before: str = "ok ") -> str:
    """A tool call as the model writes it, words before it included."""
    return f'{before}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Vocabulary:
    """What each id of the tiny model's tokenizer spells."""

    def __init__(self, model_dir: Path) -> None:
        tree = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
        of_letter = _bytes_of_letters()
        self.special = {item["id"] for item in tree["added_tokens"] if item["special"]}
        added = {item["id"]: item["content"].encode() for item in tree["added_tokens"]}
        plain = {number: bytes(of_letter[letter] for letter in text) for text, number in tree["model"]["vocab"].items()
                 if number not in added}  # fmt: skip
        self.bytes_of: dict[int, bytes] = plain | added

    def id_of(self, text: str) -> int:
        return next(number for number, spelt in self.bytes_of.items() if spelt == text.encode())

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes_of[number] for number in ids).decode("utf-8", "replace")

    def going_on(self, done: bytes, texts: Sequence[str]) -> list[int]:
        """The ids that lead from `done` towards one of the texts."""
        rests = {text.encode()[len(done) :] for text in texts if text.encode().startswith(done)}
        longest = max(map(len, rests), default=0)
        starts = {rest[:length] for rest in rests for length in range(1, longest + 1)}
        return [n for n, spelt in self.bytes_of.items() if spelt in starts and n not in self.special]


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences from a forward pass, and how many tokens were compared."""

    free: float = 0.0
    forced: float = 0.0
    free_tokens: int = 0
    forced_tokens: int = 0

    def __or__(self, other: Difference) -> Difference:
        return Difference(
            max(self.free, other.free),
            max(self.forced, other.forced),
            self.free_tokens + other.free_tokens,
            self.forced_tokens + other.forced_tokens,
        )

    @property
    def largest(self) -> float:
        return max(self.free, self.forced)

    def __str__(self) -> str:
        return (
            f"{self.free_tokens} free ids within {self.free:.1e}, {self.forced_tokens} forced ones within "
            f"{self.forced:.1e} of a forward pass"
        )


def difference(
    model: ReferenceModel,
    words: Vocabulary,
    rows: Any,
    sampled_ids: Sequence[int],
    logprobs: Sequence[float | None],
    texts: Sequence[str] = (),
    *,
    thinks: bool = False,
) -> Difference:
    """`rows`: the forward pass, one distribution for each sampled id. With `texts` the answer was forced to be one of
    them, and where the model `thinks`, from the end of its thinking on."""
    end = words.id_of(END_OF_THINKING)
    forced_from = len(sampled_ids)
    if texts:
        forced_from = sampled_ids.index(end) + 1 if thinks else 0
    ends = {text.encode() for text in texts}
    done = b""
    expected = []
    for place, (token_id, row) in enumerate(zip(sampled_ids, rows, strict=True)):
        value = float(row[token_id])
        if place >= forced_from:
            allowed = words.going_on(done, texts)
            if done in ends:
                allowed += model.end_ids
            assert token_id in allowed, f"id {token_id} at {place} does not spell any of {texts} after {done!r}"
            value -= float(row[allowed].logsumexp(0))
            done += words.bytes_of[token_id]
        expected.append(value)
    free = slice(0, forced_from)
    forced = slice(forced_from, None)
    return Difference(
        largest_difference(logprobs[free], expected[free]) if forced_from else 0.0,
        largest_difference(logprobs[forced], expected[forced]) if forced_from < len(expected) else 0.0,
        forced_from,
        len(expected) - forced_from,
    )


def _bytes_of_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable ones as themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


@dataclass
class Forced:
    """Adds `fields` to every chat request on its way to the server: what the harness's own dialect cannot say."""

    server: Server
    fields: dict[str, Any] = field(default_factory=dict)
    base_url: str = ""

    async def relay(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if self.fields and request.path.endswith("/chat/completions"):
            data = json.dumps(_merged(json.loads(data), self.fields)).encode()
        kept = {
            name: value for name, value in request.headers.items() if name.lower() in {"x-session-id", "x-request-id"}
        }
        kept["Content-Type"] = "application/json"
        connector = aiohttp.TCPConnector(force_close=True)  # a hang-up here is a hang-up there
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.request(
                request.method, f"{self.server.base_url}{request.path_qs}", data=data or None, headers=kept
            ) as upstream,
        ):
            response = web.StreamResponse(status=upstream.status)
            response.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        return response


def _merged(body: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` win; objects are joined."""
    joined = {
        key: {**body[key], **value} if isinstance(value, dict) and isinstance(body.get(key), dict) else value
        for key, value in fields.items()
    }
    return {**body, **joined}


@asynccontextmanager
async def forced(server: Server, **fields: Any) -> AsyncIterator[tuple[Server, Forced]]:
    """The same server behind an address where every chat request gets `fields`."""
    front = Forced(server, fields)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", front.relay)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        front.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield replace(server, base_url=front.base_url), front
    finally:
        await runner.cleanup()
