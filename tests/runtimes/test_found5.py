"""What was found by looking at everything together."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polarq.contracts.specs import AgentSpec, RuntimeSpec
from polarq.contracts.task import Task
from polarq.ledger import Claim
from polarq.topology.runtimes import RuntimesSection
from polarq_worker.harnesses.base import Harness, HarnessContext, HarnessStep
from polarq_worker.runtimes import cgroups
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.docker import images
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.sandboxes import Sandboxes
from polarq_worker.services import Services
from polarq_worker.warm.members import Member
from tests.warm.conftest import Rig, until, wishes

from ..needs import not_here
from .local_here import needs_bubblewrap


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

    task = task_of(runtime={"backend": "local"}, evaluator={"strategy": "session_completed", "refresh_runtime": True})
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


MANY = """
import subprocess
kept = []
try:
    for _ in range(200):
        kept.append(subprocess.Popen(["sleep", "1000"]))
except BlockingIOError:
    print(len(kept))
"""


async def test_an_isolated_sandbox_of_a_task_that_names_no_limit_cannot_fill_its_machine(tmp_path: Path) -> None:
    needs_bubblewrap()
    if os.geteuid() == 0 and "pids" not in cgroups.usable():
        not_here("control groups of pids cannot be made")
    settings = RuntimesSection.parse({"local": {"isolation": "bubblewrap", "max_processes": 40}})
    host = Host("node0", "1", tmp_path / "runtimes", settings)
    spec = RuntimeSpec.parse({"backend": "local"})
    runtime = LocalRuntime(spec, runtime_id="r1", root=tmp_path / "r1", host=host)
    await runtime.start()
    try:
        result = await runtime.exec(["python", "-c", MANY], timeout_s=120.0)
        assert result.ok, result
        assert 20 <= int(result.stdout) <= 60
    finally:
        await runtime.stop()


async def test_who_asks_for_an_image_while_its_pull_is_given_up_has_a_pull_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, undone, over, pulls = asyncio.Event(), asyncio.Event(), asyncio.Event(), []

    async def pull(*_: object) -> None:
        pulls.append(1)
        if len(pulls) == 1:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                undone.set()
                await over.wait()

    monkeypatch.setattr(images, "_pull", pull)
    monkeypatch.setattr(images, "address", lambda _: "unix:///nowhere")
    first = asyncio.create_task(images._pulled(Host(), "a", lambda _: None))
    await begun.wait()
    first.cancel()
    await undone.wait()
    second = asyncio.create_task(images._pulled(Host(), "a", lambda _: None))
    await asyncio.sleep(0)
    over.set()
    await asyncio.wait([first, second])
    assert (first.cancelled(), second.cancelled(), len(pulls)) == (True, False, 2)
    assert not images._pulls


async def test_a_pool_that_is_closed_has_waited_for_snapshots_that_were_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "node")
    over = asyncio.Event()
    recipe = await rig.recipe("sleep 86396")

    async def slowly(*_: object) -> None:
        await over.wait()

    monkeypatch.setattr(rig.warm.maker, "keep_logs", slowly)
    rig.pool.ahead(wishes(recipe))
    await until(lambda: rig.prepared == 1)
    closing = asyncio.create_task(rig.pool.aclose())
    try:
        done, _ = await asyncio.wait([closing], timeout=0.5)
        assert not done
    finally:
        over.set()
        await closing
    assert not rig.warm.maker.living
