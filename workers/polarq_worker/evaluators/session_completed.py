"""Evaluator `session_completed`: whether the harness ended well by its own account."""

from __future__ import annotations

from typing import ClassVar

from polarq.contracts.evaluators import SessionCompletedConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq_worker.evaluators.base import EvaluationContext, Evaluator


class SessionCompletedEvaluator(Evaluator):
    """1.0 when every step of the harness exited with 0, else 0.0."""

    name: ClassVar[str] = "session_completed"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        SessionCompletedConfig.parse(spec.config, what="evaluator.config")

    async def evaluate(self, context: EvaluationContext) -> Reward:
        return self.verdict(1.0 if context.harness.ok else 0.0, {"harness_ok": context.harness.ok})
