"""The demo, whole and real: it runs a batch, tells it, and leaves nothing running however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from polarq.contracts.rollout import RolloutResult
from polarq.testing.redis import EmbeddedRedis
from tests.cli.conftest import POLARQ, clean_environment, program
from tests.cli.terminals import Terminal
from tests.leftovers import running, wait_for_end

pytestmark = pytest.mark.slow


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The demo's folder. Whatever has it in its environment or on its command line was started by the demo."""
    clean_environment(monkeypatch)
    folder = tmp_path / "state"
    yield folder
    assert running(folder) == {}


def demo(state: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*POLARQ, "demo", "--state-dir", str(state), *arguments],
        capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **env},
    )  # fmt: skip


def rollouts(ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    document = json.loads(ran.stdout)
    assert document["exit_code"] == ran.returncode
    rows: list[dict[str, Any]] = document["task"]["rollouts"]
    return rows


def test_four_samples_of_a_real_agent_are_scored_by_real_tests(state: Path) -> None:
    ran = demo(state, "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = rollouts(ran)
    assert [row["state"] for row in rows] == ["completed"] * 4
    # The scripts of the model, by sample: one rewrites, one breaks it, one edits, one gives up.
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    for row in rows:
        assert row["calls"] == row["traces"] > 0
        assert row["sampled_tokens"] > 0
        result = RolloutResult.model_validate_json((state / "results" / f"{row['rollout_id']}.json").read_text("utf-8"))
        assert result.trajectory is not None
        assert sum(trace.trainable_tokens for trace in result.trajectory.traces) == row["sampled_tokens"]
    assert state.stat().st_mode & 0o077 == 0
    assert "redis://" in (state / "topology.yaml").read_text(encoding="utf-8")


def test_a_newcomer_sees_the_steps_and_the_table_and_what_is_printed_to_type_works(state: Path) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state), "--keep", "-n", "1"], columns=80)
    terminal.read_until(b"still running", 150)
    terminal.read_until(b"task.yaml", 30)
    seen = terminal.data.decode().replace("\r\n", "")
    for words in (
        "submit_rollout.delay(task)",
        "celery -A polarq worker -Q node0",
        "1 rollout: 1 completed",
        "Rewards 1",
    ):
        assert words in seen
    assert str(state / "results") in seen
    config = ["-c", str(state / "topology.yaml")]
    status = program("status", "--json", *config)
    [node] = json.loads(status.stdout)["nodes"]
    assert node["alive"]
    [entry] = json.loads(status.stdout)["tasks"]
    shown = program("show", f"{entry['task_id']}.0", "--trajectory", *config)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "calculator.py" in shown.stdout
    terminal.process.send_signal(signal.SIGINT)
    drawn = terminal.end(60)
    assert drawn.code == 0
    assert "everything is stopped" in drawn.text


@pytest.mark.parametrize(
    ("number", "seen"), [(signal.SIGINT, b"running"), (signal.SIGTERM, b"Redis"), (signal.SIGHUP, b"inference")]
)
def test_a_signal_in_the_middle_stops_everything(state: Path, number: signal.Signals, seen: bytes) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state)], columns=100)
    terminal.read_until(seen, 120)
    terminal.process.send_signal(number)
    drawn = terminal.end(90)
    assert drawn.code == 128 + number
    assert "Traceback" not in drawn.text


def test_a_demo_that_is_killed_takes_worker_proxy_agents_and_inference_along(state: Path) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state), "-n", "1"], columns=100)
    terminal.read_until(b"running", 120)
    programs = running(state)
    assert {"celery", "polarq_proxy", "polarq.testing.inference"} <= {
        w for line in programs.values() for w in re.split("[ /]", line)
    }
    terminal.process.kill()
    terminal.end(30)
    for pid, line in programs.items():
        if "valkey" in line or "redis" in line:
            # Its data outlive it; the worker still needs it to give its rollouts back.
            continue
        wait_for_end(pid, 120)
    for pid in running(state):
        os.kill(pid, signal.SIGTERM)
        wait_for_end(pid, 10)


def test_a_worker_that_does_not_start_shows_the_end_of_its_log_and_where_it_is(state: Path) -> None:
    with EmbeddedRedis(maxmemory_policy="allkeys-lru") as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "100mb")
        ran = demo(state, POLARQ_REDIS_URL=server.url)
    assert ran.returncode == 1
    assert str(state / "logs" / "worker-node0.log") in ran.stderr
    assert "noeviction" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_redis_of_somebody_else_is_left_as_it_was(state: Path) -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.set("polarq:nodes", "theirs")
        ran = demo(state, "-n", "1", "--json", POLARQ_REDIS_URL=server.url)
        assert ran.returncode == 0
        assert client.keys() == [b"polarq:nodes"]


def test_no_redis_at_the_given_address_is_3(state: Path) -> None:
    ran = demo(state, POLARQ_REDIS_URL="redis://127.0.0.1:1/0")
    assert ran.returncode == 3
    assert "does not answer" in ran.stderr
    assert "still in Redis" not in ran.stderr
    assert "inference" not in ran.stdout  # said before anything else was started


def test_a_missing_extra_is_one_line(tmp_path: Path, state: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'minisweagent' else find(name, package)\n",
        encoding="utf-8",
    )
    ran = demo(state, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr == "polarq: the demo needs minisweagent: pip install 'polarq[demo]'\n"
