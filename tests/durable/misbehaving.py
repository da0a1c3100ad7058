"""Plug-ins that do what no plug-in should."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from polarq.contracts.completion import Completion
from polarq.contracts.rollout import Reward
from polarq.contracts.trajectory import Trace
from polarq.trajectory.base import Builder
from polarq_worker.evaluators.base import EvaluationContext, Evaluator


class Misbehaves(Evaluator):
    """An evaluator that does what its config says."""

    name: ClassVar[str] = "misbehaves"

    async def evaluate(self, context: EvaluationContext) -> Reward:
        match self.spec.config["how"]:
            case "exits":
                sys.exit(3)
            case "exits in a part":
                await asyncio.gather(_exits(), asyncio.sleep(0))
            case "interrupts":
                raise KeyboardInterrupt
            case "object":
                return self.verdict(1.0, {"x": object()})
            case "surrogate":
                return self.verdict(1.0, {"x": "\ud800"})
            case "deep":
                return self.verdict(1.0, _deep(3000))
            case "no reward":
                return "well done"  # type: ignore[return-value]
            case "not a number":
                return Reward.model_construct(outcome=float("nan"), evaluator=self.name, trace_rewards=None, report={})
        raise KeyError("what nobody foresaw")


class BreaksOff(Builder):
    """A builder with a mistake in it."""

    name: ClassVar[str] = "breaks_off"

    def traces(self, completions: Sequence[Completion]) -> list[Trace]:
        raise KeyError("what nobody foresaw")


async def _exits() -> None:
    sys.exit(4)


def _deep(levels: int) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for _ in range(levels):
        tree = {"a": tree}
    return tree
