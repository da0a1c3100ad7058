"""Evaluator `harbor`: the reward that the verifier of a Harbor task directory writes.

What the agent left running serves the verifier until that ends; then it is killed. `refresh_runtime: true` grades in a
sandbox that has none of it, with the changes of `repo_dir` alone. Where somebody changed tests in `repo_dir` while the
verifier ran, it is run once more without him.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polarq.contracts.harbor import HarborConfig, HarborToml
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import EvaluatorFault, InvalidTask, RuntimeFault, SandboxLost
from polarq_worker.evaluators import snapshot
from polarq_worker.evaluators.base import EvaluationContext, Evaluator, as_seen
from polarq_worker.evaluators.harbor_verifier import reward_in, verify
from polarq_worker.evaluators.work import WorkLost, set_up
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.create import below

BACKOFF_S = 0.1
STEP_S = 120.0


class HarborEvaluator(Evaluator):
    """See `HarborConfig`."""

    name: ClassVar[str] = "harbor"
    config_type: ClassVar[type[HarborConfig]] = HarborConfig

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = self.config_type.parse(spec.config, what="evaluator.config")
        if spec.refresh_runtime and self._config.repo_dir is None:
            raise InvalidTask(
                "evaluator", [f"refresh_runtime: '{self.name}' needs config.repo_dir to know what to take along"]
            )
        folder = Path(self._config.task_dir or "")
        self._toml = HarborToml.load(folder) if self._config.task_dir is not None else HarborToml()
        self._tests = folder / "tests" if self._config.tests_dir is None else Path(self._config.tests_dir)
        if not self._tests.is_dir():
            raise InvalidTask("evaluator.config", [f"there is no folder {self._tests} on this node"])

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        if self._config.repo_dir is None:
            return {}
        taken = await snapshot.take(runtime, self._config.repo_dir, {**env, **self.spec.env}, timeout_s)
        return taken.model_dump()

    async def evaluate(self, context: EvaluationContext) -> Reward:
        return await self._outcome(context)

    async def _outcome(self, context: EvaluationContext) -> Reward:
        """The verifier's reward."""
        config = self._config
        deadline = time.monotonic() + context.timeout_s * 0.9
        env = {**context.env, **self._toml.verifier.env, **self.spec.env}
        if not below(str(self._tests), context.rules.upload_roots):
            raise EvaluatorFault(f"'{self._tests}' is not below a folder of security.upload_roots of the topology")
        if config.repo_dir is None:
            return await self._verified(context.runtime, env, {"graded_in": "live"}, deadline)
        fresh = self.spec.refresh_runtime
        try:
            graded = await set_up(
                context,
                config.repo_dir,
                env,
                fresh=fresh,
                keep_scaffolding=config.keep_agent_scaffolding,
                step_s=STEP_S,
            )
            reward = await self._verified(graded.runtime, env, graded.report, deadline)
            if not fresh and await graded.put_back_again():
                reward = await self._verified(graded.runtime, env, graded.report, deadline)
        except WorkLost as exc:
            return self.verdict(config.min_reward, exc.report)
        return reward

    async def _verified(
        self, runtime: Runtime, env: Mapping[str, str], setting: dict[str, Any], deadline: float
    ) -> Reward:
        """One run of the verifier. What the agent left running is over when it ends."""
        config = self._config
        await self._upload(runtime)
        limit_s = config.verifier_timeout or self._toml.verifier.timeout_sec
        places = {key: as_seen(runtime, getattr(config, key)) for key in ("tests_target", "verifier_dir")}
        found = await verify(
            runtime,
            config.model_copy(update=places),
            env,
            user=config.verifier_user or self._toml.verifier.user,
            timeout_s=min(limit_s, max(deadline - time.monotonic(), 0.0)),
        )
        report = {**setting, **found.report}
        if config.require_exit_0 and found.status != 0:
            raise EvaluatorFault(f"the verifier ended with exit code {found.status}; see log {report['log']}")
        outcome, rewards = reward_in(found, config)
        return self.verdict(outcome, report | ({"rewards": rewards} if rewards else {}))

    async def _upload(self, runtime: Runtime) -> None:
        """Whatever the agent put in the tests' place is replaced. Raises `RuntimeFault`."""
        for attempt in range(1, self._config.upload_attempts + 1):
            try:
                await runtime.put_dir(self._tests, self._config.tests_target)
                return
            except SandboxLost:
                raise
            except RuntimeFault:
                if attempt == self._config.upload_attempts:
                    raise
                await asyncio.sleep(BACKOFF_S * attempt)
