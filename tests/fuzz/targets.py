"""What must hold for any bytes. Each target takes bytes and raises when something is wrong; what the rest of the bytes
are cut or chosen by stands in the first ones, so that one input is one case."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from functools import cache

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from polarq.registry import names, plugin
from polarq_proxy.bodies import BodyDamaged, BodyTooLarge, UnknownEncoding, read_body
from polarq_proxy.call import Answer, Choice
from polarq_proxy.carriers import PEEKED, session_in_head
from polarq_proxy.dialects.base import Dialect, NativeRequest, Operation, ReplyHead, Route
from polarq_proxy.faults import CallFault
from polarq_proxy.gather import pieces_of
from polarq_proxy.http1 import Connection, Disconnected
from polarq_proxy.jsons import encode
from polarq_proxy.sse import EventTooLarge, SseEvent, SseParser

HEAD = ReplyHead("0123456789abcdef01234567", 1_700_000_000)
ENCODINGS = ("", "gzip", "deflate", "zstd", "gzip, gzip", "zstd, gzip", "deflate, zstd", "br", "x-gzip", ",")


def pieces(data: bytes, seed: int, most: int = 12) -> list[bytes]:
    """`data` cut at places that `seed` chooses."""
    dice = random.Random(seed)
    cuts = sorted(dice.choices(range(len(data) + 1), k=dice.randint(0, most)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# Event streams


def sse(data: bytes) -> None:
    """Any cuts give the same events; under a limit no more than the limit is held, and what came before is not lost."""
    seed, stream = int.from_bytes(data[:2], "big"), data[2:]
    whole = SseParser(1 << 30).feed(stream)
    parser = SseParser(1 << 30)
    assert [event for piece in pieces(stream, seed) for event in parser.feed(piece)] == whole
    limit, found = 1 + seed % 64, list[SseEvent]()
    small = SseParser(limit)
    try:
        for piece in pieces(stream, seed, 64):
            found += small.feed(piece)
            assert len(small._rest) + small._data_bytes <= limit
    except EventTooLarge:
        assert found == whole[: len(found)]
    else:
        assert found == whole
    assert all(len(event.data) <= limit for event in found)


# Requests


@cache
def routes() -> list[tuple[Dialect, Route]]:
    found: list[Dialect] = [plugin("dialects", name)() for name in names("dialects")]
    taken = {Operation.GENERATE, Operation.COUNT_TOKENS}
    return [(dialect, route) for dialect in found for route in dialect.routes if route.operation in taken]


PATHS = (
    "chat/completions", "completions", "responses", "messages", "messages/count_tokens", "models/m:generateContent",
    "models/m:streamGenerateContent", "models/m:countTokens",
)  # fmt: skip
SAID = {
    "role": "assistant",
    "content": "ok",
    "reasoning_content": "hm",
    "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}


def request(data: bytes) -> None:
    """A request is read or clearly refused; what is read can be answered, whole and as a stream."""
    chosen, body = data[:1], data[1:]
    path = PATHS[chosen[0] % len(PATHS)] if chosen else PATHS[0]
    asked = NativeRequest(path, {"alt": "sse"} if chosen and chosen[0] & 64 else {}, {}, body)
    for dialect, route in routes():
        match = route.match("POST", path)
        if match is None:
            continue
        try:
            call = dialect.parse(asked, match)
        except CallFault as fault:
            assert 400 <= fault.status < 500, fault
            assert fault.message
            json.loads(dialect.fault(fault).body)
            continue
        encode([call.messages, call.tools, call.options])
        if route.operation is Operation.COUNT_TOKENS:
            json.loads(dialect.counted(call, 3).body)
            continue
        said = Answer([Choice(index, SAID, [1], [], "tool_calls") for index in range(min(call.choices, 3))], [1], None)
        json.loads(dialect.render(call, said, HEAD).body)
        writer = dialect.writer(call, HEAD)
        assert writer.wait() + writer.end(pieces_of(said), said)


# Bodies


async def _come(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _read(chunks: list[bytes], encoding: str, limit: int) -> bytes:
    reading = read_body(_come(chunks), encoding, limit)
    try:
        while True:  # it gives way now and then, and waits for nothing
            reading.send(None)
    except StopIteration as ended:
        return bytes(ended.value)


def _refused(chunks: list[bytes], encoding: str, limit: int) -> type[Exception] | None:
    try:
        _read(chunks, encoding, limit)
    except (BodyTooLarge, BodyDamaged) as exc:
        return type(exc)
    return None


def body(data: bytes) -> None:
    """Packed bytes are unpacked within the limit or clearly refused, the same however they are cut; what was packed
    comes back."""
    seed, packed = int.from_bytes(data[:2], "big"), data[2:]
    encoding, limit = ENCODINGS[seed % len(ENCODINGS)], 1 << 16
    results: list[bytes | type[Exception]] = []
    for chunks in ([packed], pieces(packed, seed)):
        try:
            results.append(_read(chunks, encoding, limit))
        except (BodyTooLarge, BodyDamaged, UnknownEncoding) as exc:
            results.append(type(exc))
    assert results[0] == results[1]
    assert not isinstance(results[0], bytes) or len(results[0]) <= limit
    packers: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "zstd": zstd.compress,
    }
    for name, pack in packers.items():
        assert _read(pieces(pack(packed), seed), name, len(packed) + 1024) == packed
        assert _refused(pieces(pack(packed)[:-1], seed), name, limit) is BodyDamaged or len(packed) > limit
        assert _refused([pack(bytes(2 * limit))], name, limit) is BodyTooLarge


# Heads


def head(data: bytes) -> None:
    """Whose a connection is: never an error, and once it is said, more bytes do not change it."""
    enough, found = session_in_head(data)
    assert found is None or enough
    for cut in range(0, min(len(data), PEEKED - 1), 1 + len(data) // 40):
        early, who = session_in_head(data[:cut])
        assert not early or (True, who) == (enough, found)


# Answers of an engine


class _Nowhere(asyncio.Transport):
    """Where requests go that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None: ...

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


async def exchanged(chunks: list[bytes]) -> tuple[int, bytes, str]:
    """(status, body, how it ended) of an answer that comes in these pieces, and then the connection ends."""
    connection, transport = Connection(), _Nowhere()
    connection.connection_made(transport)
    sending = asyncio.ensure_future(connection.send([b"a request"]))
    await asyncio.sleep(0)
    for chunk in chunks:
        if chunk and not transport.closed:
            connection.data_received(chunk)
    connection.connection_lost(None)
    body, status = b"", 0
    try:
        await sending
        status = connection.status
        while piece := await connection.some():
            body += piece
    except ConnectionError as exc:
        silent = isinstance(exc, Disconnected) and exc.silent
        assert silent is not any(chunks)
        return status, body, type(exc).__name__
    assert connection.ended
    assert not connection.reusable
    return status, body, "whole"


def answer(data: bytes) -> None:
    """Any bytes are an answer or a broken one, the same however they are cut; only silence is told as silence."""
    seed, sent = int.from_bytes(data[:2], "big"), data[2:]

    async def both() -> None:
        whole = await exchanged([sent])
        cut = await exchanged(pieces(sent, seed))
        # Of an answer that turns out to be none, how much was read before that is a matter of how it came.
        assert cut == whole or (cut[2] == whole[2] != "whole"), (cut, whole)

    asyncio.run(both())


TARGETS: dict[str, Callable[[bytes], None]] = {
    "sse": sse,
    "request": request,
    "body": body,
    "head": head,
    "answer": answer,
}
