"""Results of 45 MB on every way that results go; a process needs no more for many than for those at once."""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from polarq.callback.delivery import SIGNATURE_HEADER, TIMESTAMP_HEADER, signature_holds
from polarq.testing.ports import free_port
from polarq.testing.program import Program
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

REPOSITORY = Path(__file__).parents[2]
SIZE = 45_000_000
SECRET = "a-secret"
AT_ONCE = 3
"""What the node holds at once."""
MANY = 5
GROWTH = 1.5
"""Of a process's peak with many results over its peak with as many as it handles at once."""

READER = """
import re, sys
from polarq.client import Client
with Client() as client:
    read = getattr(client, sys.argv[1])
    sizes = []
    for found in read(sys.argv[2:], timeout_s=120):
        for result in getattr(found, "results", [found]):
            sizes.append(len(result.reward.report["noise"]))
print(*sizes)
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


class Told:
    """A trainer's server: notes the size of each callback, and whether it was signed."""

    def __init__(self) -> None:
        self.got: queue.Queue[tuple[str, int, bool]] = queue.Queue()
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                signed = signature_holds(SECRET, self.headers[TIMESTAMP_HEADER], body, self.headers[SIGNATURE_HEADER])
                told.got.put((json.loads(body)["task_id"], len(body), signed))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={"node0": {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1, "ready_buffer": 0}},
        sections={
            "security": {"allowed_modules": ["tests.durable.plugins"]},
            "retention": {"archive": str(tmp_path / "archive")},
        },
        env={
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "POLARQ_CALLBACK_SECRET": SECRET,
        },
    ) as made:
        yield made


def peak_kb(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def large_task(task_id: str, told: Told) -> dict[str, Any]:
    evaluator = {"strategy": "tests.durable.plugins:Large", "config": {"size": SIZE}}
    return shell_task(task_id, ask(1), evaluator=evaluator, callback_url=told.url, timeout_seconds=300)


def run_tasks(stack: LocalStack, told: Told, task_ids: list[str]) -> None:
    """Returns when all have ended and their callbacks have come."""
    for task_id in task_ids:
        stack.client.submit(large_task(task_id, told))
    for task_id in task_ids:
        result = stack.client.wait(task_id, PATIENCE_S, trajectories="none")
        assert (result.counts.completed, result.results[0].attempt) == (1, 1), result.results[0].outcome
    waiting = set(task_ids)
    while waiting:
        # At least once: where a try took too long there is another.
        task_id, size, signed = told.got.get(timeout=PATIENCE_S)
        assert size > SIZE
        assert signed
        waiting.discard(task_id)


def read_by(stack: LocalStack, way: str, task_ids: list[str]) -> int:
    """A trainer's process reads them all; its peak of memory in kB."""
    command = [sys.executable, "-c", READER, way, *task_ids]
    ran = subprocess.run(command, env=stack.env, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    sizes, peak = ran.stdout.splitlines()
    assert [int(size) for size in sizes.split()] == [SIZE] * len(task_ids)
    return int(peak)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_large_results_go_every_way_and_many_need_no_more_memory_than_one(
    stack: LocalStack, told: Told, tmp_path: Path
) -> None:
    worker = stack.workers["node0"].pid
    every = [f"large-{n}" for n in range(MANY)]
    run_tasks(stack, told, every[:AT_ONCE])
    full = peak_kb(worker)
    run_tasks(stack, told, every[AT_ONCE:])
    assert peak_kb(worker) < full * GROWTH

    for way in ("results", "groups"):
        assert read_by(stack, way, every) < read_by(stack, way, every[:1]) * GROWTH

    out = tmp_path / "shown.json"
    command = [sys.executable, "-m", "polarq.cli", "show", "large-0.0", "--out", str(out)]
    subprocess.run(command, env=stack.env, capture_output=True, timeout=300, check=True)
    assert len(json.loads(out.read_text())["result"]["reward"]["report"]["noise"]) == SIZE

    over_http(stack, every)

    assert stack.client.acknowledge(every[0]) == 1
    archived = json.loads((tmp_path / "archive" / "large-0" / "0.json").read_text())
    assert len(archived["reward"]["report"]["noise"]) == SIZE
    assert not payloads(stack, every[0])
    assert payloads(stack, every[1])


def payloads(stack: LocalStack, task_id: str) -> list[bytes]:
    """Pieces of its results in the store."""
    return list(stack.client.ledger.redis.scan_iter(f"*{{{task_id}}}:payload:*", count=1000))


def over_http(stack: LocalStack, every: list[str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "polarq.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    shim = Program("shim", command, stack.home / "logs" / "shim.log", stack.env).start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as http:
            wait_until(lambda: answers(http), PATIENCE_S)
            assert len(http.get(f"/rollout/task/{every[0]}").content) > SIZE
            after_one = peak_kb(shim.pid)
            for task_id in every[1:]:
                assert len(http.get(f"/rollout/task/{task_id}").content) > SIZE
            assert peak_kb(shim.pid) < after_one * GROWTH
    finally:
        shim.stop()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
