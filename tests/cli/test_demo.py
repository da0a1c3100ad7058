"""The demo, whole and real: it runs a batch, tells it, and leaves nothing running however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from polarq.contracts.rollout import RolloutResult
from polarq.testing.redis import EmbeddedRedis
from tests.cli.conftest import POLARQ, program
from tests.cli.terminals import Terminal

pytestmark = pytest.mark.slow


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The demo's folder. Whatever has it in its environment or on its command line was started by the demo."""
    for name in [name for name in os.environ if name.startswith("POLARQ_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "state"
    yield folder
    assert left_running(folder) == []


def left_running(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            words += os.fsencode((process / "cwd").readlink())
        except OSError:  # gone meanwhile
            continue
        if os.fsencode(folder) in words and int(process.name) != os.getpid():
            found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


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


def test_a_newcomer_sees_the_steps_the_table_and_what_to_type_next(state: Path) -> None:
    drawn = Terminal([*POLARQ, "demo", "--state-dir", str(state), "-n", "1"], columns=80).end(150)
    assert drawn.code == 0
    for words in (
        "submit_rollout.delay(task)",
        "celery -A polarq worker -Q node0",
        "1 rollout: 1 completed",
        "Rewards 1",
    ):
        assert words in drawn.text.replace("\r\n", "")
    assert str(state / "results") in drawn.text.replace("\r\n", "")
    assert "everything is stopped" in drawn.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_stops_everything(state: Path, number: signal.Signals) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state)], columns=100)
    terminal.read_until(b"running", 120)
    terminal.process.send_signal(number)
    drawn = terminal.end(90)
    assert drawn.code == 128 + number
    assert "Traceback" not in drawn.text


def test_a_demo_that_is_killed_takes_its_programs_along(state: Path) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state), "--keep", "-n", "1"], columns=100)
    terminal.read_until(b"still running", 150)
    programs = left_running(state)
    assert any("celery" in line for line in programs)
    terminal.process.kill()
    terminal.end(30)


def test_kept_running_it_answers_the_commands_it_prints(state: Path) -> None:
    terminal = Terminal([*POLARQ, "demo", "--state-dir", str(state), "--keep", "-n", "1"], columns=400)
    terminal.read_until(b"submit", 150)
    terminal.read_until(b"still running", 150)
    config = ["-c", str(state / "topology.yaml")]
    status = program("status", "--json", *config)
    [node] = json.loads(status.stdout)["nodes"]
    assert node["alive"]
    [entry] = json.loads(status.stdout)["tasks"]
    shown = program("show", f"{entry['task_id']}.0", "--trajectory", *config)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "calculator" in shown.stdout
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end(60).code == 0


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


def test_a_missing_extra_is_one_line(tmp_path: Path, state: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'minisweagent' else find(name, package)\n",
        encoding="utf-8",
    )
    ran = demo(state, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr == "polarq: the demo needs minisweagent: pip install 'polarq[demo]'\n"
