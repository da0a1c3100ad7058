"""What was found by looking at everything together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polarq.contracts.specs import AgentSpec
from polarq.contracts.task import Task
from polarq.ledger import Claim
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.sandboxes import Sandboxes
from polarq_worker.services import Services
from polarq_worker.warm.members import Member
from tests.warm.conftest import Rig


class Bare(Harness):
    """Installs nothing: the recipe of its sandbox could be its evaluator's."""

    name = "bare"

    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        return []


def task_of(**fields: Any) -> Task:
    agent = {"import_path": "x:Y"}
    return Task.load({"task_id": "t", "instruction": "x", "agent": agent, **fields})


async def test_a_fresh_sandbox_for_grading_is_never_one_that_a_rollout_has_used(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "node")
    try:
        runtime = rig.spec("true", reuse=True).model_dump(mode="json")
        task = task_of(runtime=runtime, evaluator={"strategy": "session_completed", "refresh_runtime": True})
        recipe = await rig.warm.recipes.of_agent(task, Bare(AgentSpec(import_path="x:Y")))
        agents = await rig.take(recipe)
        assert await rig.pool.give_back(rig.started.pop(), used=True)
        assert (await rig.take(await rig.warm.recipes.of_evaluator(task))).runtime is not agents.runtime
        assert (await rig.take(recipe)).origin == "reused"
    finally:
        await rig.aclose()


async def test_a_fresh_sandbox_that_is_given_up_has_ended_its_start_before_anything_is_stopped() -> None:
    begun, undone, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Sandboxes):
        async def _take_fresh(self, budget_s: float) -> Member:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                undone.set()
                await over.wait()
            raise AssertionError

    task = task_of(
        runtime={"backend": "local"}, evaluator={"strategy": "session_completed", "refresh_runtime": True}
    )
    claim = cast(Claim, SimpleNamespace(task=task, rollout_id="t/0", token=1))
    services = cast(Services, SimpleNamespace(node=None, warm=None))
    sandboxes = Slow(claim, services)
    sandboxes.run_ended(1.0)
    grading = asyncio.create_task(sandboxes.fresh(1.0))
    await begun.wait()
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    stopping = asyncio.create_task(sandboxes.no_more())
    try:
        await undone.wait()
        await asyncio.sleep(0)
        assert not stopping.done()
    finally:
        over.set()
        await stopping
