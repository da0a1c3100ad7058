"""Redis behind Sentinels: its primary is killed and the replica takes over, under workers that hold rollouts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq.contracts import RolloutState
from polarq.contracts.rollout import RolloutResult
from polarq.errors import LedgerUnavailable, NotQueued
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.durable.sentinels import Group
from tests.worker.conftest import ask, wait_until, write_scenario

S = RolloutState
NODE = {"max_init_workers": 8, "max_run_workers": 8, "max_postrun_workers": 8}


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture
def group() -> Iterator[Group]:
    with Group(password="secret") as made:
        yield made


def test_a_failover_costs_no_rollout_and_no_slot_and_nobody_leaves(tmp_path: Path, group: Group, gates: Gates) -> None:
    """Worker, proxy, a trainer that streams and one that submits live through it."""
    with LocalStack(
        tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url, nodes={"node0": NODE},
        sections={"gateway": {"lease_s": 60}},
    ) as stack:  # fmt: skip
        # As model clients do, a harness asks again while the proxy cannot record what it would answer.
        waits = f"while [ ! -e {gates.folder}/more ]; do sleep 0.05; done"
        again = f"{ask(1)}{waits}\nuntil {ask(1)}do sleep 0.1; done"
        stack.client.submit(gates.task("flight", 4))
        stack.client.submit(gates.task("talks", 2, first=again))
        gates.wait_started(*ids("flight", 4), *ids("talks", 2))
        wait_until(lambda: calls_recorded(stack) == 6, PATIENCE_S)
        group.wait_replicated()
        came: list[RolloutResult] = []
        streaming = threading.Thread(target=lambda: came.extend(stack.client.results(["flight", "talks"])), daemon=True)
        streaming.start()
        gates.open("flight.0")
        wait_until(lambda: len(came) == 1, PATIENCE_S)
        group.wait_replicated()

        group.primary.kill()
        gates.open("flight.1", "flight.2")
        wait_for_log(stack, "waiting for the ledger", times=2)
        submit_until_taken(stack, gates)
        group.wait_promoted()
        (gates.folder / "more").touch()
        gates.open("flight.3", *ids("talks", 2))
        streaming.join(PATIENCE_S)
        assert sorted(r.rollout_id for r in came) == sorted([*ids("flight", 4), *ids("talks", 2)])
        assert {r.outcome.state for r in came} == {S.COMPLETED}, [r.outcome for r in came]
        assert {r.attempt for r in came} == {1}
        found = {r.rollout_id: r.trajectory and r.trajectory.fidelity.calls for r in came}
        assert found == {**dict.fromkeys(ids("flight", 4), 1), **dict.fromkeys(ids("talks", 2), 2)}

        # Its queue moved too: what was submitted meanwhile runs, as much at once as the node may hold.
        gates.open(*ids("meanwhile", 8))
        result = stack.client.wait("meanwhile", PATIENCE_S)
        assert result.counts.completed == 8
        assert set(gates.starts().values()) == {1}
        assert stack.workers["node0"].exit_code is None
        assert "starting it again" not in stack.workers["node0"].log.read_text()


def calls_recorded(stack: LocalStack) -> int:
    return sum(stack.client.ledger.redis.llen(key) for key in stack.client.ledger.redis.scan_iter("*:completions:*"))


def submit_until_taken(stack: LocalStack, gates: Gates) -> None:
    """As a trainer does: again under the same id, for as long as it is told to."""
    told: list[str] = []

    def taken() -> bool:
        try:
            stack.client.submit(gates.task("meanwhile", 8))
        except (NotQueued, LedgerUnavailable) as exc:
            told.append(str(exc))
            return False
        return True

    wait_until(taken, PATIENCE_S)
    assert all("Sentinels at" in text or "does not answer" in text or "submit it again" in text for text in told), told
