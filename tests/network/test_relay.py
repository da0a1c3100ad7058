"""The process that carries what goes through the doors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from polarq.errors import RuntimeFault
from polarq_worker.network.model_door import ProxyAddress
from polarq_worker.network.relay import EgressRules, Relay
from tests.network.rig import LONG_S, echo, listener, port_of, serving, until


@asynccontextmanager
async def relaying(log: Path, at: Callable[[], ProxyAddress]) -> AsyncIterator[Relay]:
    relay = Relay(log / "relay.log", at)
    try:
        yield relay
    finally:
        await relay.aclose()


@asynccontextmanager
async def model_door(log: Path, at: ProxyAddress) -> AsyncIterator[tuple[Relay, int]]:
    async with relaying(log, lambda: at) as relay:
        opened = listener()
        port = port_of(opened)
        await relay.open(opened, None)
        yield relay, port


def local(port: int) -> ProxyAddress:
    return ProxyAddress("127.0.0.1", port)


async def asked(port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(words)
        writer.write_eof()
        async with asyncio.timeout(LONG_S):
            return await reader.read()
    finally:
        writer.close()


async def test_bytes_go_both_ways_and_a_half_close_is_kept(tmp_path: Path) -> None:
    async with serving(echo) as port, model_door(tmp_path, local(port)) as (_, door):
        block = bytes(range(256)) * 20000
        assert await asked(door, block) == block


async def test_the_proxy_may_listen_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "proxy.sock")
    async with serving(echo, path=path), model_door(tmp_path, ProxyAddress(path=path)) as (_, door):
        assert await asked(door, b"hello") == b"hello"


async def test_each_piece_of_a_stream_arrives_before_the_next_is_sent(tmp_path: Path) -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        for n in range(50):
            writer.write(b"data: %d\n\n" % n)
            assert await arrived.get() == b"data: %d\n\n" % n

    async with serving(server) as port, model_door(tmp_path, local(port)) as (_, door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door)
        writer.write(b"go\n")
        async with asyncio.timeout(LONG_S):
            for _ in range(50):
                arrived.put_nowait(await reader.readuntil(b"\n\n"))
            assert await reader.read() == b""
        writer.close()


async def test_a_reader_that_does_not_read_holds_its_writer(tmp_path: Path) -> None:
    go, sent = asyncio.Event(), 64 * 1024 * 1024
    took: asyncio.Queue[int] = asyncio.Queue()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        took.put_nowait(total)

    async with serving(server) as port, model_door(tmp_path, local(port)) as (relay, door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door)
        writer.transport.set_write_buffer_limits(0)
        writer.write(b"x" * sent)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await writer.drain()
        assert _resident_mb(relay) < 64
        go.set()
        async with asyncio.timeout(LONG_S):
            await writer.drain()
            writer.write_eof()
            assert await took.get() == sent
            assert await reader.read() == b""
        writer.close()


def _resident_mb(relay: Relay) -> float:
    status = Path(f"/proc/{relay.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def test_five_hundred_connections_at_once(tmp_path: Path) -> None:
    async with serving(echo) as port, model_door(tmp_path, local(port)) as (_, door):
        words = [b"%d " % n * 1000 for n in range(500)]
        pairs = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", door) for _ in words))
        for (_, writer), said in zip(pairs, words, strict=True):
            writer.write(said)
            writer.write_eof()
        async with asyncio.timeout(LONG_S):
            assert await asyncio.gather(*(reader.read() for reader, _ in pairs)) == words
        for _, writer in pairs:
            writer.close()


async def test_the_workers_own_loop_carries_no_bytes(tmp_path: Path) -> None:
    """It stands still here while they are carried: this test waits for them in it, and lets nothing else run."""
    upstream = socket.create_server(("127.0.0.1", 0))
    async with model_door(tmp_path, local(upstream.getsockname()[1])) as (_, door):
        with socket.create_connection(("127.0.0.1", door), timeout=LONG_S) as client:
            client.sendall(b"question")
            upstream.settimeout(LONG_S)
            server, _ = upstream.accept()
            with server:
                server.settimeout(LONG_S)
                assert server.recv(100) == b"question"
                server.sendall(b"answer")
                assert client.recv(100) == b"answer"
    upstream.close()


async def test_a_client_that_hangs_up_is_hung_up_on_behind_the_door(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await reader.read()
        ended.set()

    async with serving(server) as port, model_door(tmp_path, local(port)) as (_, door):
        _, writer = await asyncio.open_connection("127.0.0.1", door)
        writer.write(b"question\n")
        writer.close()
        async with asyncio.timeout(LONG_S):
            await ended.wait()


async def test_a_relay_that_is_killed_breaks_what_is_in_flight_and_nothing_else(tmp_path: Path) -> None:
    async with serving(echo) as port, model_door(tmp_path, local(port)) as (relay, door):
        reader, writer = await asyncio.open_connection("127.0.0.1", door)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        assert relay.pid is not None
        os.kill(relay.pid, signal.SIGKILL)
        async with asyncio.timeout(LONG_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        writer.close()
        assert await asked(door, b"after") == b"after"
        assert relay.restarts == 1


async def test_what_a_killed_relay_refused_is_not_forgotten(tmp_path: Path) -> None:
    async with relaying(tmp_path, lambda: local(9)) as relay:
        opened = listener()
        port = port_of(opened)
        door = await relay.open(opened, EgressRules("allowlist", ["a.example"]))
        ask = b"CONNECT b.example:443 HTTP/1.1\r\n\r\n"
        assert b" 403 " in await asked(port, ask)
        await until(lambda: door.denials.counts == {"b.example:443": 1})
        assert relay.pid is not None
        os.kill(relay.pid, signal.SIGKILL)
        await until(lambda: relay.restarts == 1)
        assert b" 403 " in await asked(port, ask)
        assert b" 403 " in await asked(port, ask.replace(b"b.", b"c."))
        assert (await relay.close(door)).counts == {"b.example:443": 2, "c.example:443": 1}


async def test_a_door_that_is_closed_leads_nowhere_and_ends_what_went_through_it(tmp_path: Path) -> None:
    async with serving(echo) as port, relaying(tmp_path, lambda: local(port)) as relay:
        opened, other = listener(), listener()
        closed_port, open_port = port_of(opened), port_of(other)
        door = await relay.open(opened, None)
        await relay.open(other, None)
        reader, writer = await asyncio.open_connection("127.0.0.1", closed_port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        await relay.close(door)
        async with asyncio.timeout(LONG_S):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", closed_port)
        assert await asked(open_port, b"still") == b"still"


async def test_a_proxy_that_comes_back_on_another_port_is_followed(tmp_path: Path) -> None:
    place = local(9)  # nobody listens there
    async with relaying(tmp_path, lambda: place) as relay:
        opened = listener()
        door = port_of(opened)
        await relay.open(opened, None)
        waiting = asyncio.create_task(asked(door, b"held"))
        await asyncio.sleep(0)
        async with serving(echo) as first:
            place = local(first)
            # It was asked for while the proxy was away, and is answered all the same.
            assert await waiting == b"held"
        async with serving(echo) as second:
            place = local(second)
            assert await asked(door, b"again") == b"again"


async def test_a_relay_knows_no_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARQ_REDIS_URL", "redis://:secret@127.0.0.1/0")
    async with model_door(tmp_path, local(9)) as (relay, _):
        assert b"secret" not in Path(f"/proc/{relay.pid}/environ").read_bytes()


def test_a_relay_is_light() -> None:
    code = "import sys, polarq_worker.network.__main__; print([m for m in ('pydantic', 'celery') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


async def test_a_relay_ends_with_its_worker(tmp_path: Path) -> None:
    """However that ends: all it needs is that the other end of its socket is gone."""
    async with model_door(tmp_path, local(9)) as (relay, _):
        pid = relay.pid
        assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_relay_that_cannot_start_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polarq_worker.network.relay.sys.executable", "/nonexistent/python")
    async with relaying(tmp_path, lambda: local(9)) as relay:
        with pytest.raises(RuntimeFault, match=r"could not be started: .*relay.log\)$"):
            await relay.open(listener(), None)
