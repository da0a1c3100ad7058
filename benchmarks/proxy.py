"""What the proxy costs: calls a second, added latency and CPU, against the same calls sent to the engine directly.

    python benchmarks/proxy.py [--seconds 5] [--concurrency 1 32] [--large] [--stream]

Engine: a process that answers every call at once with the same bytes (2,000 prompt ids, 300 sampled ones, 43 KB; large:
32,000 and 500; whole, or as one event per id). Proxy: its own process, as in production, with a private Redis. Load:
this process, one session per connection, 9 KB requests (large: 139 KB). All share the machine's cores: on a busy one
read p5 and the CPU column (seconds per 1,000 calls), and compare only within one run. The folder beside this file
holds what a side-by-side run with other proxies needs; proxy_records.py has bytes and cost of a growing session.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
from redis.asyncio import Redis

from polarq.ledger.keys import Keys
from polarq.store.grants import GrantSpec, open_grant
from polarq.testing.redis import EmbeddedRedis

LARGE = "--large" in sys.argv
PROMPT_IDS = [(7919 * index) % 150_000 for index in range(32_000 if LARGE else 2000)]
SAMPLED_IDS = [(104_729 * index) % 150_000 for index in range(500 if LARGE else 300)]
WARM_UP_S = 1.0


@dataclass(frozen=True)
class Figures:
    calls: int
    seconds: float
    latencies_s: list[float]
    cpu_s: float

    def at(self, share: float) -> float:
        """Latency that this share of the calls stayed below, in ms."""
        return sorted(self.latencies_s)[int(len(self.latencies_s) * share)] * 1000

    def row(self, name: str, base: Figures | None) -> str:
        p5, p50, p99 = self.at(0.05), self.at(0.5), self.at(0.99)
        added = "" if base is None else f"{p50 - base.at(0.5):8.2f} {p5 - base.at(0.05):8.2f}"
        cpu = f"{self.cpu_s / self.calls * 1000:8.2f}" if self.cpu_s else ""
        return f"{name:12} {self.calls / self.seconds:8.0f} {p5:8.2f} {p50:8.2f} {p99:8.2f} {added:>17} {cpu:>12}"


def _entry(token_id: int) -> dict[str, Any]:
    return {"token": f"t{token_id}", "logprob": -0.1234567890123, "bytes": [116, 49, 50], "top_logprobs": []}


def whole_answer() -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * len(SAMPLED_IDS)},
        "finish_reason": "stop",
        "token_ids": SAMPLED_IDS,
        "logprobs": {"content": [_entry(token_id) for token_id in SAMPLED_IDS]},
        "weight_versions": [{"version": "1", "start": 0, "end": len(SAMPLED_IDS)}],
    }
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(SAMPLED_IDS)}
    tree = {"id": "x", "model": "mock", "choices": [choice], "prompt_token_ids": PROMPT_IDS, "usage": usage}
    body = json.dumps(tree, separators=(",", ":")).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def streamed_answer() -> bytes:
    def event(delta: dict[str, Any], finish: str | None = None, **fields: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **fields.pop("more", {})}
        tree = {"model": "mock", "choices": [choice], **fields}
        return b"data: " + json.dumps(tree, separators=(",", ":")).encode() + b"\n\n"

    body = event({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT_IDS)
    for token_id in SAMPLED_IDS[:-1]:
        body += event({"content": "word "}, more={"token_ids": [token_id], "logprobs": {"content": [_entry(token_id)]}})
    end = {
        "token_ids": SAMPLED_IDS[-1:],
        "logprobs": {"content": [_entry(1)]},
        "weight_versions": [{"version": "1", "start": 0, "end": len(SAMPLED_IDS)}],
    }
    body += event({}, "stop", more=end)
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": len(SAMPLED_IDS)}
    body += b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class MockEngine(asyncio.Protocol):
    """Answers a POST with one of two canned answers, anything else with the model list."""

    def __init__(self, whole: bytes, streamed: bytes) -> None:
        self._answers = {False: whole, True: streamed}
        models = json.dumps({"data": [{"id": "mock", "max_model_len": 32768}]}).encode()
        self._models = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(models)
        self._models += models
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head = self._rest[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._rest) < end + 4 + length:
                return
            body, self._rest = self._rest[end + 4 : end + 4 + length], self._rest[end + 4 + length :]
            stream = b'"stream":true' in body or b'"stream": true' in body
            self._transport.write(self._answers[stream] if head.startswith(b"post") else self._models)


async def serve_engine() -> None:
    whole, streamed = whole_answer(), streamed_answer()
    server = await asyncio.get_running_loop().create_server(lambda: MockEngine(whole, streamed), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


@contextmanager
def process(*arguments: str, **env: str) -> Iterator[tuple[int, str]]:
    """A child and its first line."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert child.stdout is not None
        yield child.pid, child.stdout.readline().strip()
    finally:
        child.terminate()
        child.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, paths: list[str], seconds: float, *, stream: bool, pid: int | None) -> Figures:
    """One connection per path, each sending the next call when the last one is answered."""
    latencies: list[float] = []
    messages = [{"role": "user", "content": "some words of a prompt " * 76} for _ in range(80 if LARGE else 5)]
    body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()
    measuring = False
    stop = False

    async def load(path: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        while not stop:
            began = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            if b"content-length:" in answer.lower():
                await reader.readexactly(int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
            else:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            if measuring:
                latencies.append(time.perf_counter() - began)
        writer.close()

    tasks = [asyncio.create_task(load(path)) for path in paths]
    await asyncio.sleep(WARM_UP_S)
    before = cpu_s(pid) if pid is not None else 0.0
    measuring = True
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    used = cpu_s(pid) - before if pid is not None else 0.0
    stop = True
    await asyncio.gather(*tasks)
    return Figures(len(latencies), took, latencies, used)


async def run(seconds: float, concurrencies: list[int], *, stream: bool) -> None:
    with (
        EmbeddedRedis() as server,
        process(__file__, "--serve-engine", *(["--large"] if LARGE else [])) as (_, engine_port),
        tempfile.TemporaryDirectory() as folder,
    ):
        topology = Path(folder) / "topology.yaml"
        inference = {"engine": "vllm", "base_url": f"http://127.0.0.1:{engine_port}"}
        topology.write_text(json.dumps({"gateway": {"nodes": [{"id": "node0", "inference": inference}]}}))
        arguments = ("-m", "polarq_proxy", "--node", "node0", "--topology", str(topology), "--port", "0")
        with process(*arguments, POLARQ_REDIS_URL=server.url) as (pid, line):
            proxy_port = int(line.rpartition(":")[2])
            async with Redis.from_url(server.url) as redis:
                print(f"{'':12} {'':8} {'latency, ms':>26} {'added, ms':>17} {'proxy CPU':>12}")
                print(f"{'':12} {'calls/s':>8} {'p5':>8} {'p50':>8} {'p99':>8} {'p50':>8} {'p5':>8} {'s/1,000':>12}")
                for concurrency in concurrencies:
                    grants = []
                    for index in range(concurrency):
                        spec = GrantSpec(
                            rollout_id=f"b{concurrency}.{index}", task_id="b", attempt=1, token=1, node_id="node0"
                        )
                        grants.append(await open_grant(redis, Keys(), spec, ttl_s=3600))
                    path = "/v1/chat/completions"
                    direct = await measure(int(engine_port), [path] * concurrency, seconds, stream=stream, pid=None)
                    paths = [f"/s/{grant}{path}" for grant in grants]
                    proxied = await measure(proxy_port, paths, seconds, stream=stream, pid=pid)
                    print(direct.row(f"direct, {concurrency}", None))
                    print(proxied.row(f"proxy, {concurrency}", direct))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--stream", action="store_true", help="measure streamed answers of 302 events")
    parser.add_argument("--large", action="store_true", help="prompts of 32,000 ids")
    parser.add_argument("--serve-engine", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    work = serve_engine() if given.serve_engine else run(given.seconds, given.concurrency, stream=given.stream)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
