"""Sandboxes that outlive their worker are stopped by whoever can, through their plug-in and their record."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import RolloutState, Task
from polarq.contracts.node import NodeRecord
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.ledger.reaping import reap_nodes, reaped_counts
from polarq.ledger.sandboxes import note_sandbox, sandboxes_of
from polarq.testing.stack import LocalStack
from polarq_worker.orphans import Orphans
from tests.durable import boxes
from tests.durable.evaluated import REPOSITORY
from tests.durable.gates import PATIENCE_S, Gates
from tests.http.rig import a_task, topology_for
from tests.worker.conftest import wait_until, write_scenario

S = RolloutState


def make_stack(home: Path, *nodes: str, **gateway: Any) -> LocalStack:
    return LocalStack(
        home,
        scenario=str(write_scenario(home)),
        nodes={node_id: {} for node_id in nodes},
        sections={"gateway": gateway, "security": {"allowed_modules": ["tests.durable.boxes"]}},
        env={"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
    )


def boxed(folder: Path, kind: str) -> dict[str, Any]:
    """What of a task makes it run in one."""
    folder.mkdir(exist_ok=True)
    return {"runtime": {"import_path": f"tests.durable.boxes:{kind}", "env": {"BOXES": str(folder)}}}


def records(stack: LocalStack, *node_ids: str) -> list[SandboxRecord]:
    ledger = stack.client.ledger
    return ledger.do(sandboxes_of(ledger.calls.keys, node_ids))


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    made = Gates(tmp_path / "gates")
    yield made
    for handle in (tmp_path / "boxes").glob("*"):
        boxes.end(handle)


def test_a_sandbox_that_outlived_its_worker_is_stopped_when_its_node_starts_again(tmp_path: Path, gates: Gates) -> None:
    with make_stack(tmp_path, "node0", lease_s=3600.0) as stack:
        stack.client.submit(gates.task("t", **boxed(tmp_path / "boxes", "Box")))
        gates.wait_started("t.0")
        (record,) = records(stack, "node0")
        handle = Path(record.handle)
        assert (record.runtime, record.rollout_id, record.attempt) == ("tests.durable.boxes:Box", "t.0", 1)
        stack.workers["node0"].kill()
        assert boxes.alive(handle), "or this test shows nothing"
        stack.start_worker()
        wait_until(lambda: not boxes.alive(handle), PATIENCE_S)
        wait_until(lambda: gates.starts()["t.0"] == 2, PATIENCE_S)
        (second,) = records(stack, "node0")
        assert boxes.alive(Path(second.handle)), "the next attempt's is another one"
        gates.open("t.0")
        assert stack.client.wait("t", PATIENCE_S).counts.completed == 1
        assert not boxes.alive(Path(second.handle))
        wait_until(lambda: records(stack, "node0") == [], PATIENCE_S)


def test_a_remote_sandbox_of_a_node_that_is_gone_is_stopped_by_another_nodes_reaper(
    tmp_path: Path, gates: Gates
) -> None:
    times = {"lease_s": 4.0, "reap_interval_s": 0.5, "heartbeat_interval_seconds": 1.0, "max_attempts": 50}
    with make_stack(tmp_path, "node0", "node1", **times) as stack:
        stack.client.submit(gates.task("t", **boxed(tmp_path / "boxes", "RemoteBox")))
        gates.wait_started("t.0")
        (first,) = records(stack, "node0", "node1")
        stack.workers[first.node_id].signal(signal.SIGKILL)
        wait_until(lambda: not boxes.alive(Path(first.handle)), PATIENCE_S)
        wait_until(lambda: records(stack, first.node_id) == [], PATIENCE_S)
        gates.open("t.0")
        assert stack.client.wait("t", PATIENCE_S).counts.completed == 1
        calls = stack.client.ledger.calls
        wait_until(lambda: stack.client.ledger.do(reaped_counts(calls)).get("sandboxes_stopped") == 1, PATIENCE_S)


async def test_what_another_may_still_use_or_nobody_here_can_stop_is_let_alone(
    redis_url: str, keys: Keys, tmp_path: Path
) -> None:
    async with AsyncLedger(redis_url, Calls(keys)) as ledger:
        await ledger.do(ledger.calls.submit(Task.load(a_task("t", 2)), "t"))
        claims = [await ledger.do(ledger.calls.claim(f"t.{n}", "node0", 600, "job")) for n in range(2)]
        names = ("held", "over", "mine", "dead", "elsewhere", "unknown")
        for name in names:
            held = claims[1 if name == "over" else 0]
            assert isinstance(held, Claim)
            record = SandboxRecord(
                runtime="tests.nowhere:Box" if name == "unknown" else "tests.durable.boxes:Box",
                runtime_id=name,
                handle=str(tmp_path / name),
                reach=Reach.NODE,
                node_id="node0",
                incarnation=name,
                hostname="another" if name == "elsewhere" else os.uname().nodename,
                rollout_id=held.rollout_id,
                attempt=1,
                token=held.token - (name in {"elsewhere", "unknown"}),
            )
            await ledger.do(note_sandbox(keys, record))
        assert isinstance(claims[1], Claim)
        await ledger.do(ledger.calls.release("t.1", claims[1].token, counted=False, reason="drain"))
        orphans = Orphans(ledger, topology_for(keys, security={"allowed_modules": ["tests.durable.boxes"]}))
        assert await orphans.stop_own("node0", "mine", {"dead"}) == ["dead", "over"]
        left = await ledger.do(sandboxes_of(keys, ["node0"]))
        assert {record.runtime_id for record in left} == {"held", "mine", "elsewhere", "unknown"}
        assert await orphans.stop_of_nodes_gone(["node0"]) == [], "only a worker on that machine can"
        # The node never comes back: its records go with its own, which is said.
        await ledger.do(ledger.calls.announce(NodeRecord(node_id="node0"), 600))
        await ledger.redis.delete(keys.node_alive("node0"))
        await ledger.do(reap_nodes(ledger.calls, 600))
        assert await ledger.do(sandboxes_of(keys, ["node0"]))
        await ledger.redis.zadd(keys.nodes_lost, {"node0": 1})
        await ledger.do(reap_nodes(ledger.calls, 600))
        assert await ledger.do(sandboxes_of(keys, ["node0"])) == []
        told = [e.data for e in await ledger.do(ledger.calls.events("0")) if e.type == "node.sandboxes_abandoned"]
        assert [sorted(data["runtime_ids"]) for data in told] == [["elsewhere", "held", "mine", "unknown"]]
