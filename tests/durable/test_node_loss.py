"""Workers that are killed, by real signals, and what becomes of their rollouts and of what waited for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from polarq.celery import make_app
from polarq.contracts import Boundary, Outcome, RolloutState, RolloutSummary, Task, TaskResult
from polarq.contracts.event import Event
from polarq.ledger import Claim
from polarq.ledger.reaping import LOST_TOO_OFTEN, reaped_counts
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

S = RolloutState
NODES = ("node0", "node1")
WAIT_S = 150

# As short as a loaded machine lets it be. Where that makes a worker lose a lease for nothing, the rollout is run once
# more, which no test here forbids.
GATEWAY = {
    "lease_s": 4.0,
    "reap_interval_s": 0.5,
    "ring_again_s": 2.0,
    "heartbeat_interval_seconds": 1.0,
    "max_attempts": 50,
}
SMALL = {"max_init_workers": 1, "max_run_workers": 2, "max_postrun_workers": 1, "ready_buffer": 1}


def make_stack(home: Path, **gateway: Any) -> LocalStack:
    sections = {"gateway": {**GATEWAY, **gateway}}
    return LocalStack(home, scenario=str(write_scenario(home)), nodes=dict.fromkeys(NODES, SMALL), sections=sections)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with make_stack(tmp_path_factory.mktemp("loss")) as made:
        yield made


@pytest.fixture
def stack(shared: LocalStack) -> LocalStack:
    """Both nodes alive, whatever the test before did to them."""
    for node_id in NODES:
        if shared.workers[node_id].exit_code is not None:
            shared.start_worker(node_id)
    return shared


def kill_node(stack: LocalStack, node_id: str) -> None:
    """All of it at once, as when its host is gone."""
    worker = stack.workers[node_id]
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(20)


def owner_when(stack: LocalStack, rollout_id: str, state: RolloutState, *, but: str = "") -> str:
    """The node that has the rollout in that state, another one than `but`."""
    task_id, _, index = rollout_id.rpartition(".")
    found: list[str] = []

    def there() -> bool:
        rollout = stack.client.record(task_id).rollouts[int(index)]
        if rollout.state is state and rollout.owner is not None and rollout.owner != but:
            found.append(rollout.owner)
        return bool(found)

    wait_until(there, WAIT_S)
    return found[-1]


def ended(stack: LocalStack, task_id: str) -> TaskResult:
    return stack.client.wait(task_id, WAIT_S)


def events_of(stack: LocalStack, kind: str, **data: Any) -> list[Event]:
    events: list[Event] = []
    after = "0"
    while page := stack.client.ledger.do(stack.client.ledger.calls.events(after)):
        events += page
        after = page[-1].event_id
    return [e for e in events if e.type == kind and all(e.data.get(k) == v for k, v in data.items())]


def results_in_store(stack: LocalStack, task_id: str, index: int) -> set[str]:
    """Which attempts of a rollout have a result in the store."""
    stem = stack.client.ledger.calls.keys.task(task_id).removesuffix("task") + f"payload:{index}:"
    pattern = stem.replace("[", "\\[") + "*"
    found = stack.client.ledger.redis.scan_iter(match=pattern, count=1000)
    return {key.decode().removeprefix(stem).partition(":")[0] for key in found}


def test_a_rollout_of_a_killed_worker_is_run_by_another_and_has_one_visible_result(
    stack: LocalStack, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    stack.client.submit(shell_task("killed", f"{ask(1)}\nwhile [ ! -e {gate} ]; do sleep 0.05; done"))
    first = owner_when(stack, "killed.0", S.RUNNING)
    stack.workers[first].kill()
    second = owner_when(stack, "killed.0", S.RUNNING, but=first)
    gate.touch()
    result = ended(stack, "killed")
    assert (result.counts.completed, len(result.results)) == (1, 1), result.results[0].outcome
    rollout = result.results[0]
    assert (rollout.node_id, rollout.outcome.state) == (second, S.COMPLETED)
    assert rollout.attempt >= 2
    assert rollout.trajectory is not None
    assert rollout.trajectory.fidelity.calls == 1, "the lost attempt's calls are not in it"
    assert len(results_in_store(stack, "killed", 0)) == 1
    reaped = events_of(stack, "session.reaped", session_id="killed.0", node_id=first, status="queued")
    assert reaped
    assert len(events_of(stack, "session.state_changed", session_id="killed.0", status="completed")) == 1
    wait_until(lambda: bool(events_of(stack, "node.lost", node_id=first)), WAIT_S)
    assert stack.client.ledger.do(reaped_counts(stack.client.ledger.calls))["queued"] >= 1


def test_a_worker_killed_while_a_burst_arrives_costs_no_rollout(stack: LocalStack) -> None:
    after = stack.client.ledger.do(stack.client.ledger.calls.last_event_id())
    stack.client.submit({**shell_task("burst", "true"), "num_samples": 30})
    for event in stack.client.follow("burst", after=after):
        if event.data.get("status") == "preparing":
            kill_node(stack, str(event.data["node_id"]))
            break
    result = ended(stack, "burst")
    assert (result.counts.completed, result.counts.ended) == (30, 30)
    for rollout in result.results:
        # One that was killed between writing its result and committing it leaves that behind, until it expires.
        newest = max(results_in_store(stack, "burst", rollout.index), key=lambda name: int(name.partition("-")[0]))
        assert newest.startswith(f"{rollout.attempt}-")
    ends = [
        e.data["session_id"] for e in events_of(stack, "session.state_changed", task_id="burst", status="completed")
    ]
    assert sorted(ends) == sorted(f"burst.{i}" for i in range(30))


def test_the_backlog_of_a_node_that_is_gone_is_run_by_the_others(stack: LocalStack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stack.client.submit({**shell_task("backlog", f"while [ ! -e {gate} ]; do sleep 0.05; done"), "num_samples": 24})
    wait_until(lambda: stack.client.record("backlog").counts.running == 10, WAIT_S)
    kill_node(stack, "node0")
    gate.touch()
    assert ended(stack, "backlog").counts.completed == 24
    redis, lists = stack.client.ledger.redis, stack.client.ledger.calls.keys.queue_lists("node0")
    wait_until(lambda: not redis.exists(*lists), WAIT_S)


def test_the_backlog_of_a_node_that_leaves_in_order_is_run_by_the_others(stack: LocalStack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stack.client.submit({**shell_task("leaving", f"while [ ! -e {gate} ]; do sleep 0.05; done"), "num_samples": 24})
    wait_until(lambda: stack.client.record("leaving").counts.running == 10, WAIT_S)
    stack.workers["node0"].signal(signal.SIGTERM)
    wait_until(lambda: bool(events_of(stack, "node.draining", node_id="node0")), WAIT_S)
    gate.touch()
    assert stack.workers["node0"].wait(WAIT_S) == 0
    assert not stack.client.ledger.redis.exists(*stack.client.ledger.calls.keys.queue_lists("node0"))
    assert ended(stack, "leaving").counts.completed == 24


def test_a_node_that_is_told_to_stop_gets_nothing_new(stack: LocalStack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pin = {"policy": "pinned", "node_id": "node0"}
    stack.client.submit(shell_task("last", f"while [ ! -e {gate} ]; do sleep 0.05; done", placement=pin))
    owner_when(stack, "last.0", S.RUNNING)
    stack.workers["node0"].signal(signal.SIGTERM)
    wait_until(lambda: any(node.stopping for node in stack.client.nodes()), WAIT_S)
    stack.client.submit({**shell_task("others", "true"), "num_samples": 12})
    result = ended(stack, "others")
    assert {rollout.node_id for rollout in result.results} == {"node1"}
    assert stack.workers["node0"].exit_code is None, "it still runs what it has"
    gate.touch()
    assert stack.workers["node0"].wait(WAIT_S) == 0
    assert ended(stack, "last").counts.completed == 1


def test_messages_that_got_lost_are_sent_again(stack: LocalStack) -> None:
    client = stack.client
    for node_id in NODES:
        client.drain(node_id)
    wait_until(lambda: all(node.draining for node in client.nodes()))
    client.submit({**shell_task("lost-messages", "true"), "num_samples": 5})
    for node_id in NODES:
        client.ledger.redis.delete(*client.ledger.calls.keys.queue_lists(node_id))
    for node_id in NODES:
        client.drain(node_id, on=False)
    assert ended(stack, "lost-messages").counts.completed == 5


def test_what_is_pinned_to_a_node_that_is_gone_waits_for_it(stack: LocalStack) -> None:
    kill_node(stack, "node0")
    stack.client.submit(shell_task("pinned", "true", placement={"policy": "pinned", "node_id": "node0"}))
    stack.client.submit(shell_task("free", "true"))
    assert ended(stack, "free").counts.completed == 1
    assert stack.client.record("pinned").rollouts[0].state is S.QUEUED
    stack.start_worker("node0")
    assert ended(stack, "pinned").results[0].node_id == "node0"


def test_an_end_of_which_nobody_told_reaches_the_celery_client(stack: LocalStack) -> None:
    """As when the worker that commits a task's last rollout is killed right after the commit."""
    ledger = stack.client.ledger
    calls = ledger.calls
    task = Task.load(shell_task("untold", "true"))
    ledger.do(calls.submit(task, "celery-untold"))
    claim = ledger.do(calls.claim("untold.0", "node9", 600, "job"))
    assert isinstance(claim, Claim)
    summary = RolloutSummary(outcome=Outcome(state=S.COMPLETED))
    assert ledger.do(calls.commit("untold.0", claim.token, summary)).finished
    ledger.redis.zadd(calls.keys.untold, {"untold": 1})
    app = make_app(stack.topology, stack.settings)
    value = app.AsyncResult("celery-untold").get(timeout=WAIT_S)
    assert (value["task_id"], value["counts"]["completed"]) == ("untold", 1)
    wait_until(lambda: ledger.redis.zscore(calls.keys.untold, "untold") is None, WAIT_S)


