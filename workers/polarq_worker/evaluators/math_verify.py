"""Evaluator `math_verify`: whether the final answer is mathematically an expected one, by the package math-verify."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

from polarq.contracts.answers import MathVerifyConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import EvaluatorFault, UnknownPlugin
from polarq_worker.evaluators.answers import NoAnswer, find_answer
from polarq_worker.evaluators.apart import TooMuch, run_apart
from polarq_worker.evaluators.base import EvaluationContext, Evaluator
from polarq_worker.evaluators.checks import math_check
from polarq_worker.evaluators.exact_match import SHOWN

CPU_S = 30
MAX_CHARS = 20_000
"""Of a longer answer the end is read: what is concluded stands there."""


class MathVerifyEvaluator(Evaluator):
    """See `MathVerifyConfig`."""

    name: ClassVar[str] = "math_verify"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = MathVerifyConfig.parse(spec.config, what="evaluator.config")
        if importlib.util.find_spec("math_verify") is None:
            raise UnknownPlugin("evaluator 'math_verify' needs polarq[math] on the node (pip install 'polarq[math]')")

    async def evaluate(self, context: EvaluationContext) -> Reward:
        config = self._config
        try:
            answer = await find_answer(context, config)
        except NoAnswer as exc:
            return self.verdict(0.0, {"answer": None, "why": str(exc)})
        evidence = {"answer": answer[-SHOWN:]}
        request = {
            "answer": answer[-MAX_CHARS:],
            "expected": config.expected,
            "float_rounding": config.float_rounding,
            "strict": config.strict,
        }
        try:
            reply = await run_apart(context, math_check, request, cpu_s=CPU_S, timeout_s=context.timeout_s)
        except TooMuch as exc:
            return self.verdict(0.0, {**evidence, "why": f"it could not be worked out in {CPU_S} s: {exc}"})
        if reply["unreadable"]:
            raise EvaluatorFault(f"evaluator.config.expected: {reply['unreadable'][0]!r} cannot be read by math-verify")
        return self.verdict(1.0 if reply["fits"] is True else 0.0, {**evidence, "read": reply["read"]})
