"""Evaluator `json_schema`: whether the final answer is JSON that fits a schema."""

from __future__ import annotations

import importlib.util
import re
from typing import ClassVar

from polarq.contracts.answers import JsonSchemaConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import UnknownPlugin
from polarq_worker.evaluators.answers import NoAnswer, find_answer
from polarq_worker.evaluators.apart import TooMuch, run_apart
from polarq_worker.evaluators.base import EvaluationContext, Evaluator
from polarq_worker.evaluators.checks import schema_check
from polarq_worker.evaluators.exact_match import SHOWN

CPU_S = 20
FENCE = re.compile(r"^```[A-Za-z]*[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class JsonSchemaEvaluator(Evaluator):
    """See `JsonSchemaConfig`."""

    name: ClassVar[str] = "json_schema"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        if importlib.util.find_spec("jsonschema") is None:
            raise UnknownPlugin("evaluator 'json_schema' needs polarq[worker] on the node (pip install it)")
        self._config = JsonSchemaConfig.parse(spec.config, what="evaluator.config")

    async def evaluate(self, context: EvaluationContext) -> Reward:
        try:
            answer = await find_answer(context, self._config)
            found = fenced(answer) if self._config.fenced else answer
            request = {"answer": found, "schema": self._config.json_schema}
            reply = await run_apart(context, schema_check, request, cpu_s=CPU_S, timeout_s=context.timeout_s)
        except NoAnswer as exc:
            return self.verdict(0.0, {"answer": None, "why": str(exc)})
        except TooMuch as exc:
            return self.verdict(0.0, {"answer": answer[:SHOWN], "why": f"it could not be checked in {CPU_S} s: {exc}"})
        return self.verdict(
            1.0 if reply["fits"] is True else 0.0, {"answer": answer[:SHOWN], "problems": reply["problems"]}
        )


def fenced(text: str) -> str:
    """What stands in the text's only Markdown fence; the text itself where it has none. Raises `NoAnswer`."""
    found = FENCE.findall(text)
    if len(found) > 1:
        raise NoAnswer(f"there are {len(found)} fenced blocks in it")
    return str(found[0]) if found else text
