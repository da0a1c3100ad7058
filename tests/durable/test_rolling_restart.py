"""Every worker is told to stop and started again, one after the other, while short rollouts keep coming."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from polarq.client import Client
from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates
from tests.durable.hand import beside
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODES = ("node0", "node1")
MOST_OPEN = 8
ROUNDS = 2
"""Over all nodes."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={node: {"max_run_workers": 3} for node in NODES},
        # Long enough for what runs to end: nothing has to be given back.
        sections={"gateway": {"drain_grace_s": 600.0}},
    ) as made:
        yield made


def test_restarting_every_worker_in_turn_under_load_fails_nothing_and_starts_nothing_twice(
    stack: LocalStack, tmp_path: Path
) -> None:
    gates = Gates(tmp_path / "gates")
    over = Event()
    submitted: list[str] = []

    def ended(client: Client) -> int:
        return sum(client.head(task_id).state.terminal for task_id in submitted)

    def keep_submitting() -> None:
        with Client(stack.topology, stack.settings) as client:
            while not over.is_set():
                if len(submitted) - ended(client) >= MOST_OPEN:
                    over.wait(0.1)
                    continue
                task = gates.task(f"stream-{len(submitted)}")
                gates.open(f"{task['task_id']}.0")
                client.submit(task)
                submitted.append(task["task_id"])

    def others_go_on() -> None:
        """Returns when some more rollouts have ended since now."""
        before = ended(stack.client)
        wait_until(lambda: ended(stack.client) >= before + 3, PATIENCE_S)

    with beside(keep_submitting):
        try:
            for _ in range(ROUNDS):
                for node in NODES:
                    others_go_on()
                    stack.workers[node].signal(signal.SIGTERM)
                    assert stack.workers[node].wait(PATIENCE_S) == 0
                    others_go_on()
                    stack.start_worker(node)
            others_go_on()
        finally:
            over.set()
    results = [stack.client.wait(task_id, PATIENCE_S) for task_id in submitted]
    rollouts = [rollout for result in results for rollout in result.results]
    assert len(rollouts) == len(submitted) > MOST_OPEN
    wrong = [(r.rollout_id, r.attempt, r.outcome) for r in rollouts if r.outcome.state is not RolloutState.COMPLETED]
    assert not wrong
    assert {r.attempt for r in rollouts} == {1}
    assert {r.node_id for r in rollouts} == set(NODES)
    assert gates.starts() == dict.fromkeys((r.rollout_id for r in rollouts), 1)
    assert [r.trajectory and r.trajectory.fidelity.calls for r in rollouts] == [1] * len(rollouts)
