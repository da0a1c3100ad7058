"""Several processes behind one address: each session in one of them, whatever connection its calls come on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis
from yarl import URL

from polarq.contracts.completion import Completion
from polarq.ledger.keys import Keys
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, open_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from polarq.testing.ports import free_port
from polarq_proxy.carriers import PEEKED, session_in_head
from polarq_proxy.front import owner_of
from polarq_proxy.serve import connect
from tests.pauses import clear_pause, read_acks, set_pause

from .rig import until
from .test_program import command, environment, started, topology

SLOW = Scenario(name="slow", scripts=(Script(name="a", turns=(Turn(content="one two three four", tokens_per_s=8.0),)),))
KEYS = Keys("processes")
PROCESSES = 2


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    redis: Redis
    inference: ScriptedInference

    async def session(self, owner: int, index: int) -> tuple[str, str]:
        """(secret, rollout id) of a session that belongs to that process."""
        while True:
            rollout_id = f"task.{index}"
            spec = GrantSpec(rollout_id=rollout_id, task_id="task", attempt=1, token=1, node_id="node0")
            secret = await open_grant(self.redis, KEYS, spec, ttl_s=600)
            if owner_of(secret, PROCESSES) == owner:
                return secret, rollout_id

    async def ask_as_sdks_do(self, secret: str) -> str:
        """Once more when the connection is reset: a process that was just killed takes some with it."""
        for _ in range(5):
            try:
                return await self.ask(secret)
            except aiohttp.ClientConnectionError:
                continue
        return await self.ask(secret)

    async def ask(self, secret: str, http: aiohttp.ClientSession | None = None, **options: Any) -> str:
        """On a connection of its own, unless `http` has one."""
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        async with aiohttp.ClientSession() as fresh:
            url = f"{self.url}/s/{secret}/v1/chat/completions"
            async with (http or fresh).post(url, json=body, **options) as answer:
                assert answer.status == 200, await answer.text()
                return str((await answer.json())["choices"][0]["message"]["content"])

    async def records(self, rollout_id: str) -> list[Completion]:
        return await read_completions(self.redis, KEYS, rollout_id, 1, 1)

    def members(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def running(redis_url: str, folder: Path, scenario: Scenario, **proxy: Any) -> AsyncIterator[Running]:
    async with ScriptedInference(scenario=scenario) as inference:
        path = topology(folder, KEYS.prefix, inference=inference.base_url, proxy={"processes": PROCESSES, **proxy})
        with started(redis_url, "--node", "node0", "--topology", path, "--port", "0") as (process, url):
            async with connect(redis_url) as redis:
                await redis.flushdb()
                yield Running(process, url, redis, inference)
            members = Running(process, url, redis, inference).members()
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, 30)
            assert not [pid for pid in members if Path(f"/proc/{pid}").exists()]


async def test_a_retry_on_another_connection_meets_the_call_under_way(redis_url: str, tmp_path: Path) -> None:
    async with running(redis_url, tmp_path, SLOW, retry_grace_s=60) as proxy:
        for owner in range(PROCESSES):
            secret, rollout_id = await proxy.session(owner, owner)
            asking = asyncio.create_task(proxy.ask(secret))
            await proxy.inference.ledger.wait_until(
                lambda calls, of=rollout_id: any(call.session_id == of for call in calls)  # type: ignore[misc]
            )
            asking.cancel()
            await asyncio.wait({asking})
            assert await proxy.ask(secret, headers={"X-Stainless-Retry-Count": "1"}) == "one two three four"
            assert len(await proxy.records(rollout_id)) == 1
            assert sum(call.session_id == rollout_id for call in proxy.inference.ledger) == 1


async def test_one_connection_may_carry_the_sessions_of_all_processes(redis_url: str, tmp_path: Path) -> None:
    async with running(redis_url, tmp_path, Scenario.of("hi")) as proxy:
        sessions = [await proxy.session(index % PROCESSES, index) for index in range(4)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as one:
            for _ in range(2):
                for secret, _ in sessions:
                    assert await proxy.ask(secret, one) == "hi"
            body = {"model": "m", "messages": [{"role": "user", "content": "é"}], "stream": True}
            for secret, _ in sessions:  # streamed, with the session as key, and packed
                headers = {"Authorization": f"Bearer {secret}"}
                url = f"{proxy.url}/v1/chat/completions?x=%20"
                async with one.post(url, data=json.dumps(body), headers=headers, compress="gzip") as answer:
                    assert answer.status == 200
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                async with one.post(f"{proxy.url}/s/{secret}/v1/chat/completions", data=b"{") as answer:
                    assert answer.status == 400
                    assert "error" in await answer.json()
        for _, rollout_id in sessions:
            assert [record.seq for record in await proxy.records(rollout_id)] == [0, 1, 2]


async def test_a_whole_address_as_target_reaches_the_sessions_process_too(redis_url: str, tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with running(redis_url, tmp_path, Scenario.of("hi")) as proxy:
        sessions = [await proxy.session(index, index) for index in range(2)]
        address = URL(proxy.url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        for secret, _ in sessions:  # the connection is the first one's, and the second call is passed on
            target = f"{proxy.url}/s/{secret}/v1/chat/completions"
            head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b'"usage":')
            await reader.readuntil(b"}}")
        writer.close()


async def test_a_process_that_dies_is_started_again_and_its_sessions_go_on(redis_url: str, tmp_path: Path) -> None:
    async with running(redis_url, tmp_path, Scenario.of("hi")) as proxy:
        sessions = [await proxy.session(owner, owner) for owner in range(PROCESSES)]
        for secret, _ in sessions:
            await proxy.ask(secret)
        before = proxy.members()
        assert len(before) == PROCESSES
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for secret, rollout_id in sessions:
            # Its last answer is asked for again: nobody knows that it was read, and it is not sampled twice.
            assert await proxy.ask_as_sdks_do(secret) == "hi"
            assert len(await proxy.records(rollout_id)) == 1
            assert await proxy.ask(secret) == "hi"
            assert len(await proxy.records(rollout_id)) == 2
        assert not set(before) & set(proxy.members())


async def test_every_process_says_that_it_is_paused(redis_url: str, tmp_path: Path) -> None:
    async with running(redis_url, tmp_path, Scenario.of("hi")) as proxy:
        pause = await set_pause(proxy.redis, KEYS, lease_s=60)

        async def said() -> bool:
            acks = [ack for ack in await read_acks(proxy.redis, KEYS) if ack.pause_id == pause.pause_id]
            return [(ack.process, ack.processes) for ack in sorted(acks, key=lambda ack: ack.process)] == [
                (index, PROCESSES) for index in range(PROCESSES)
            ]

        await until(said)
        secrets = [await proxy.session(owner, owner) for owner in range(PROCESSES)]
        asking = [asyncio.create_task(proxy.ask(secret)) for secret, _ in secrets]

        async def waiting() -> bool:
            return sum(ack.waiting for ack in await read_acks(proxy.redis, KEYS)) == PROCESSES

        await until(waiting)
        await clear_pause(proxy.redis, KEYS)
        assert await asyncio.gather(*asking) == ["hi"] * PROCESSES


@asynccontextmanager
async def watched(pids: list[int]) -> AsyncIterator[None]:
    """Leaving waits until all these processes have ended, whosever children they are by then."""
    loop = asyncio.get_running_loop()
    handles = [os.pidfd_open(pid) for pid in pids]
    ended = [asyncio.Event() for _ in handles]
    for handle, event in zip(handles, ended, strict=True):
        loop.add_reader(handle, event.set)
    try:
        yield
        for event in ended:
            await event.wait()
    finally:
        for handle in handles:
            loop.remove_reader(handle)
            os.close(handle)


async def test_a_killed_front_takes_its_processes_along_and_the_next_start_clears_up_after_it(
    redis_url: str, tmp_path: Path
) -> None:
    path = topology(tmp_path, KEYS.prefix, proxy={"processes": PROCESSES})
    arguments = ("--node", "node0", "--topology", path, "--port", "0")
    with TemporaryDirectory(prefix="pq") as folder:  # a short path: sockets stand in it

        def rooms() -> set[str]:
            return {entry.name for entry in Path(folder).iterdir()}

        async with connect(redis_url) as redis, ScriptedInference(scenario=Scenario.of("hi")) as inference:
            with started(redis_url, *arguments, TMPDIR=folder) as (first, url):
                [killed] = rooms()
                with started(redis_url, *arguments, TMPDIR=folder) as (second, _):
                    assert killed in rooms(), "a start clears nothing that is in use"
                    [kept] = rooms() - {killed}
                    async with watched(Running(first, url, redis, inference).members()):
                        first.kill()
                    with started(redis_url, *arguments, TMPDIR=folder) as (third, _):
                        assert killed not in rooms()
                        assert kept in rooms()
                        assert len(rooms()) == 2
                        for process in (second, third):
                            process.send_signal(signal.SIGTERM)
                            await asyncio.to_thread(process.wait, 30)
            assert rooms() == set()


@pytest.mark.parametrize("process", range(PROCESSES))
def test_a_taken_port_of_the_operators_side_is_the_last_line_and_nobody_is_left(
    redis_url: str, tmp_path: Path, process: int
) -> None:
    port = two_free_ports() + process
    with socket.create_server(("127.0.0.1", port)), TemporaryDirectory(prefix="pq") as folder:
        path = topology(tmp_path, proxy={"processes": PROCESSES, "admin_port": port - process})
        told = failed_start(redis_url, path, folder)
        which = f"proxy.admin_port ({port - 1}; each process has the next one)" if process else "proxy.admin_port"
        assert told == f"127.0.0.1:{port} is taken: stop what listens there, or change {which} in the topology"
        assert list(Path(folder).iterdir()) == []


def test_a_taken_port_is_the_last_line_with_several_processes_too(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, TemporaryDirectory(prefix="pq") as folder:
        port = taken.getsockname()[1]
        path = topology(tmp_path, port=port, proxy={"processes": PROCESSES})
        assert failed_start(redis_url, path, folder, "--port", str(port)) == (
            f"127.0.0.1:{port} is taken: stop what listens there, or change the node's port in the topology"
        )


def two_free_ports() -> int:
    """The first of two that follow each other."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first


