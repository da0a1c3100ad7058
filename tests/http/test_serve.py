"""`serve` as a process: what it says, how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from polarq.http.serve import CannotListen, serve
from polarq.ledger import Keys
from tests.http.rig import settings_for, topology_for

PROGRAM = """
import asyncio, sys
from polarq.http.serve import serve
from polarq.settings import Settings
from polarq.topology import load_topology
settings = Settings.from_env()
asyncio.run(serve(load_topology(settings=settings), settings, sys.argv[1], 0))
"""


@asynccontextmanager
async def serving(
    redis_url: str, host: str, lines: int, **env: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """The process, and the first lines it said on standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        host,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        env={**os.environ, "POLARQ_REDIS_URL": redis_url, **env},
    )
    assert process.stderr is not None
    try:
        said = [(await process.stderr.readline()).decode().rstrip() for _ in range(lines)]
        yield process, said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def port_of(line: str) -> int:
    match = re.fullmatch(r"polarq serves http://\S+:(\d+)", line)
    assert match, line
    return int(match[1])


async def test_on_loopback_it_says_its_address_and_ends_well_on_a_signal(redis_url: str) -> None:
    async with serving(redis_url, "127.0.0.1", 1) as (process, said):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(said[0])}", trust_env=False) as http:
            assert (await http.get("/tasks")).status_code == 200
            async with http.stream("GET", "/events") as events:
                process.send_signal(signal.SIGTERM)
                assert "hello" in (await events.aread()).decode()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_beyond_loopback_it_makes_a_token_up_says_it_once_and_asks_for_it(redis_url: str) -> None:
    async with serving(redis_url, "0.0.0.0", 2) as (process, said):
        match = re.match(r"token of this run: (\S{32,}) .*POLARQ_TOKEN", said[1])
        assert match, said
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(said[0])}", trust_env=False) as http:
            assert (await http.get("/tasks")).status_code == 401
            bearer = {"Authorization": f"Bearer {match[1]}"}
            assert (await http.get("/tasks", headers=bearer)).status_code == 200
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_a_given_token_is_used_and_not_shown(redis_url: str) -> None:
    async with serving(redis_url, "0.0.0.0", 1, POLARQ_TOKEN="given-token") as (process, said):
        url = f"http://127.0.0.1:{port_of(said[0])}/tasks"
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(url, headers={"Authorization": "Bearer given-token"})).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "given-token" not in (await process.stderr.read()).decode()


async def test_it_starts_without_redis_and_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
    async with serving(nowhere, "127.0.0.1", 3) as (_, said):
        assert any(line.startswith("serving without Redis until it is there: Redis at ") for line in said), said
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            url = f"http://127.0.0.1:{port_of(said[0])}"
            assert (await http.get(f"{url}/health")).status_code == 200
            assert (await http.get(f"{url}/tasks")).status_code == 503


async def test_a_taken_port_is_one_clear_line(redis_url: str, keys: Keys) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            await serve(topology_for(keys), settings_for(redis_url), "127.0.0.1", port, say=said.append)
    assert str(caught.value).startswith(f"cannot listen on 127.0.0.1:{port}: the port is taken; ")
    assert said == []
