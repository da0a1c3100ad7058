"""What foreign clients submit is recorded at once, whether or not the node that hears it has a place for a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from polarq.celery import make_app
from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NODE = {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1, "ready_buffer": 0}
PLACES = 3
MANY = 30


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), nodes={"node0": NODE}) as made:
        yield made


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def foreign_submit(stack: LocalStack) -> Callable[[dict[str, Any]], Any]:
    foreign = Celery("foreign", set_as_current=False)
    ours = make_app(stack.topology, stack.settings).conf
    for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
        foreign.conf[key] = ours[key]
    return lambda task: foreign.send_task("polarq.submit_rollout", [task], queue="polarq")


def recorded(stack: LocalStack, task_ids: list[str]) -> bool:
    keys, redis = stack.client.ledger.calls.keys, stack.client.ledger.redis
    return all(redis.exists(keys.task(task_id)) for task_id in task_ids)


def test_a_node_without_a_free_place_still_records_what_is_submitted_by_message(
    stack: LocalStack, gates: Gates
) -> None:
    full = ids("full", PLACES + 1)
    stack.client.submit(gates.task("full", PLACES + 1))
    states: Callable[[], list[RolloutState]] = lambda: [r.state for r in stack.client.record("full").rollouts]  # noqa: E731
    wait_until(lambda: states().count(RolloutState.QUEUED) == 1, PATIENCE_S)
    submit, names = foreign_submit(stack), [f"foreign-{n:02d}" for n in range(MANY)]
    pending = [submit(gates.task(name, dispatch_priority=100 if name == names[-1] else 0)) for name in names]
    wait_until(lambda: recorded(stack, names), PATIENCE_S)
    assert states().count(RolloutState.QUEUED) == 1, "nothing has made room meanwhile"
    gates.open(*full, *(f"{name}.0" for name in names))
    assert [p.get(timeout=PATIENCE_S)["state"] for p in pending] == ["completed"] * MANY
    order = [rollout_id.partition(".")[0] for rollout_id in gates.log.read_text().split()]
    first = next(name for name in order if name != "full")
    assert first == names[-1], "the most urgent one, though it came last"


def test_a_paused_node_still_records_what_is_submitted_by_message(stack: LocalStack, gates: Gates) -> None:
    ledger = stack.client.ledger
    after = ledger.do(ledger.calls.last_event_id())
    stack.client.pause_node("node0")
    wait_until(lambda: any(e.type == "node.paused" for e in ledger.do(ledger.calls.events(after))), PATIENCE_S)
    names = [f"foreign-{n}" for n in range(3)]
    pending = [foreign_submit(stack)(gates.task(name)) for name in names]
    wait_until(lambda: recorded(stack, names), PATIENCE_S)
    assert gates.starts() == {}
    stack.client.resume_node("node0")
    gates.open(*(f"{name}.0" for name in names))
    assert [p.get(timeout=PATIENCE_S)["state"] for p in pending] == ["completed"] * 3
