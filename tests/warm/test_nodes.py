"""Real workers: what results say of their sandboxes, and what is left of those when a worker is gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Boundary, RolloutState
from polarq.contracts.sandbox import SandboxRecord
from polarq.ledger.sandboxes import sandboxes_of
from polarq.testing.ports import free_port
from polarq.testing.stack import LocalStack
from tests.durable import boxes
from tests.durable.evaluated import REPOSITORY
from tests.durable.gates import PATIENCE_S, Gates
from tests.worker.conftest import shell_task, wait_until, write_scenario


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One node with few places."""
    home: Path = tmp_path_factory.mktemp("stack")
    places = {"max_init_workers": 1, "max_run_workers": 1, "ready_buffer": 0, "max_postrun_workers": 1}
    runtimes = {"local": {"isolation": "none"}, "pool": {"max_idle": 2}}
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with LocalStack(
        home,
        scenario=str(write_scenario(home)),
        nodes={"node0": {**places, "runtimes": runtimes}},
        sections={"security": {"allowed_modules": ["tests.warm.boxes"]}},
        env={"PYTHONPATH": path},
    ) as made:
        yield made


class Fleet:
    """Recipes of one test, whose sandboxes tell what happens to them."""

    def __init__(self, home: Path, stack: LocalStack) -> None:
        self.stack = stack
        self.state_dir = stack.home / "state/node0"
        self.events_file = home / "events"
        self.prepared_file = home / "prepared"
        self.events_file.touch()
        self.prepared_file.touch()
        self.gates = Gates(home / "gates")
        self.task_id = home.name.replace("_", "-")
        self.submitted: list[str] = []

    def submit(self, task: dict[str, Any]) -> None:
        self.submitted.append(self.stack.client.submit(task).task_id)

    def runtime(self, command: str, box: str = "SnapBox", **more: Any) -> dict[str, Any]:
        prepare = [{"type": "exec", "command": f"echo x >> {self.prepared_file}; {command}"}]
        env = {"EVENTS": str(self.events_file)}
        return {"import_path": f"tests.warm.boxes:{box}", "env": env, "prepare": prepare, **more}

    def starts(self) -> list[str]:
        lines = [line.split() for line in self.events_file.read_text().splitlines()]
        return [line[1] for line in lines if line[0] == "start"]

    def records(self) -> list[SandboxRecord]:
        ledger = self.stack.client.ledger
        return ledger.do(sandboxes_of(ledger.calls.keys, ["node0"]))

    def wait_for_idle(self, number: int) -> list[SandboxRecord]:
        """Returns the records of what waits when that many of this test's sandboxes do. What another one's recipes left
        waiting, and what the node has not yet said of now, does not count."""
        mine: list[SandboxRecord] = []

        def waits() -> bool:
            mine[:] = [one for one in self.records() if not one.rollout_id and Path(one.handle) in self.handles()]
            return len(mine) >= number and self.stack.client.nodes()[0].pool.idle == number

        wait_until(waits, PATIENCE_S)
        return mine

    def handles(self) -> list[Path]:
        return [Path(f"{self.events_file}.{runtime_id}") for runtime_id in self.starts()]


@pytest.fixture
def fleet(tmp_path: Path, stack: LocalStack) -> Iterator[Fleet]:
    made = Fleet(tmp_path, stack)
    yield made
    # A test that failed leaves rollouts that nobody lets go on, and the next one's would wait for their places.
    for task_id in made.submitted:
        stack.client.cancel(task_id)
    for handle in made.handles():
        boxes.end(handle)


def test_while_one_runs_the_next_ones_sandbox_is_made_and_its_result_says_so(fleet: Fleet) -> None:
    client, gates = fleet.stack.client, fleet.gates
    fleet.submit(gates.task(fleet.task_id, 8, runtime=fleet.runtime("echo made > it")))
    wait_until(lambda: sum(gates.starts().values()) == 1, PATIENCE_S)
    wait_until(lambda: client.nodes()[0].pool.idle == 2, PATIENCE_S)
    gates.open(*(f"{fleet.task_id}.{n}" for n in range(8)))
    result = client.wait(fleet.task_id, PATIENCE_S)
    assert result.counts.completed == 8
    assert len(fleet.prepared_file.read_text().split()) == 1
    said = [one.sandbox for one in result.results]
    assert all(one is not None and one.backend == "tests.warm.boxes:SnapBox" for one in said)
    assert len({one.recipe for one in said if one is not None}) == 1
    origins = [one.origin for one in said if one is not None]
    assert origins.count("cold") == 1
    assert origins.count("warm") >= 2
    assert said[0] is not None
    assert said[0].exec_times.count > 0


def test_a_prepare_that_fails_is_said_with_its_log_kept(fleet: Fleet) -> None:
    client = fleet.stack.client
    fleet.submit(shell_task(fleet.task_id, "true", runtime=fleet.runtime("echo why >&2; false")))
    outcome = client.wait(fleet.task_id, PATIENCE_S).results[0].outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (
        RolloutState.FAILED,
        Boundary.PREPARE,
        "prepare_failed",
    )
    (log,) = (fleet.state_dir / "logs/rollouts").glob(f"{fleet.task_id}.0-*/prepare/prepare.00.stderr")
    assert log.read_text() == "why\n"


