"""Evaluator `exact_match`: whether the final answer is one of the expected texts."""

from __future__ import annotations

from typing import ClassVar

from polarq.contracts.answers import ExactMatchConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq_worker.evaluators.answers import NoAnswer, find_answer
from polarq_worker.evaluators.base import EvaluationContext, Evaluator

SHOWN = 2000


class ExactMatchEvaluator(Evaluator):
    """See `ExactMatchConfig`."""

    name: ClassVar[str] = "exact_match"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = ExactMatchConfig.parse(spec.config, what="evaluator.config")

    async def evaluate(self, context: EvaluationContext) -> Reward:
        try:
            answer = await find_answer(context, self._config)
        except NoAnswer as exc:
            return self.verdict(0.0, {"answer": None, "why": str(exc)})
        fits = self._plain(answer) in {self._plain(text) for text in self._config.expected}
        return self.verdict(1.0 if fits else 0.0, {"answer": answer[:SHOWN]})

    def _plain(self, text: str) -> str:
        text = " ".join(text.split()) if self._config.ignore_blanks else text.strip()
        return text.casefold() if self._config.ignore_case else text
