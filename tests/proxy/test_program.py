"""The proxy as a process: starts, says where, drains, follows its parent, and says clearly why it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, open_grant
from polarq.testing.inference import Scenario, Script, ScriptedInference, Turn
from polarq.testing.redis import EmbeddedRedis
from polarq.topology import Node
from polarq_proxy.listening import bound_host, own_address
from polarq_proxy.serve import connect

SPEC = GrantSpec(rollout_id="task.0", task_id="task", attempt=1, token=1, node_id="node0")


def topology(folder: Path, prefix: str = "program", **node: Any) -> Path:
    path = folder / "topology.yaml"
    inference = {"engine": "vllm", "base_url": node.pop("inference", "http://127.0.0.1:1")}
    nodes = [{"id": "node0", "inference": inference, **node}]
    path.write_text(yaml.safe_dump({"redis": {"prefix": prefix}, "gateway": {"nodes": nodes}}))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "polarq_proxy", *map(str, arguments)]


def environment(redis_url: str, **more: str) -> dict[str, str]:
    return {**os.environ, "POLARQ_REDIS_URL": redis_url, **more}


@contextmanager
def started(redis_url: str, *arguments: str | Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    process = subprocess.Popen(
        command(*arguments),
        env=environment(redis_url, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "ready on http://" in line, (line, process.stderr.read() if process.stderr else "")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def session(redis_url: str, keys: Keys) -> AsyncIterator[tuple[Redis, str]]:
    async with connect(redis_url) as redis:
        yield redis, await open_grant(redis, keys, SPEC, ttl_s=600)


def failure(redis_url: str, *arguments: str | Path) -> str:
    """What a proxy that cannot start says."""
    done = subprocess.run(
        command(*arguments), env=environment(redis_url), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


async def test_it_starts_answers_and_goes(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    port_file = tmp_path / "run" / "proxy.json"
    async with ScriptedInference(scenario=Scenario.of("hi")) as inference, session(redis_url, keys) as (redis, secret):
        path = topology(tmp_path, keys.prefix, inference=inference.base_url)
        arguments = ("--node", "node0", "--topology", path, "--port", "0", "--port-file", port_file)
        # A proxy that the environment names must not come between it and the engine.
        with started(redis_url, *arguments, HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9") as (
            process,
            url,
        ):
            assert json.loads(port_file.read_text()) == {"url": url, "pid": process.pid}
            async with aiohttp.ClientSession() as http:
                async with http.post(
                    f"{url}/s/{secret}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
                ) as answered:
                    assert answered.status == 200
                async with http.get(f"{url}/health") as answered:
                    assert (await answered.json())["calls"] == 1
            process.send_signal(signal.SIGTERM)
            _, said = await asyncio.to_thread(process.communicate, timeout=30)
            assert process.returncode == 0
            assert not port_file.exists()
            assert "gives token ids: yes" in said
            assert secret not in said
        assert len(await read_completions(redis, keys, "task.0", 1, 1)) == 1


async def test_a_stop_lets_calls_in_flight_end(redis_url: str, keys: Keys, tmp_path: Path) -> None:
    turn = Turn(content="word " * 30, tokens_per_s=60)
    scenario = Scenario(name="slow", scripts=(Script(name="a", turns=(turn,)),))
    async with ScriptedInference(scenario=scenario) as inference, session(redis_url, keys) as (redis, secret):
        path = topology(tmp_path, keys.prefix, inference=inference.base_url)
        with started(redis_url, "--node", "node0", "--topology", path, "--port", "0") as (process, url):
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{url}/s/{secret}/v1/chat/completions",
                    json={"messages": [{"role": "user", "content": "a"}], "stream": True},
                ) as answered,
            ):
                await answered.content.readuntil(b"\n\n")
                process.send_signal(signal.SIGTERM)
                rest = await answered.content.read()
            assert rest.endswith(b"data: [DONE]\n\n")
            await asyncio.to_thread(process.wait, 30)
            assert process.returncode == 0
        [record] = await read_completions(redis, keys, "task.0", 1, 1)
        assert record.trainable


async def test_it_ends_with_its_parent(redis_url: str, tmp_path: Path) -> None:
    path = topology(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as parent:
        arguments = ("--node", "node0", "--topology", path, "--port", "0", "--parent-pid", str(parent.pid))
        try:
            with started(redis_url, *arguments) as (process, _):
                parent.kill()
                parent.wait()
                process.communicate(timeout=30)
                assert process.returncode == 0
        finally:
            parent.kill()


def test_a_node_that_is_not_there_is_named(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(yaml.safe_dump({"gateway": {"nodes": [{"id": "node0"}, {"id": "node1", "port": 8082}]}}))
    line = failure(redis_url, "--node", "nodeX", "--topology", path)
    assert "there is no node 'nodeX' (nodes: node0, node1)" in line


def test_a_taken_port_is_one_clear_line(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failure(redis_url, "--node", "node0", "--topology", topology(tmp_path, port=port))
    assert f"127.0.0.1:{port} is taken" in line


def test_no_redis_is_one_clear_line_without_its_password(tmp_path: Path) -> None:
    line = failure("redis://:s3cret@127.0.0.1:1/0", "--node", "node0", "--topology", topology(tmp_path))
    assert "Redis at redis://:***@127.0.0.1:1/0 does not answer" in line
    assert "POLARQ_REDIS_URL" in line
    assert "s3cret" not in line


def test_a_wrong_password_is_one_clear_line(tmp_path: Path) -> None:
    with EmbeddedRedis(password="right") as server:
        url = server.url.replace("right", "wrong")
        line = failure(url, "--node", "node0", "--topology", topology(tmp_path))
    assert "refuses the user or password" in line
    assert ":wrong@" not in line


@pytest.mark.parametrize(
    ("host", "public_url", "bound"),
    [
        ("0.0.0.0", "", "127.0.0.1"),
        ("::", "", "::1"),
        ("0.0.0.0", "http://10.0.0.5:8081", "0.0.0.0"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("10.0.0.5", "", "10.0.0.5"),
    ],
)
def test_anywhere_is_narrowed_to_loopback_unless_it_is_public(host: str, public_url: str, bound: str) -> None:
    assert bound_host(Node(id="node0", host=host, public_url=public_url)) == bound


@pytest.mark.parametrize(
    ("peer", "here", "own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.9", "127.0.0.1", True),
        ("::1", "::1", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("172.17.0.2", "172.17.0.1", False),
        ("fe80::2%eth0", "fe80::1%eth0", False),
        ("10.0.0.6", "10.0.0.5", False),
    ],
)
def test_without_a_token_details_are_for_the_machine_itself(peer: str, here: str, own: bool) -> None:
    assert own_address(peer, here) is own


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_laptop_without_a_token_reads_all_of_its_proxys_health(
    redis_url: str, tmp_path: Path, processes: int
) -> None:
    path = topology(tmp_path, proxy={"processes": processes})
    with started(redis_url, "--node", "node0", "--topology", path, "--port", "0") as (process, url):
        async with aiohttp.ClientSession() as http, http.get(url + "/health") as answer:
            assert (await answer.json())["inference"][0]["url"] == "http://127.0.0.1:1"
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def test_the_operators_side_is_on_its_own_socket_behind_a_token(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with ScriptedInference(scenario=Scenario.of("hi")) as inference:
        path = topology(tmp_path, "admin", inference=inference.base_url, proxy={"admin_port": port})
        with started(redis_url, "--node", "node0", "--topology", path, "--port", "0", POLARQ_TOKEN="t0k") as (_, url):
            async with session(redis_url, Keys("admin")) as (_, secret), aiohttp.ClientSession() as http:
                body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
                async with http.post(f"{url}/s/{secret}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200
                    await answer.read()
                admin = f"http://127.0.0.1:{port}"
                shown = {"Authorization": "Bearer t0k"}
                for wrong in ({}, {"Authorization": "Bearer t0"}, {"Authorization": f"Bearer {secret}"}):
                    for route in ("/metrics", "/health", "/sessions", "/nothing"):
                        async with http.get(admin + route, headers=wrong) as answer:
                            assert answer.status == 401
                async with http.get(admin + "/metrics", headers=shown) as answer:
                    page = await answer.text()
                for line in (
                    "polarq_proxy_calls_total 1.0",
                    "polarq_proxy_paused 0.0",
                    'polarq_proxy_first_byte_seconds_count{dialect="openai_chat"} 1.0',
                    'polarq_proxy_call_seconds_count{dialect="openai_chat"} 1.0',
                    'polarq_proxy_own_seconds_count{dialect="openai_chat"} 1.0',
                    'polarq_proxy_engine_seconds_count{engine="vllm"} 1.0',
                ):
                    assert line in page.splitlines()
                async with http.get(admin + "/sessions", headers=shown) as answer:
                    [known] = (await answer.json())["sessions"]
                assert (known["rollout_id"], known["calls"]) == ("task.0", 1)
                assert secret not in str(known)
                async with http.get(admin + "/health", headers=shown) as answer:
                    assert (await answer.json())["node"] == "node0"
                async with http.get(url + "/health") as answer:
                    assert sorted(await answer.json()) == ["node", "status", "version"]
                async with http.get(url + "/health", headers=shown) as answer:
                    assert (await answer.json())["inference"][0]["url"] == inference.base_url
                for route in ("/metrics", "/sessions"):  # not on the side that sandboxes reach
                    async with http.get(url + route, headers=shown) as answer:
                        assert answer.status == 404


async def test_the_operators_side_needs_a_token_to_start(redis_url: str, tmp_path: Path) -> None:
    path = topology(tmp_path, proxy={"admin_port": free_port()})
    assert failure(redis_url, "--node", "node0", "--topology", path, "--port", "0") == (
        "proxy.admin_port needs a token: set POLARQ_TOKEN where the node's worker or proxy runs"
    )


async def test_sandboxes_without_a_network_reach_it_by_a_socket(redis_url: str, tmp_path: Path) -> None:
    at = tmp_path / "sockets" / "proxy.sock"
    async with ScriptedInference(scenario=Scenario.of("hi")) as inference:
        path = topology(tmp_path, "unix", inference=inference.base_url, proxy={"unix_socket": str(at)})
        arguments = ("--node", "node0", "--topology", path, "--port", "0")
        for _ in range(2):  # the second finds the socket that the first, killed, has left
            with started(redis_url, *arguments) as (process, _):
                async with (
                    session(redis_url, Keys("unix")) as (redis, secret),
                    aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(at))) as http,
                ):
                    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
                    async with http.post(f"http://proxy/s/{secret}/v1/chat/completions", json=body) as answer:
                        assert answer.status == 200
                    async with http.get("http://proxy/health") as answer:
                        assert sorted(await answer.json()) == ["node", "status", "version"]
                    assert await read_completions(redis, Keys("unix"), "task.0", 1, 1)
                    assert "is taken by another proxy" in failure(redis_url, *arguments)
                process.kill()
                process.wait()
            assert at.is_socket()
