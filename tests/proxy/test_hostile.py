"""What a sandbox may try: to hold connections, to smuggle, to reach another's session, to fill the memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from polarq_proxy.listening import Doors, tcp_sockets

from .rig import HELLO, Rig, running, until

BODY = json.dumps({"model": "m", "messages": HELLO}).encode()
SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content="one two three", tokens_per_s=4.0),)),))


@asynccontextmanager
async def doors(rig: Rig, silent_s: float) -> AsyncIterator[tuple[str, int]]:
    """The same proxy at a socket of its own, with that little patience."""
    runner = web.ServerRunner(rig.proxy.server(), shutdown_timeout=1.0)
    await runner.setup()
    opened = Doors(runner, silent_s)
    [listening] = tcp_sockets("127.0.0.1", 0, host_from="the test", port_from="the test")
    await opened.open(listening)
    try:
        yield listening.getsockname()[:2]
    finally:
        opened.close()
        await runner.cleanup()


def head(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


async def answered(address: tuple[str, int], data: bytes) -> bytes:
    """Everything that comes back until the server closes, or the first whole answer."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(data)
    await writer.drain()
    async with asyncio.timeout(20):
        got = await reader.read(65536)
    writer.close()
    return got


@pytest.mark.parametrize("first", [b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_connection_that_does_not_say_what_it_wants_is_closed(
    redis_client: Redis, keys: Keys, first: bytes
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 0.2) as address,
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(first)
        async with asyncio.timeout(20):
            assert await ended(reader)
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_a_connection_that_has_spoken_stays_open(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 0.3) as address,
    ):
        path = f"/s/{rig.secret}/v1/chat/completions"
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(head(path, f"Content-Length: {len(BODY)}") + BODY)
            status = await reader.readline()
            assert b"200" in status
            length = 0
            while (line := await reader.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            done, _ = await asyncio.wait({asyncio.create_task(reader.read(1))}, timeout=0.6)
            for task in done:
                raise AssertionError(f"the connection was closed: {task.result()!r}")
            break
        writer.close()


async def one_answer(reader: asyncio.StreamReader) -> bytes:
    """Its body; the connection goes on."""
    got = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", got)
    assert length is not None
    return await reader.readexactly(int(length[1]))


@pytest.mark.parametrize("first", [b"P", b"POST /v1/chat", b"POST / HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_later_request_whose_head_does_not_come_whole_is_given_up_as_well(
    redis_client: Redis, keys: Keys, first: bytes
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 0.5) as address,
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head(f"/s/{rig.secret}/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY)
        assert b'"hi"' in await one_answer(reader)
        writer.write(first)
        async with asyncio.timeout(20):
            assert await ended(reader)
        writer.close()


async def test_a_later_request_may_come_in_pieces(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 60) as address,
    ):
        reader, writer = await asyncio.open_connection(*address)
        whole = head(f"/s/{rig.secret}/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY
        for pieces in ([whole], [whole[:-60], whole[-60:]], [whole[:5], whole[5:40], whole[40:]], [whole]):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                assert b"200" in await health(address)  # so that the piece was read by itself
            assert b'"hi"' in await one_answer(reader)
        writer.close()


async def health(address: tuple[str, int]) -> bytes:
    return await answered(address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")


async def test_the_rest_of_a_body_that_nobody_wanted_is_no_head(redis_client: Redis, keys: Keys) -> None:
    """The answer came before the body, and its connection stays open for the next request."""
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 1.0) as address,
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head("/nowhere", f"Content-Length: {len(BODY)}") + BODY[:10])
        assert b"is not a route" in await one_answer(reader)
        writer.write(BODY[10:])
        await writer.drain()
        gone = asyncio.create_task(reader.read(1))
        done, _ = await asyncio.wait({gone}, timeout=1.5)  # longer than a head may take
        assert not done
        writer.write(head(f"/s/{rig.secret}/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY)
        assert await gone == b"H"
        assert b'"hi"' in await one_answer(reader)
        writer.close()


async def test_a_body_that_does_not_come_is_given_up(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url, body_idle_s=0.2) as rig,
        doors(rig, 5) as address,
    ):
        path = f"/s/{rig.secret}/v1/chat/completions"
        got = await answered(address, head(path, "Content-Length: 1000") + BODY[:10])
        assert got.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"too_slow"' in got
        assert rig.proxy.counters.in_flight == 0
        await rig.ask()


@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: +5",),
        ("Content-Length: 0x5",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("X-A: b\nTransfer-Encoding: chunked",),
        ("Content-Length: 5\r\n X: folded",),
    ],
)
async def test_a_request_of_which_two_servers_could_read_different_ends_is_refused(
    redis_client: Redis, keys: Keys, caplog: pytest.LogCaptureFixture, fields: tuple[str, ...]
) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 5) as address,
    ):
        smuggled = head("/s/other/v1/chat/completions", "Content-Length: 0")
        path = f"/s/{rig.secret}/v1/chat/completions"
        got = await answered(address, head(path, *fields) + b"0\r\n\r\n" + smuggled)
        assert re.match(rb"HTTP/1\.[01] 400 ", got)
        assert len(re.findall(rb"HTTP/1\.[01] ", got)) == 1
        assert rig.secret not in caplog.text
        assert [call for call in inference.ledger if call.session_id == "task.0"] == []


async def test_a_head_that_never_ends_is_refused(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 5) as address,
    ):
        for line in (b"POST /" + b"x" * 200_000, b"POST / HTTP/1.1\r\nX-Long: " + b"y" * 200_000):
            got = await answered(address, line)
            assert re.match(rb"HTTP/1\.[01] 400 ", got)


async def test_a_session_is_opened_by_its_own_secret_only(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
    ):
        other = await rig.session(5)
        digest = rig.digest
        for guess in (rig.spec.rollout_id, digest, rig.secret[:-1], rig.secret.upper(), "", "*"):
            status, answer = await rig.post(BODY, base=f"{rig.url}/s/{guess}")
            assert status == 404, guess
            assert rig.secret not in json.dumps(answer)
        # The path's session wins over a key, so that a key cannot redirect a call into another's record.
        status, _ = await rig.post(BODY, headers={"Authorization": f"Bearer {other.secret}"})
        assert status == 200
        assert (len(await rig.records()), len(await other.records())) == (1, 0)


@pytest.mark.parametrize("more", [b"POST /half HTTP/1.1\r\nX-Slow: ", b"G"])
async def test_a_head_that_began_behind_a_request_has_to_end_too(redis_client: Redis, keys: Keys, more: bytes) -> None:
    async with (
        ScriptedInference(scenario=SLOW) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 0.2) as address,
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head(f"/s/{rig.secret}/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY)
        await until(lambda: rig.proxy.counters.in_flight == 1)
        writer.write(more)
        async with asyncio.timeout(20):
            assert b" 200 " in await reader.read()
        writer.close()


async def test_an_empty_line_after_a_body_begins_no_head(redis_client: Redis, keys: Keys) -> None:
    async with (
        ScriptedInference(scenario=Scenario.of("hi", "hi")) as inference,
        running(redis_client, keys, inference.base_url) as rig,
        doors(rig, 0.2) as address,
    ):
        request = head(f"/s/{rig.secret}/v1/chat/completions", f"Content-Length: {len(BODY)}") + BODY
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        assert b" 200 " in await reader.read(65536)
        writer.write(b"\r\n")
        await asyncio.sleep(0.8)  # four times the patience with a head
        writer.write(request)
        assert b" 200 " in await reader.read(65536)
        writer.close()
