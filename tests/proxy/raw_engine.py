"""An inference server of which the test writes every byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from polarq_proxy.endpoints import PROBE_SESSION

Act = Callable[["RawCall"], Awaitable[None]]


@dataclass
class RawCall:
    """One POST as it came; the answer is what `act` writes."""

    headers: dict[str, str]
    body: Any
    connection: int
    """Which connection it came on, from 0."""
    order: int
    """Which request on that connection, from 0."""
    writer: asyncio.StreamWriter
    alive: bool = True

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Transfer-Encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def whole(self, tree: Any, status: int = 200, **headers: str) -> None:
        """A whole JSON answer; `tree` may be bytes already."""
        data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send(("\r\n".join(lines) + "\r\n\r\n").encode() + data)

    def close(self) -> None:
        """A clean end of the connection, whatever was still owed."""
        self.alive = False
        self.writer.close()

    def reset(self) -> None:
        self.alive = False
        self.writer.transport.abort()


@dataclass
class RawEngine:
    url: str
    calls: list[RawCall] = field(default_factory=list)
    """The POSTs that were not the proxy's own probe."""
    connections: int = 0
    weights: str | None = None
    """What /weight_info says; None: there is no such route."""
    weight_reads: int = 0
    forced_logprob: float | None = None
    """Log-probability of a token that a bias forces; None: biases are not heeded."""
    weights_fail: bool = False
    """/weight_info answers 500."""


def answer(text: str = "ok", ids: tuple[int, ...] = (11, 12), **fields: Any) -> dict[str, Any]:
    """A whole answer as vLLM would give it."""
    entries = [{"token": "t", "logprob": -0.5, "bytes": [], "top_logprobs": []} for _ in ids]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(ids),
        "logprobs": {"content": entries},
    }
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    return {"id": "x", "model": "raw", "choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": usage, **fields}


def event(tree: Any) -> bytes:
    return b"data: " + (tree if isinstance(tree, bytes) else json.dumps(tree, ensure_ascii=False).encode()) + b"\n\n"


def delta(text: str | None = None, ids: tuple[int, ...] = (), finish: str | None = None, **fields: Any) -> bytes:
    """One event of a stream."""
    choice: dict[str, Any] = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    if ids:
        choice["token_ids"] = list(ids)
        choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5} for _ in ids]}
    return event({"model": "raw", "choices": [choice], **fields})


FIRST = delta("", prompt_token_ids=[1, 2, 3])


def last(completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
    return event({"model": "raw", "choices": [], "usage": usage}) + b"data: [DONE]\n\n"


@asynccontextmanager
async def raw_engine(act: Act, idle_s: float | None = None) -> AsyncIterator[RawEngine]:
    """Answers GETs and the proxy's probe as vLLM would; every other POST is answered by `act`. A connection on which
    nothing comes for `idle_s` is closed."""
    engine = RawEngine("")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, order = engine.connections, 0
        engine.connections += 1
        with suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                async with asyncio.timeout(idle_s):
                    call = await _read(engine, reader, writer, connection, order)
                order += 1
                if call is None:
                    continue
                if call.headers.get("x-session-id") == PROBE_SESSION:
                    await _probed(call, engine.forced_logprob)
                    continue
                engine.calls.append(call)
                await act(call)
                if not call.alive:
                    break
        writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _probed(call: RawCall, forced_logprob: float | None) -> None:
    """One token with its id, the way it is asked for; the one that a bias forces has the log-probability given."""
    bias = call.body.get("logit_bias")
    if bias and forced_logprob is not None:
        forced = answer(ids=tuple(int(token_id) for token_id in bias))
        forced["choices"][0]["logprobs"]["content"][0]["logprob"] = forced_logprob
        await call.whole(forced)
        return
    if not call.body.get("stream"):
        await call.whole(answer(ids=(11,)))
        return
    await call.head()
    await call.chunk(FIRST + delta("a", (11,)) + delta("", (), finish="length") + last(1))
    await call.end()


async def _read(
    engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int, order: int
) -> RawCall | None:
    """The next POST, or None for a GET, which is answered here."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:]) if value}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    call = RawCall(headers, json.loads(body) if body else None, connection, order, writer)
    if method == "POST":
        return call
    known: dict[str, Any] = {
        "/version": {"version": "0.33.0"},
        "/v1/models": {"data": [{"id": "raw", "max_model_len": 4096}]},
        "/health": {},
    }
    if path == "/weight_info":
        engine.weight_reads += 1
        if engine.weights is not None:
            known[path] = {"weight_version": engine.weights}
    failing = path == "/weight_info" and engine.weights_fail
    await call.whole(known.get(path, {}), 500 if failing else 200 if path in known else 404)
    return None
