"""Settings of the evaluator `composite`: several evaluators, one reward."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.specs import EvaluatorSpec, Name


class PartConfig(EvaluatorSpec):
    """One evaluator among others. They run in order; one that grades the agent's own sandbox ends what the agent left
    running there, so one that needs it comes first."""

    name: Name
    """What the report calls it."""
    weight: float = Field(1.0, ge=0)
    passes_at: float = 1.0
    """From this reward on it has passed."""
    gate: bool = False
    """With mode `gated`: where it has not passed, the reward is `gate_reward` and nothing further runs."""

    def spec(self) -> EvaluatorSpec:
        return EvaluatorSpec(
            strategy=self.strategy, config=self.config, env=self.env, refresh_runtime=self.refresh_runtime
        )


class CompositeConfig(Contract):
    """`composite`: one reward of several evaluators. A part that fails fails the whole."""

    mode: Literal["weighted", "gated", "first_failure"] = "weighted"
    """weighted: the mean of the parts' rewards by weight. gated: the same over those that are no gates, once all gates
    have passed (1.0 where there are only gates). first_failure: the reward of the first that has not passed, and
    nothing after it runs; the lowest reward where all have."""
    parts: list[PartConfig] = Field(min_length=1, max_length=32)
    gate_reward: float = 0.0

    @field_validator("parts")
    @classmethod
    def _parts_by_name(cls, parts: list[PartConfig]) -> list[PartConfig]:
        names = [part.name for part in parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"there are two parts named '{name}'")
        for part in parts:
            if part.strategy == "composite":
                raise ValueError(f"part '{part.name}' is a composite itself; put its parts here")
            if part.strategy == "self_distillation":
                raise ValueError(f"part '{part.name}': self_distillation is no part; put it around the composite")
            if ":" in part.strategy or "." in part.strategy:
                raise ValueError(f"part '{part.name}': an import path cannot be a part; name an installed evaluator")
        return parts

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        counting = [part for part in self.parts if not (self.mode == "gated" and part.gate)]
        if self.mode != "first_failure" and counting and not any(part.weight for part in counting):
            raise ValueError("all weights are 0: every rollout would get the same reward")
        if self.mode != "gated" and any(part.gate for part in self.parts):
            raise ValueError(f"'gate' goes with mode 'gated', not '{self.mode}'")
        if self.mode == "gated" and not any(part.gate for part in self.parts):
            raise ValueError("mode 'gated' needs a part with 'gate: true'")
        return self
