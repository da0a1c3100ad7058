"""What a worker that dies, or leaves, has done and leaves behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq_worker.leftovers import clear_sandboxes
from tests.durable.evaluated import evaluated_by, stack_of
from tests.durable.gates import PATIENCE_S, Gates, wait_for_log
from tests.worker.conftest import commands_with, wait_until

S = RolloutState


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(appendonly=True) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def test_a_worker_killed_between_a_rollouts_end_and_its_commit_has_not_worked_for_nothing(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    gate, spool = tmp_path / "gate", tmp_path / "state" / "node0" / "spool"
    with stack_of(tmp_path, server, lease_s=120) as stack:
        stack.client.submit(gates.task("kept", **evaluated_by("Waits", gate)))
        gates.open("kept.0")
        wait_until(Path(f"{gate}.reached").exists, PATIENCE_S)
        server.kill()
        gate.touch()
        wait_until(lambda: any(spool.glob("kept.0-*[0-9]")), PATIENCE_S)
        stack.workers["node0"].kill()
        server.start()
        assert stack.client.record("kept").rollouts[0].state is S.EVALUATING
        stack.start_worker()
        result = stack.client.wait("kept", PATIENCE_S).results[0]
        assert (result.outcome.state, result.attempt) == (S.COMPLETED, 1)
        assert result.trajectory is not None
        assert result.trajectory.fidelity.calls == 1
        assert gates.starts() == {"kept.0": 1}
        wait_until(lambda: not list(spool.iterdir()), PATIENCE_S)


def test_a_killed_workers_sandboxes_end_with_it_and_its_next_start_clears_their_folders(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, lease_s=2) as stack:
        keys, redis = stack.client.ledger.calls.keys, stack.client.ledger.redis
        stack.client.submit(gates.task("killed", first="setsid sleep 7654331 & disown\nsleep 7654332 &"))
        gates.wait_started("killed.0")
        wait_until(lambda: len(commands_with("sleep 765433")) == 2, PATIENCE_S)
        rollouts = tmp_path / "state" / "node0" / "rollouts"
        grants = list(redis.scan_iter(f"{keys.prefix}:grant:*"))
        assert grants
        assert all(redis.pttl(grant) > 0 for grant in grants), "a grant that nobody closes ends by itself"
        stack.workers["node0"].kill()
        wait_until(lambda: commands_with("sleep 765433") == [], PATIENCE_S)
        left = [folder.name for folder in rollouts.iterdir()]
        assert left
        gates.open("killed.0")
        stack.start_worker()
        wait_for_log(stack, f"cleared the sandboxes of a worker that was killed: {', '.join(left)}")
        assert not set(left) & {folder.name for folder in rollouts.iterdir()}


def test_what_outlived_its_keeper_is_killed_and_other_peoples_processes_are_not(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours" / "rollouts", tmp_path / "others" / "rollouts"
    processes = []
    for root in (ours, others):
        (root / "box-1-agent" / "locked").mkdir(parents=True)
        (root / "box-1-agent" / "logs").mkdir()
        (root / "box-1-agent" / "logs" / "step.00.stdout").write_text("last words")
        env = {"POLARQ_RUNTIME_ID": "box-1-agent", "HOME": f"{root}/box-1-agent/home"}
        processes.append(subprocess.Popen(["sleep", "7654333"], env=env, executable="/bin/sleep"))
    (ours / "box-1-agent" / "locked").chmod(0)
    (ours / "link").symlink_to(others)
    try:
        assert sorted(clear_sandboxes(ours, tmp_path / "logs")) == ["box-1-agent", "link"]
        assert processes[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert processes[1].poll() is None
        assert (list(ours.iterdir()), (others / "box-1-agent" / "locked").exists()) == ([], True)
        kept = tmp_path / "logs" / "rollouts" / "box-1" / "box-1-agent" / "step.00.stdout"
        assert kept.read_text() == "last words"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_spool_that_cannot_be_written_costs_a_warning_and_no_rollout(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    (tmp_path / "state" / "node0").mkdir(parents=True)
    (tmp_path / "state" / "node0" / "spool").touch()  # not a folder, so nothing can be written below it
    with stack_of(tmp_path, server) as stack:
        stack.client.submit(gates.task("unkept"))
        gates.open("unkept.0")
        assert stack.client.wait("unkept", PATIENCE_S).counts.completed == 1
        assert "rollout unkept.0: its result cannot be kept on disk" in stack.workers["node0"].log.read_text()


# --- a worker that leaves


def test_at_the_end_of_the_grace_what_still_runs_is_given_back_at_once(
    tmp_path: Path, server: EmbeddedRedis, gates: Gates
) -> None:
    with stack_of(tmp_path, server, drain_grace_s=1, lease_s=600) as stack:
        stack.client.submit(gates.task("grace"))
        gates.wait_started("grace.0")
        stack.workers["node0"].signal(signal.SIGTERM)
        assert stack.workers["node0"].wait(int(PATIENCE_S)) == 0
        rollout = stack.client.record("grace").rollouts[0]
        assert (rollout.state, rollout.attempt) == (S.QUEUED, 0), "its lease had minutes left"
        assert not list((tmp_path / "state" / "node0" / "rollouts").iterdir())
        gates.open("grace.0")
        stack.start_worker()
        assert stack.client.wait("grace", PATIENCE_S).counts.completed == 1
