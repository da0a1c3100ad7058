"""Pause, resume, capacity and drain of nodes and runs, against real workers: the ledger says it, the workers do it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.cli.main import main
from polarq.client import AsyncClient, Client
from polarq.contracts import RolloutState
from polarq.errors import InvalidInput, NodeNotFound
from polarq.ledger import Keys
from polarq.testing.stack import LocalStack
from tests.http.rig import a_task, running_shim
from tests.worker.conftest import shell_task, wait_until, write_scenario

S = RolloutState

NARROW = {"max_init_workers": 1, "max_run_workers": 1, "max_postrun_workers": 1, "ready_buffer": 0}


@pytest.fixture(scope="module")
def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("control")
    nodes: dict[str, dict[str, Any]] = {"node0": NARROW, "node1": NARROW}
    with LocalStack(home, scenario=str(write_scenario(home)), nodes=nodes) as made:
        yield made


@pytest.fixture
def stack(whole_stack: LocalStack) -> Iterator[LocalStack]:
    """As after the start, whatever a test did."""
    yield whole_stack
    client = whole_stack.client
    for node_id in ("node0", "node1"):
        client.drain(node_id, on=False)
        client.resume_node(node_id)
        client.set_capacity(node_id, None)
    for run in client.runs():
        client.resume_run(run.run_id)


def at_gate(gate: Path) -> str:
    """A harness that ends when the gate is there."""
    return f"while [ ! -e {gate} ]; do sleep 0.05; done"


def running(client: Client, *task_ids: str) -> list[str | None]:
    """Nodes of the rollouts whose harness runs."""
    return [r.owner for i in task_ids for r in client.record(i).rollouts if r.state is S.RUNNING]


def pinned(node_id: str) -> dict[str, Any]:
    return {"placement": {"policy": "pinned", "node_id": node_id}}


def run_workers(client: Client, node_id: str) -> int:
    """As the node itself last said."""
    return next(node.max_run_workers for node in client.nodes() if node.node_id == node_id)


def test_nothing_of_a_paused_run_starts_and_all_of_it_does_once_it_is_resumed(stack: LocalStack) -> None:
    client = stack.client
    assert client.pause_run("training").paused
    client.submit(shell_task("paused-run", "true", num_samples=4, run_id="training"))
    client.submit(shell_task("other-run", "true", run_id="other"))
    assert client.wait("other-run", 60).counts.completed == 1, "the other run's rollouts pass it by"
    assert client.record("paused-run").counts.queued == 4
    assert client.waiting_for("paused-run") == "run 'training' to be resumed"
    runs = {run.run_id: (run.paused, run.waiting, run.active) for run in client.runs()}
    assert runs == {"other": (False, 0, False), "training": (True, 4, True)}
    assert not client.resume_run("training").paused
    assert client.wait("paused-run", 60).counts.completed == 4
    assert not any(run.active or run.paused for run in client.runs())


def test_pausing_a_run_leaves_what_runs_alone(stack: LocalStack, tmp_path: Path) -> None:
    client, gate = stack.client, tmp_path / "gate"
    client.submit(shell_task("goes-on", at_gate(gate), run_id="halfway"))
    wait_until(lambda: len(running(client, "goes-on")) == 1)
    client.pause_run("halfway")
    gate.touch()
    assert client.wait("goes-on", 60).counts.completed == 1


def test_an_idle_node_takes_what_waits_for_a_busy_one(stack: LocalStack, tmp_path: Path) -> None:
    client, gate = stack.client, tmp_path / "gate"
    client.pause_node("node1")
    tasks = [f"busy-{n}" for n in range(6)]
    for task_id in tasks:
        client.submit(shell_task(task_id, at_gate(gate)))
    wait_until(lambda: running(client, *tasks) == ["node0"])
    client.resume_node("node1")
    wait_until(lambda: sorted(map(str, running(client, *tasks))) == ["node0", "node1"])
    gate.touch()
    results = [client.wait(task_id, 60).results[0] for task_id in tasks]
    assert {r.outcome.state for r in results} == {S.COMPLETED}
    assert {r.attempt for r in results} == {1}


def test_what_is_shuffled_between_nodes_starts_once_each(stack: LocalStack, tmp_path: Path) -> None:
    client, started = stack.client, tmp_path / "started"
    tasks = [f"shuffled-{n}" for n in range(5)]
    for task_id in tasks:
        log = f"echo {task_id} >> {started}"
        client.submit(shell_task(task_id, log, num_samples=6, run_id=f"run-{task_id}"))
        client.pause_node("node0")
        client.resume_node("node0")
        client.pause_node("node1")
        client.resume_node("node1")
    results = [r for task_id in tasks for r in client.wait(task_id, 120).results]
    assert {r.outcome.state for r in results} == {S.COMPLETED}
    assert {r.attempt for r in results} == {1}
    assert len(started.read_text().splitlines()) == 30


def test_a_larger_capacity_starts_more_at_once_and_a_smaller_one_interrupts_nothing(
    stack: LocalStack, tmp_path: Path
) -> None:
    client, gate = stack.client, tmp_path / "gate"
    client.submit(shell_task("resized", at_gate(gate), num_samples=6, **pinned("node0")))
    wait_until(lambda: len(running(client, "resized")) == 1)
    assert client.set_capacity("node0", 4).max_run_workers == 4
    wait_until(lambda: len(running(client, "resized")) == 4)
    wait_until(lambda: run_workers(client, "node0") == 4)
    client.set_capacity("node0", None)
    wait_until(lambda: run_workers(client, "node0") == 1)
    assert len(running(client, "resized")) == 4
    gate.touch()
    assert client.wait("resized", 60).counts.completed == 6


def test_what_a_draining_node_has_not_ended_by_the_deadline_goes_to_another_one(
    stack: LocalStack, tmp_path: Path
) -> None:
    client, gate = stack.client, tmp_path / "gate"
    client.pause_node("node1")
    client.submit(shell_task("drained", at_gate(gate)))
    wait_until(lambda: running(client, "drained") == ["node0"])
    client.resume_node("node1")
    client.drain("node0", deadline_s=0.5)
    wait_until(lambda: running(client, "drained") == ["node1"])
    gate.touch()
    result = client.wait("drained", 60).results[0]
    assert (result.outcome.state, result.node_id, result.attempt) == (S.COMPLETED, "node1", 1)


def test_a_drain_without_a_deadline_lets_everything_end_where_it_is(stack: LocalStack, tmp_path: Path) -> None:
    client, gate = stack.client, tmp_path / "gate"
    client.submit(shell_task("unhurried", at_gate(gate), **pinned("node0")))
    wait_until(lambda: running(client, "unhurried") == ["node0"])
    client.drain("node0")
    gate.touch()
    assert client.wait("unhurried", 60).results[0].node_id == "node0"


def test_after_a_pause_rollouts_start_by_priority_and_within_one_in_order(stack: LocalStack, tmp_path: Path) -> None:
    client, started = stack.client, tmp_path / "started"
    for node_id in ("node0", "node1"):
        client.pause_node(node_id)
    wanted: dict[int, list[str]] = {100: [], 50: [], 0: []}
    for number, priority in enumerate([0, 50, 100, 50, 0, 100, 100, 0, 50]):
        task_id = f"order-{number}"
        wanted[priority].append(task_id)
        log = f"echo {task_id} >> {started}"
        client.submit(shell_task(task_id, log, dispatch_priority=priority, **pinned("node0")))
    client.resume_node("node0")
    for task_ids in wanted.values():
        for task_id in task_ids:
            client.wait(task_id, 60)
    assert started.read_text().split() == [*wanted[100], *wanted[50], *wanted[0]]


def test_an_unknown_node_and_an_impossible_number_are_refused(stack: LocalStack) -> None:
    with pytest.raises(NodeNotFound):
        stack.client.pause_node("nowhere")
    with pytest.raises(InvalidInput, match="from 1 to"):
        stack.client.set_capacity("node0", 0)


async def test_the_async_client_has_the_same_words(stack: LocalStack) -> None:
    async with AsyncClient(stack.topology, stack.settings) as client:
        assert (await client.pause_node("node1")).paused
        assert not (await client.resume_node("node1")).paused
        assert (await client.set_capacity("node1", 2)).max_run_workers == 2
        assert (await client.drain("node1", deadline_s=60)).draining
        assert not (await client.drain("node1", on=False)).draining
        assert (await client.pause_run("r")).paused
        assert [run.run_id for run in await client.runs() if run.paused] == ["r"]
        assert not (await client.resume_run("r")).paused


async def test_over_http(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys) as shim:
        await shim.announce("node0")
        http = shim.http
        assert (await http.post("/nodes/node0/pause")).json()["node"]["paused"] is True
        assert (await http.get("/nodes/node0")).json()["node"]["paused"] is True
        assert (await http.post("/nodes/node0/resume")).json()["node"]["paused"] is False
        assert (await http.post("/nodes/node0/capacity?run_workers=7")).json()["max_run_workers"] == 7
        assert (await http.post("/nodes/node0/capacity?run_workers=0")).status_code == 422
        assert (await http.delete("/nodes/node0?deadline_seconds=30")).json()["draining"] is True
        assert (await http.post("/nodes/nowhere/pause")).status_code == 404
        await shim.submit(a_task("t", 2, run_id="r"))
        await shim.claim("t.0")
        row = {"run_id": "r", "paused": False, "waiting": 1, "in_flight": 1}
        assert (await http.get("/runs")).json() == {"runs": [row]}
        assert (await http.post("/runs/r/pause")).json() == {**row, "paused": True}
        assert (await http.post("/runs/r/resume")).json() == row
        assert (await http.post("/runs/a%20b/pause")).status_code == 422


def test_on_the_command_line(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in stack.env.items():
        monkeypatch.setenv(name, value)

    def polarq(*arguments: str) -> Any:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert polarq("pause", "node1")["paused"] is True
    assert polarq("resume", "node1")["paused"] is False
    assert polarq("capacity", "node1", "3")["max_run_workers"] == 3
    assert polarq("drain", "node1", "--deadline", "60")["draining"] is True
    assert polarq("drain", "node1", "--undo")["draining"] is False
    assert polarq("pause", "--run", "r")["paused"] is True
    assert {"run_id": "r", "paused": True, "waiting": 0, "in_flight": 0} in polarq("runs")
    assert polarq("resume", "--run", "r")["paused"] is False
    assert main(["pause"]) == 2
    assert "name a node, or a run with --run" in capsys.readouterr().err
