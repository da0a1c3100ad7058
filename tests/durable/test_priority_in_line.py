"""Priority through every door, real workers included: higher first, within one first come first served, no starving."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from polarq.celery import make_app
from polarq.contracts import RolloutState
from polarq.testing.ports import free_port
from polarq.testing.program import Program
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates
from tests.worker.conftest import wait_until, write_scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

S = RolloutState
ONE_AT_A_TIME = {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1, "ready_buffer": 0}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home = tmp_path_factory.mktemp("line")
    with LocalStack(home, scenario=str(write_scenario(home)), nodes={"node0": ONE_AT_A_TIME}) as made:
        yield made


@pytest.fixture(scope="module")
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "polarq.cli", "serve", "--host", "127.0.0.1", "--port", str(port)]
    shim = Program("shim", command, stack.home / "logs" / "shim.log", stack.env).start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            wait_until(lambda: answers(client), PATIENCE_S)
            yield client
    finally:
        shim.stop()


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


class Doors:
    """The three ways in. Each returns when the task is recorded, so that who came first is known."""

    def __init__(self, stack: LocalStack, http: httpx.Client) -> None:
        self.stack = stack
        self.http = http
        ours = make_app(stack.topology, stack.settings).conf
        self.foreign = Celery("foreign", set_as_current=False)
        for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
            self.foreign.conf[key] = ours[key]

    def by_http(self, task: dict[str, Any]) -> None:
        assert self.http.post("/rollout/task/submit", json=task).status_code == 200

    def by_delay(self, task: dict[str, Any]) -> None:
        code = "import json, sys; from polarq import submit_rollout; submit_rollout.delay(json.loads(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, json.dumps(task)], env=self.stack.env, check=True)

    def by_foreign(self, task: dict[str, Any]) -> None:
        """With Celery's own `priority` at what other brokers call the most urgent."""
        self.foreign.send_task("polarq.submit_rollout", [task], queue="polarq", priority=9)
        wait_until(lambda: self.stack.client.ledger.redis.exists(self.key(task)) == 1, PATIENCE_S)

    def key(self, task: dict[str, Any]) -> str:
        return self.stack.client.ledger.calls.keys.task(task["task_id"])


