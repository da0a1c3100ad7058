"""Settings of the evaluators that run a program of the task's: `script`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.specs import NonBlank


class RewardRange(Contract):
    """What a reward may be. A value outside is no reward: the evaluation has failed."""

    min_reward: float = 0.0
    max_reward: float = 1.0

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.min_reward >= self.max_reward:
            raise ValueError(f"min_reward ({self.min_reward:g}) must be below max_reward ({self.max_reward:g})")
        return self


class ScriptConfig(RewardRange):
    """`script`: the reward that a command of the task's comes to."""

    command: NonBlank
    """Run under `bash -o pipefail`, in `cwd`."""
    cwd: NonBlank | None = None
    """None: `repo_dir` where it is named, else the sandbox's own."""
    timeout_s: float = Field(600.0, gt=0)
    reward_from: Literal["exit_code", "file", "output"] = "exit_code"
    """exit_code: `max_reward` when it is 0, else `min_reward`. file: what the command writes to the path in
    `$POLARQ_REWARD_FILE`. output: the last line that it prints. Both are a number, or a JSON object with one under
    `reward_key`; they count only where the command exits with 0. The object may hold credit as well: `trace_rewards`, a
    number per trace in place of the reward, and `turn_rewards`, a list per trace with a number per turn. The traces and
    their turns stand in the JSON file `$POLARQ_TRACES_FILE`."""
    reward_key: NonBlank = "reward"
    repo_dir: NonBlank | None = None
    """The folder that the agent works in: test files that the agent changed, and what it put there to steer a test
    runner, are as they were when the command runs, and a fresh sandbox gets the agent's work there."""
    exclude_patterns: list[str] = []
    """Paths that are no part of the agent's work, as file name patterns."""
    keep_agent_scaffolding: bool = False
