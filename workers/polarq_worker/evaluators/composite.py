"""Evaluator `composite`: several evaluators one after the other, one reward of them, each one's report kept."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from polarq.contracts.composite import CompositeConfig, PartConfig
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.errors import EvaluatorFault
from polarq.trajectory.base import rewarded
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, Evaluator
from polarq_worker.evaluators.create import create_evaluator
from polarq_worker.runtimes.base import Runtime


@dataclass(frozen=True)
class Judged:
    """A part that has come to a verdict."""

    part: PartConfig
    reward: Reward
    took_s: float

    @property
    def told(self) -> dict[str, Any]:
        return {"outcome": self.reward.outcome, "part_s": round(self.took_s, 3), **self.reward.report}

    @property
    def passed(self) -> bool:
        return self.reward.outcome >= self.part.passes_at


class CompositeEvaluator(Evaluator):
    """See `CompositeConfig`."""

    name: ClassVar[str] = "composite"

    def __init__(self, spec: EvaluatorSpec) -> None:
        super().__init__(spec)
        self._config = CompositeConfig.parse(spec.config, what="evaluator.config")
        self._parts = [(part, create_evaluator(part.spec(), [])) for part in self._config.parts]

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        looks = {}
        for part, evaluator in self._parts:
            left = max(deadline - time.monotonic(), 0.0)
            looks[part.name] = await evaluator.baseline(runtime, {**env, **self.spec.env}, left)
        return looks

    async def evaluate(self, context: EvaluationContext) -> Reward:
        deadline = time.monotonic() + context.timeout_s
        judged: list[Judged] = []
        for part, evaluator in self._parts:
            inner = replace(
                context,
                env={**context.env, **self.spec.env},
                timeout_s=max(deadline - time.monotonic(), 0.0),
                baseline=dict(context.baseline.get(part.name, {})),
            )
            began = time.monotonic()
            try:
                reward = await evaluator.evaluate(inner)
            except EvaluationTimedOut as exc:
                raise EvaluationTimedOut(f"part '{part.name}': {exc}") from exc
            except EvaluatorFault as exc:
                raise EvaluatorFault(f"part '{part.name}': {exc}") from exc
            try:
                rewarded(context.trajectory, reward)
            except ValueError as exc:
                raise EvaluatorFault(f"part '{part.name}': {exc}") from exc
            judged.append(Judged(part, reward, time.monotonic() - began))
            if not judged[-1].passed and (part.gate or self._config.mode == "first_failure"):
                break
        return self._reward(judged, context)

    def _reward(self, judged: Sequence[Judged], context: EvaluationContext) -> Reward:
        report = {one.part.name: one.told for one in judged}
        last = judged[-1]
        whole: dict[str, Any] = {"mode": self._config.mode, **_report(report)}
        if not last.passed and (last.part.gate or self._config.mode == "first_failure"):
            whole["stopped_at"] = last.part.name
            return self.verdict(self._config.gate_reward if last.part.gate else last.reward.outcome, whole)
        if self._config.mode == "first_failure":
            return self.verdict(min(one.reward.outcome for one in judged), whole)
        counting = [one for one in judged if not one.part.gate]
        if not counting:
            return self.verdict(1.0, whole)
        total = sum(one.part.weight for one in counting)
        shares = [(one.part.weight / total, one.reward) for one in counting]
        reward = self.verdict(sum(share * one.outcome for share, one in shares), whole)
        return reward.model_copy(update=_credit(shares, [len(t.turns) for t in context.trajectory.traces]))


def _report(parts: dict[str, Any]) -> dict[str, Any]:
    """Each part's report under a key of its own, so that a large one alone is cut."""
    return {f"part_{name}": report for name, report in parts.items()}


def _credit(shares: Sequence[tuple[float, Reward]], turns: Sequence[int]) -> dict[str, Any]:
    """Rewards per trace and per turn by weight, where a part gives any; a part that gives none says its outcome of
    every trace, and nothing of turns."""
    found: dict[str, Any] = {}
    if any(reward.trace_rewards is not None for _, reward in shares):
        rows = [reward.trace_rewards or [reward.outcome] * len(turns) for _, reward in shares]
        weighted = [[share * value for value in row] for (share, _), row in zip(shares, rows, strict=True)]
        found["trace_rewards"] = [sum(values) for values in zip(*weighted, strict=True)]
    given = [(share, reward.turn_rewards) for share, reward in shares if reward.turn_rewards is not None]
    if given:
        found["turn_rewards"] = [
            [sum(share * rewards[trace][turn] for share, rewards in given) for turn in range(count)]
            for trace, count in enumerate(turns)
        ]
    return found
