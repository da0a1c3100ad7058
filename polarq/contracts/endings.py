"""How a rollout ended, in the words a trainer decides by, and what is done with each kind."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import model_validator

from polarq.contracts.base import Contract


class Ending(StrEnum):
    """Kinds of ends. The first seven are the policy's own doing and may carry a reward; no other ever does."""

    COMPLETED = "completed"
    AGENT_FAILED = "agent_failed"
    """The harness ended badly, or without an answer."""
    AGENT_TIMED_OUT = "agent_timed_out"
    AGENT_LIMIT = "agent_limit"
    """The harness stopped at a limit of turns, calls, cost or time: its own, or the task's `model.max_calls`."""
    TRUNCATED = "truncated"
    """The last answer was cut at its token limit."""
    OVERFLOW = "overflow"
    """The conversation outgrew the model's context."""
    PARSER_INVALID_CALL = "parser_invalid_call"
    """The last answer was a tool call that the engine's parser could not read."""
    MODEL_ERROR = "model_error"
    """The inference side failed, or refused."""
    RUNTIME = "runtime"
    """The sandbox could not be made, or was lost."""
    EVALUATOR = "evaluator"
    """No verdict could be reached."""
    NODE = "node"
    """The worker, its queue or its store failed."""
    FIDELITY = "fidelity"
    """What was recorded is not as faithful as the task requires."""
    TASK = "task"
    """The task cannot be run as it stands."""
    CANCELLED = "cancelled"
    EARLY_STOPPED = "early_stopped"
    """Enough others of its group were usable."""


OWN_DOING = frozenset(
    {
        Ending.COMPLETED,
        Ending.AGENT_FAILED,
        Ending.AGENT_TIMED_OUT,
        Ending.AGENT_LIMIT,
        Ending.TRUNCATED,
        Ending.OVERFLOW,
        Ending.PARSER_INVALID_CALL,
    }
)

NOT_REPLACED = frozenset({Ending.COMPLETED, Ending.CANCELLED, Ending.EARLY_STOPPED, Ending.TASK})


class Use(StrEnum):
    """What becomes of a rollout."""

    TRAIN = "train"
    MASK = "mask"
    """Kept, and nothing of it is trained on."""
    REPLACE = "replace"
    """Run again, up to the task's `max_replacements` times; then as `mask`."""


class EndingRule(Contract):
    """What a task wants done with one kind of end. In a task file also just `mask`, or a number: the reward to train
    with."""

    use: Use
    reward: float | None = None
    """With `train`: counts in place of the evaluator's."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"use": data}
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return {"use": "train", "reward": data}
        return data

    @model_validator(mode="after")
    def _reward_is_trained_with(self) -> Self:
        if self.reward is not None and self.use is not Use.TRAIN:
            raise ValueError(f"reward: goes with use 'train', not with '{self.use.value}'")
        return self


TRAINED, MASKED, REPLACED = EndingRule(use=Use.TRAIN), EndingRule(use=Use.MASK), EndingRule(use=Use.REPLACE)

DEFAULT_RULES: Mapping[Ending, EndingRule] = {
    **dict.fromkeys(Ending, MASKED),
    **dict.fromkeys(OWN_DOING, TRAINED),
    **dict.fromkeys((Ending.MODEL_ERROR, Ending.RUNTIME, Ending.EVALUATOR, Ending.NODE), REPLACED),
}


def checked_rules(rules: Mapping[Ending, EndingRule]) -> None:
    """Raises ValueError for a rule that trains on what was not the policy's doing, or runs again what was to end."""
    for ending, rule in rules.items():
        if rule.use is Use.TRAIN and ending not in OWN_DOING:
            raise ValueError(f"{ending.value}: is not the policy's doing and carries no reward; mask or replace it")
        if rule.use is Use.REPLACE and ending in NOT_REPLACED:
            raise ValueError(f"{ending.value}: cannot be replaced")


def rule_for(ending: Ending, rules: Mapping[Ending, EndingRule]) -> EndingRule:
    """The task's own, else the default."""
    return rules.get(ending, DEFAULT_RULES[ending])
