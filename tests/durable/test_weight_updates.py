"""A pause of model calls over nodes that die and join, with real workers and their proxies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.client import AsyncClient
from polarq.client.pausing import NodeInference
from polarq.contracts import RolloutState
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task, write_scenario

PATIENCE_S = 90.0


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    nodes: dict[str, dict[str, Any]] = {"node0": {}, "node1": {}}
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), nodes=nodes) as made:
        yield made


async def share(client: AsyncClient, node_id: str) -> NodeInference:
    return next(node for node in (await client.inference_state()).nodes if node.node_id == node_id)


async def test_a_dead_node_does_not_block_a_pause_one_that_joins_keeps_it_and_a_dead_trainers_pause_ends(
    stack: LocalStack,
) -> None:
    async with AsyncClient(stack.topology, stack.settings) as client:
        stack.workers["node1"].kill()
        state = await client.pause_inference(timeout_s=PATIENCE_S)
        assert state.drained
        assert not (await share(client, "node1")).counted

        await asyncio.to_thread(stack.start_worker, "node1")
        state = await client.inference_state()
        assert state.drained
        assert [(node.node_id, node.alive, node.paused) for node in state.nodes if node.counted] == [
            ("node0", True, True),
            ("node1", True, True),
        ]
        pinned = {"placement": {"policy": "pinned", "node_id": "node1"}}
        await client.submit(shell_task("held", ask(1), **pinned))
        async with asyncio.timeout(PATIENCE_S):
            while (await share(client, "node1")).waiting < 1:  # noqa: ASYNC110 - asked of Redis
                await asyncio.sleep(0.05)
        assert (await client.inference_state()).in_flight == 0

        # The trainer prolongs its pause once more and is never heard of again.
        assert (await client.pause_inference(timeout_s=PATIENCE_S, lease_s=2)).drained
        [result] = (await client.wait("held", PATIENCE_S)).results
        assert result.outcome.state is RolloutState.COMPLETED
        assert result.trajectory is not None
        assert result.trajectory.fidelity.calls == 1
        assert not (await client.inference_state()).paused


async def test_a_run_is_paused_by_itself_while_another_goes_on(stack: LocalStack) -> None:
    async with AsyncClient(stack.topology, stack.settings) as client:
        assert (await client.pause_inference(run_id="r", timeout_s=PATIENCE_S)).drained
        await client.submit(shell_task("held", ask(1), run_id="r"))
        await client.submit(shell_task("passing", ask(1), run_id="other"))
        assert (await client.wait("passing", PATIENCE_S)).counts.completed == 1
        async with asyncio.timeout(PATIENCE_S):
            while sum(node.waiting for node in (await client.inference_state("r")).nodes) < 1:  # noqa: ASYNC110 - asked of Redis
                await asyncio.sleep(0.05)
        state = await client.inference_state()
        assert not state.paused
        assert await client.resume_inference("r")
        assert (await client.wait("held", PATIENCE_S)).counts.completed == 1
