"""A worker that cannot start says why in one line, and what to do; one that loses Redis or inference gets over it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from polarq.contracts import RolloutState
from polarq.testing.ports import free_port
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq_worker.health import read_health
from tests.worker.conftest import ask, commands_with, shell_task, wait_until
from tests.worker.test_control import wait_for_state

EX_CONFIG = 78
CELERY = str(Path(sys.executable).parent / "celery")


def start_and_fail(tmp_path: Path, redis_url: str, *, queue: str = "node0", **more: Any) -> str:
    """The one line that a worker prints which cannot start."""
    topology = tmp_path / "topology.yaml"
    node = {"id": "node0", "host": "127.0.0.1", "port": more.pop("port", None) or free_port()}
    node["inference"] = {"engine": "vllm", "base_url": "http://127.0.0.1:9"}
    topology.write_text(yaml.safe_dump({"gateway": {"nodes": [node, *more.pop("nodes", [])]}}), encoding="utf-8")
    env = {
        "PATH": "/usr/bin:/bin",
        "POLARQ_TOPOLOGY": str(more.pop("topology", topology)),
        "POLARQ_REDIS_URL": redis_url,
        "POLARQ_STATE_DIR": str(more.pop("state_dir", tmp_path / "state")),
    }
    done = subprocess.run(
        [CELERY, "-A", "polarq", "worker", "-Q", queue],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("polarq worker: ")]
    assert done.returncode == EX_CONFIG, done.stderr
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_no_redis(tmp_path: Path) -> None:
    line = start_and_fail(tmp_path, "redis://127.0.0.1:1/0")
    assert "does not answer; start it, or set POLARQ_REDIS_URL" in line


def test_a_wrong_password(tmp_path: Path) -> None:
    with EmbeddedRedis(password="right") as server:
        line = start_and_fail(tmp_path, f"redis://:wrong@127.0.0.1:{server.port}/0")
    assert "refuses the user or password" in line
    assert "wrong@" not in line


def test_a_redis_that_evicts(tmp_path: Path) -> None:
    with EmbeddedRedis(maxmemory_policy="allkeys-lru") as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "100mb")
        line = start_and_fail(tmp_path, server.url)
    assert "set maxmemory-policy noeviction" in line


def test_a_port_that_is_taken(tmp_path: Path, redis_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = start_and_fail(tmp_path, redis_url, port=taken.getsockname()[1])
    assert "is taken: stop what listens there, or change the node's port in the topology" in line


def test_a_state_folder_that_cannot_be_used(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "file").write_text("")
    line = start_and_fail(tmp_path, redis_url, state_dir=tmp_path / "file" / "state")
    assert "set POLARQ_STATE_DIR to another" in line


def test_a_topology_that_is_wrong(tmp_path: Path, redis_url: str) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("gateway: {nodes: [{id: node0, prot: 1}]}\n")
    line = start_and_fail(tmp_path, redis_url, topology=wrong)
    assert "unknown key 'prot', did you mean 'port'?" in line


def test_a_node_that_the_topology_does_not_have(tmp_path: Path, redis_url: str) -> None:
    other = {"id": "node1", "port": free_port()}
    line = start_and_fail(tmp_path, redis_url, queue="node7", nodes=[other])
    assert "there is no node 'node7' (nodes: node0, node1)" in line


def test_a_node_without_inference_waits_and_says_so_and_goes_on_when_it_is_there(
    tmp_path: Path, scenario: Path
) -> None:
    with LocalStack(tmp_path, scenario=str(scenario)) as stack:
        assert stack.inference is not None
        port = int(stack.inference_url.rpartition(":")[2])
        stack.inference.stop()
        health = stack.client.nodes()[0].health
        for _ in stack.client.follow(after="0", wait_s=1):
            health = stack.client.nodes()[0].health
            if health.inference is False:
                break
            stack.client.ledger.do(stack.client.ledger.calls.note("test.look", {}))
        assert health.inference is False
        assert "127.0.0.1" in health.message
        stack.client.submit(shell_task("waits", ask(1)))
        assert stack.client.record("waits").counts.queued == 1
        stack.start_inference(port)
        result = stack.client.wait("waits", 90)
        assert result.counts.completed == 1, result.results[0].outcome


@pytest.mark.parametrize(
    ("endpoint", "inference", "says"),
    [
        ({"reachable": True, "ids": True, "model": "m", "served": ["m"]}, True, ""),
        ({"reachable": False, "ids": None, "problem": "http://e does not answer"}, False, "http://e does not answer"),
        ({"reachable": True, "ids": None, "model": "x", "served": ["m"]}, False, "http://e serves m and not 'x'"),
        ({"reachable": True, "ids": False, "model": "m", "served": ["m"]}, False, "gives no token ids"),
        ({"reachable": None, "ids": None, "model": "", "served": []}, None, ""),
    ],
)
def test_inference_is_usable_when_it_answers_serves_the_model_and_gives_ids(
    endpoint: dict[str, Any], inference: bool | None, says: str
) -> None:
    health = read_health({"inference": [{"url": "http://e", **endpoint}]})
    assert health.inference is inference
    assert says in health.message


def test_a_node_whose_engine_serves_another_model_takes_nothing_and_says_so(tmp_path: Path, scenario: Path) -> None:
    with LocalStack(tmp_path, scenario=str(scenario), nodes={"node0": {"model_served": "other"}}) as stack:
        wait_until(lambda: stack.client.nodes()[0].health.inference is False)
        assert "serves scripted and not 'other'" in stack.client.nodes()[0].health.message
        stack.client.submit(shell_task("other", ask(1)))
        assert stack.client.record("other").counts.queued == 1


@pytest.mark.slow
def test_rollouts_that_end_while_redis_is_away_are_committed_and_free_their_slots(
    tmp_path: Path, scenario: Path
) -> None:
    server = EmbeddedRedis(data_dir=tmp_path / "redis", appendonly=True)
    (tmp_path / "redis").mkdir()
    gate = tmp_path / "gate"
    sections = {"gateway": {"lease_s": 120}}
    nodes = {"node0": {"max_run_workers": 2, "max_init_workers": 1, "max_postrun_workers": 1, "ready_buffer": 0}}
    with server, LocalStack(tmp_path, scenario=str(scenario), redis=server, nodes=nodes, sections=sections) as stack:
        hold = f"while [ ! -e {gate} ]; do sleep 0.05; done"
        command = f"{ask(1)}\ntouch {tmp_path}/asked.$SESSION_ID\n{hold}\ntouch {tmp_path}/ended.$SESSION_ID"
        stack.client.submit(shell_task("away", command, num_samples=2))
        asked = [tmp_path / f"asked.away.{index}" for index in range(2)]
        wait_until(lambda: all(path.exists() for path in asked))
        server.kill()
        gate.touch()
        ended = [tmp_path / f"ended.away.{index}" for index in range(2)]
        wait_until(lambda: all(path.exists() for path in ended))
        # Long enough for the worker to notice: its own retries are over, and it waits.
        wait_until(lambda: "waiting for the ledger" in stack.workers["node0"].last_lines(50))
        assert stack.workers["node0"].exit_code is None
        server.start()
        result = stack.client.wait("away", 90)
        assert result.counts.completed == 2, [r.outcome for r in result.results]
        stack.client.submit(shell_task("after", ask(1), num_samples=3))
        assert stack.client.wait("after", 90).counts.completed == 3
        assert stack.workers["node0"].exit_code is None


def test_a_cold_stop_gives_everything_back_at_once(tmp_path: Path, scenario: Path) -> None:
    with LocalStack(tmp_path, scenario=str(scenario)) as stack:
        stack.client.submit(shell_task("cold", f"{ask(1)}\nsleep 300"))
        wait_for_state(stack, "cold.0", RolloutState.RUNNING)
        worker = stack.workers["node0"]
        worker.signal(signal.SIGQUIT)
        worker.wait(60)
        record = stack.client.record("cold")
        assert (record.rollouts[0].state, record.rollouts[0].attempt) == (RolloutState.QUEUED, 0)


def test_a_worker_that_is_told_to_go_while_redis_is_away_goes(tmp_path: Path, scenario: Path) -> None:
    server = EmbeddedRedis()
    sections = {"gateway": {"drain_grace_s": 1}}
    with server, LocalStack(tmp_path, scenario=str(scenario), redis=server, sections=sections) as stack:
        stack.client.submit(shell_task("gone", f"{ask(1)}\nsleep 7654326"))
        wait_until(lambda: bool(commands_with("sleep 7654326")))
        server.kill()
        worker = stack.workers["node0"]
        worker.signal(signal.SIGTERM)
        worker.wait(150)
        assert commands_with("sleep 7654326") == []
        assert "their leases end by themselves" in worker.last_lines(200)