class Receiver(BaseHTTPRequestHandler):
    """A trainer's server: takes every callback."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.taken = []  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_a_callback_whose_deliverer_was_killed_is_delivered_by_another(
    stack: LocalStack, receiver: ThreadingHTTPServer
) -> None:
    ledger = stack.client.ledger
    calls, keys = ledger.calls, ledger.calls.keys
    url = f"http://127.0.0.1:{receiver.server_port}/done"
    ledger.do(calls.submit(Task.load(shell_task("called", "true", callback_url=url)), "celery-called"))
    claim = ledger.do(calls.claim("called.0", "node9", 600, "job"))
    assert isinstance(claim, Claim)
    ledger.redis.set(keys.callback_claim("called"), "the one that was killed")
    assert ledger.do(calls.commit("called.0", claim.token, RolloutSummary(outcome=Outcome(state=S.COMPLETED)))).won
    ledger.redis.zadd(keys.untold, {"called": 1})
    wait_until(lambda: ledger.redis.hget(keys.task("called"), "told") == b"1", WAIT_S)
    assert receiver.taken == []  # type: ignore[attr-defined]
    # Its claim runs out; and now is when the task is looked at again.
    ledger.redis.delete(keys.callback_claim("called"))
    ledger.redis.zadd(keys.untold, {"called": 1})
    wait_until(lambda: ledger.redis.zscore(keys.untold, "called") is None, WAIT_S)
    assert receiver.taken == ["/done"]  # type: ignore[attr-defined]


def test_a_rollout_that_takes_its_worker_along_every_time_fails_with_that_history(tmp_path: Path) -> None:
    with make_stack(tmp_path, max_attempts=2) as own:
        own.client.submit(shell_task("poison", f"{ask(1)}\nsleep 3000"))
        first = owner_when(own, "poison.0", S.RUNNING)
        kill_node(own, first)
        second = owner_when(own, "poison.0", S.RUNNING, but=first)
        own.start_worker(first)
        kill_node(own, second)
        result = ended(own, "poison")
        outcome = result.results[0].outcome
        assert (outcome.state, outcome.boundary, outcome.reason) == (S.FAILED, Boundary.NODE, LOST_TOO_OFTEN)
        assert result.results[0].reward is None
        assert not outcome.trainable
        assert f"attempt 1 on {first} while running" in outcome.message
        assert f"attempt 2 on {second} while running" in outcome.message
        assert "\n" not in outcome.message