def failed_start(redis_url: str, path: Path, folder: str, *more: str) -> str:
    """The last line of a proxy that does not start. Its output ends with the last process that has it open."""
    process = subprocess.Popen(
        command("--node", "node0", "--topology", path, *(more or ("--port", "0"))),
        env=environment(redis_url, POLARQ_TOKEN="t0k", TMPDIR=folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 2
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert "Traceback" not in said
    return said.strip().splitlines()[-1]


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"POST /s/pq-1/v1/chat/completions HTTP/1.1\r\n", (True, "pq-1")),
        (b"POST //s//pq-1/v1 HTTP/1.1\r\n", (True, "pq-1")),
        (b"POST /s/pq-", (False, None)),
        (b"POST /s/pq-1/v1/chat/comp", (True, "pq-1")),
        (HEAD, (False, None)),
        (HEAD + b"\r\n", (True, None)),
        (HEAD + b"AUTHORIZATION:  bearer  pq-2 \r\n\r\n", (True, "pq-2")),
        (HEAD + b"x-api-key: pq-3\r\n\r\n{}", (True, "pq-3")),
        (HEAD + b"X-Goog-Api-Key: pq-4\r\n\r\n", (True, "pq-4")),
        (b"POST /v1beta/models/m:generateContent?key=pq-5&alt=sse HTTP/1.1\r\n\r\n", (True, "pq-5")),
        (b"\xff\xfe" * 3, (False, None)),
        (b"x" * PEEKED, (True, None)),
    ],
)
def test_a_connections_first_bytes_tell_whose_it_is(head: bytes, told: tuple[bool, str | None]) -> None:
    assert session_in_head(head) == told