def test_a_worker_that_is_killed_leaves_nothing_of_what_waited(fleet: Fleet) -> None:
    client, gates, worker = fleet.stack.client, fleet.gates, fleet.stack.workers["node0"]
    fleet.submit(gates.task(fleet.task_id, 8, runtime=fleet.runtime("true", "LastingBox")))
    waiting = fleet.wait_for_idle(2)
    assert all(boxes.alive(Path(record.handle)) for record in waiting), "or this test shows nothing"
    worker.signal(signal.SIGKILL)
    worker.wait(PATIENCE_S)
    client.cancel(fleet.task_id)
    fleet.stack.start_worker()
    wait_until(lambda: not any(boxes.alive(handle) for handle in fleet.handles()), PATIENCE_S)
    wait_until(lambda: fleet.records() == [], PATIENCE_S)
    assert list((fleet.state_dir / "rollouts").iterdir()) == []


def test_a_worker_that_stops_leaves_nothing_of_what_waited(fleet: Fleet) -> None:
    client, gates = fleet.stack.client, fleet.gates
    fleet.submit(gates.task(fleet.task_id, 8, runtime=fleet.runtime("true", "LastingBox")))
    fleet.wait_for_idle(2)
    client.cancel(fleet.task_id)
    fleet.stack.workers["node0"].stop()
    assert not any(boxes.alive(handle) for handle in fleet.handles())
    assert fleet.records() == []
    assert list((fleet.state_dir / "rollouts").iterdir()) == []
    fleet.stack.start_worker()


def test_a_sandbox_is_used_again_after_a_rollout_that_went_well_and_only_then(fleet: Fleet) -> None:
    client = fleet.stack.client
    # One after another: the first fails, so that nobody gets its sandbox.
    runtime = fleet.runtime("true", reuse=True)
    origins = []
    for task_id, command in (("a", "exit 3"), ("b", "touch used"), ("c", "test -e used")):
        fleet.submit(shell_task(task_id, command, runtime=runtime))
        result = client.wait(task_id, PATIENCE_S).results[0]
        assert result.sandbox is not None
        origins.append((result.outcome.state.value, result.sandbox.origin))
        assert result.sandbox.exec_times.count > 0, "of this rollout, also when its sandbox is the next one's already"
    assert origins == [("failed", "cold"), ("completed", "snapshot"), ("completed", "reused")]


SERVER = "import socket; s = socket.create_server(('127.0.0.1', {port})); print('mine', flush=True); s.accept()"


@pytest.mark.parametrize("way", ["nohup", "setsid"])
def test_the_next_rollout_of_a_recipe_finds_the_port_free_that_the_last_ones_server_had(fleet: Fleet, way: str) -> None:
    client = fleet.stack.client
    server = SERVER.format(port=free_port())
    # The port is the sandbox's for as long as the server lives, which is longer than the harness.
    command = f'{way} python3 -c "{server}" > said 2>&1 &\nuntil [ -s said ]; do sleep 0.05; done\ngrep -q mine said'
    fleet.submit(shell_task(fleet.task_id, command, num_samples=3, runtime=fleet.runtime("true")))
    results = client.wait(fleet.task_id, PATIENCE_S).results
    assert [one.outcome.state for one in results] == [RolloutState.COMPLETED] * 3
    assert {one.sandbox.origin for one in results if one.sandbox} <= {"cold", "snapshot", "warm"}


def test_a_fresh_sandbox_for_grading_comes_from_what_the_agents_recipe_left(fleet: Fleet) -> None:
    client = fleet.stack.client
    repository = (
        'git init -q repo; cd repo; echo no > it; git add it; git -c user.name=a -c user.email=b commit -qm "x"'
    )
    evaluator = {
        "strategy": "test_on_output",
        "refresh_runtime": True,
        "config": {
            "repo_dir": "/polar/session/repo",
            "test_command": 'grep -q yes it && echo "PASSED it"',
            "expected_output_json": {"it": "PASSED"},
            "test_timeout": 60,
        },
    }
    task = shell_task(
        fleet.task_id, "echo yes > repo/it", num_samples=2, runtime=fleet.runtime(repository), evaluator=evaluator
    )
    fleet.submit({**task, "agent": {"harness": "shell", "custom_shell": {"command": "echo yes > repo/it"}}})
    results = client.wait(fleet.task_id, PATIENCE_S).results
    assert [(one.outcome.state, one.reward and one.reward.outcome) for one in results] == [
        (RolloutState.COMPLETED, 1.0)
    ] * 2
    assert len(fleet.prepared_file.read_text().split()) == 1
    assert len([runtime_id for runtime_id in fleet.starts() if runtime_id.endswith("-eval")]) <= 2
