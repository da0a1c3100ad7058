"""The calculator example, scored: by the four scripts' own commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.rollout import HarnessReport, Reward
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq.testing.calculator import TASK_FILE
from polarq.testing.inference.scenario import load_scenario
from polarq_worker.evaluators.base import EvaluationContext
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.harnesses.base import sandbox_env
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import prepare


class Rollout:
    """One rollout of the example's task by hand: what the engine does, without its bookkeeping."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        data = Task.load(TASK_FILE).model_dump(mode="json")
        for key, value in changes.items():
            data[key] |= value
        self.task = Task.parse(data)
        assert self.task.evaluator is not None
        self.evaluator = create_evaluator(self.task.evaluator, [])
        self.runtimes: list[LocalRuntime] = []
        self.baseline: dict[str, Any] = {}

    async def begin(self) -> LocalRuntime:
        runtime = await self.prepared()
        self.baseline = await self.evaluator.baseline(runtime, self.env(runtime), 60)
        return runtime

    async def prepared(self) -> LocalRuntime:
        assert self.task.runtime is not None
        root = self.folder / f"root{len(self.runtimes)}"
        runtime = LocalRuntime(self.task.runtime, runtime_id=root.name, root=root)
        self.runtimes.append(runtime)
        await runtime.start()
        await prepare(runtime, self.task.runtime.prepare, env=self.env(runtime), timeout_s=60, upload_roots=["*"])
        return runtime

    async def verdict(self, harness: HarnessReport) -> Reward:
        async def fresh() -> Runtime:
            return await self.prepared()

        context = EvaluationContext(
            task=self.task,
            rollout_id="t.0",
            trajectory=Trajectory(builder="per_request"),
            harness=harness,
            runtime=self.runtimes[0],
            env=self.env(self.runtimes[0]),
            timeout_s=120,
            baseline=self.baseline,
            fresh_runtime=fresh,
        )
        return await self.evaluator.evaluate(context)

    def env(self, runtime: LocalRuntime) -> dict[str, str]:
        return sandbox_env(self.task, rollout_id="t.0", layout=runtime.layout)

    async def stop(self) -> None:
        for runtime in self.runtimes:
            await runtime.stop()


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[list[Rollout]]:
    rollouts: list[Rollout] = []
    yield rollouts
    for rollout in rollouts:
        await rollout.stop()


@pytest.mark.parametrize("fresh", [False, True], ids=["live", "fresh"])
@pytest.mark.parametrize(("script", "outcome"), [("rewrites", 1.0), ("edits", 1.0), ("breaks", 0.0), ("gives_up", 0.0)])
async def test_each_script_gets_what_its_commands_deserve(
    script: str, outcome: float, fresh: bool, made: list[Rollout], tmp_path: Path
) -> None:
    rollout = Rollout(tmp_path, evaluator={"refresh_runtime": fresh})
    made.append(rollout)
    runtime = await rollout.begin()
    turns = next(entry.turns for entry in load_scenario("calculator").scripts if entry.name == script)
    for call in (call for turn in turns for call in turn.tool_calls):
        await runtime.exec(["bash", "-c", call.arguments["command"]], timeout_s=60)
    reward = await rollout.verdict(HarnessReport(name="stub", ok=True))
    assert reward.outcome == outcome, reward
    assert reward.report["empty_generation"] == (script == "gives_up")
