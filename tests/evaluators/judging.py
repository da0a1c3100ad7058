"""A judge's server whose answers a test writes, one per call; real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


class ScriptedJudge:
    """`answers` are used up in order: a text, None (a refusal), or (HTTP status, headers)."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        if not self.answers:
            return web.json_response({"error": "the script has no answer left"}, status=400)
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], headers=answer[1], text="busy")
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if answer is None:
            message["refusal"] = "I would rather not."
        usage = {"prompt_tokens": 90, "completion_tokens": 10}
        whole = json.dumps({"choices": [{"message": message}], "usage": usage})
        return web.Response(text=whole, content_type="application/json")


@asynccontextmanager
async def scripted_judge(*answers: Any) -> AsyncIterator[ScriptedJudge]:
    judge = ScriptedJudge(*answers)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", judge._answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield judge
    finally:
        await runner.cleanup()


Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class RawServer:
    """Writes as its scripts do, one per request, the last one again; `heads` are what it was sent before each body."""

    scripts: list[Script]
    heads: list[str] = field(default_factory=list)
    url: str = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            await script(writer)
            await writer.drain()
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def raw_server(*scripts: Script) -> AsyncIterator[RawServer]:
    made = RawServer(list(scripts))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await made._serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


def whole(body: bytes | str, status: str = "200 OK", **headers: str) -> Script:
    """An answer that is there at once. Header names have `_` for `-`."""
    data = body if isinstance(body, bytes) else body.encode()

    async def write(writer: asyncio.StreamWriter) -> None:
        told = {"content_type": "application/json", "content_length": str(len(data)), "connection": "close", **headers}
        lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in told.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)

    return write


def endless(status: str = "200 OK", piece: bytes = b" " * 65536, pause_s: float = 0.0) -> Script:
    """An answer without an end."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n\r\n".encode())
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return write
