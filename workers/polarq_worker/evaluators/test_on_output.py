"""Evaluator `test_on_output`: runs the task's tests on what the agent changed, and compares them one by one with what
the task expects.

`refresh_runtime: true` takes the agent's patch to a sandbox that the agent never saw; otherwise its own sandbox is
graded, with whatever it left running. Reward 1.0 when every expected test has the expected status, else 0.0. No change
at all is 0.0; so are tests that the agent removed, broke, or left hanging. What the environment did is a fault instead:
a test command that cannot be started, or that does not report the expected tests even on the untouched tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polarq.contracts.evaluators import TestOnOutputConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq_worker.evaluators import snapshot
from polarq_worker.evaluators.base import EvaluationContext, Evaluator
from polarq_worker.evaluators.grading import Grading, Verdict
from polarq_worker.evaluators.snapshot import RepositoryLost
from polarq_worker.runtimes.base import Runtime


class TestOnOutputEvaluator(Evaluator):
    """See the module's text."""

    __test__ = False
    name: ClassVar[str] = "test_on_output"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = TestOnOutputConfig.parse(spec.config, what="evaluator.config")

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        taken = await snapshot.take(runtime, self._config.repo_dir, {**env, **self.spec.env}, timeout_s)
        return taken.model_dump()

    async def evaluate(self, context: EvaluationContext) -> Reward:
        grading = Grading(self._config, context, fresh=self.spec.refresh_runtime, env={**context.env, **self.spec.env})
        try:
            outcome = await grading.outcome()
        except Verdict as verdict:
            outcome = verdict.outcome
        except RepositoryLost:
            grading.report["repository_lost"] = True
            outcome = 0.0
        return self.verdict(outcome, grading.report)