def task(gates: Gates, name: str, priority: int | None, **more: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if priority is None else {"dispatch_priority": priority}
    return gates.task(name, **chosen, **more)


def order_of(gates: Gates) -> list[str]:
    """Tasks as their harnesses were started."""
    return [rollout_id.removesuffix(".0") for rollout_id in gates.log.read_text().split()]


def begun(stack: LocalStack, after: str) -> list[str]:
    """Tasks as their rollouts were claimed."""
    events = []
    while page := stack.client.ledger.do(stack.client.ledger.calls.events(after)):
        events += page
        after = page[-1].event_id
    return [event.data["task_id"] for event in events if event.data.get("status") == "preparing"]


def hold_back(stack: LocalStack) -> None:
    """Returns when the node has heard that it takes nothing."""
    ledger = stack.client.ledger
    after = ledger.do(ledger.calls.last_event_id())
    stack.client.pause_node("node0")
    wait_until(lambda: any(e.type == "node.paused" for e in ledger.do(ledger.calls.events(after))), PATIENCE_S)


def test_whatever_the_door_higher_priorities_start_first_and_celerys_own_is_not_turned_around(
    stack: LocalStack, http: httpx.Client, gates: Gates
) -> None:
    doors = Doors(stack, http)
    hold_back(stack)
    ways = [doors.by_http, doors.by_delay, doors.by_foreign]
    mixed: list[int | None] = [0, 50, 100, None, 100, None, 50, 0, None, 0, 100, 50]
    sent: dict[int, list[str]] = {0: [], 50: [], 100: []}
    for n, priority in enumerate(mixed):
        name = f"mixed-{n:02d}"
        ways[n % 3](task(gates, name, priority))
        sent[priority or 0].append(name)
        gates.open(f"{name}.0")
    after = stack.client.ledger.do(stack.client.ledger.calls.last_event_id())
    stack.client.resume_node("node0")
    for names in sent.values():
        for name in names:
            assert stack.client.wait(name, PATIENCE_S).counts.completed == 1
    # The few that a node holds at once run side by side; which was given a place first is the ledger's.
    assert begun(stack, after) == sent[100] + sent[50] + sent[0]


def test_an_urgent_one_that_comes_late_is_next_and_stops_nothing(
    stack: LocalStack, http: httpx.Client, gates: Gates
) -> None:
    doors = Doors(stack, http)
    stack.client.set_capacity("node0", 5)
    wait_until(lambda: any(n.max_run_workers == 5 for n in stack.client.nodes()), PATIENCE_S)
    bulk = [f"bulk-{n:02d}" for n in range(14)]
    for name in bulk:
        stack.client.submit(task(gates, name, 0))
    wait_until(lambda: len(order_of(gates)) == 5, PATIENCE_S)
    running = order_of(gates)
    waits_until_the_line_stands_still(stack, bulk)
    queued = [name for name in bulk if stack.client.record(name).rollouts[0].state is S.QUEUED]
    assert len(queued) >= 3
    doors.by_foreign(task(gates, "urgent", 100))
    gates.open("urgent.0", *(f"{name}.0" for name in bulk if name not in running[1:]))
    wait_until(lambda: len(order_of(gates)) == len(bulk) + 1, PATIENCE_S)
    order = order_of(gates)
    assert all(order.index("urgent") < order.index(name) for name in queued)
    for name in running[1:]:
        rollout = stack.client.record(name).rollouts[0]
        assert (rollout.state, rollout.attempt) == (S.RUNNING, 1), "it goes on"
        gates.open(f"{name}.0")
    for name in [*bulk, "urgent"]:
        assert stack.client.wait(name, PATIENCE_S).counts.completed == 1
    stack.client.set_capacity("node0", None)


def waits_until_the_line_stands_still(stack: LocalStack, names: list[str]) -> None:
    """Returns when the node has taken all that it may hold at once."""
    node = next(n for n in stack.client.nodes() if n.node_id == "node0")
    wait_until(
        lambda: sum(stack.client.record(name).rollouts[0].state is not S.QUEUED for name in names) >= node.places,
        PATIENCE_S,
    )


def test_one_that_waited_long_enough_starts_though_urgent_ones_keep_coming(tmp_path: Path, gates: Gates) -> None:
    with LocalStack(
        tmp_path,
        scenario=str(write_scenario(tmp_path)),
        nodes={"node0": ONE_AT_A_TIME},
        # A hundred steps of priority are worth two seconds of waiting.
        sections={"limits": {"priority_head_start_s": 0.02}},
    ) as stack:
        full = [f"full-{n}" for n in range(3)]
        for name in full:
            stack.client.submit(gates.task(name))
        waits_until_the_line_stands_still(stack, full)
        stack.client.submit(gates.task("patient", dispatch_priority=0))
        stack.client.submit(gates.task("urgent-000", dispatch_priority=100))
        gates.open(*(f"{name}.0" for name in [*full, "urgent-000"]))
        urgent = 1
        deadline = time.monotonic() + PATIENCE_S
        while "patient" not in order_of(gates):
            assert time.monotonic() < deadline, order_of(gates)
            # There is always one of these in line.
            name = f"urgent-{urgent:03d}"
            gates.open(f"{name}.0")
            stack.client.submit(gates.task(name, dispatch_priority=100))
            urgent += 1
            begun = len(order_of(gates))
            wait_until(lambda begun=begun: len(order_of(gates)) > begun, PATIENCE_S)  # type: ignore[misc]
        gates.open("patient.0")
        assert stack.client.wait("patient", PATIENCE_S).counts.completed == 1
        assert order_of(gates).index("urgent-000") < order_of(gates).index("patient")
