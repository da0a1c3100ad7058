"""What a task asks of the fidelity of its rollouts' trajectories."""

from __future__ import annotations

from pydantic import Field

from polarq.contracts.base import Contract
from polarq.contracts.trajectory import Fidelity


class Require(Contract):
    """A rollout whose trajectory misses one of these fails at the boundary `builder` with the reason `fidelity`: it is
    not scored and not trainable. What is None is not asked for."""

    trainable_fraction: float | None = Field(None, ge=0, le=1)
    """Least share of the sampled tokens, side calls left out, that may be trained on."""
    max_breaks: int | None = Field(None, ge=0)
    max_traces: int | None = Field(None, ge=0)
    max_missing_logprobs: int | None = Field(None, ge=0)
    max_forged_control_tokens: int | None = Field(None, ge=0)
    max_incomplete_calls: int | None = Field(None, ge=0)
    max_empty_calls: int | None = Field(None, ge=0)
    max_unplaced_images: int | None = Field(None, ge=0)
    max_versions: int | None = Field(None, ge=0)
    """Policy versions that sampled it."""

    def missed(self, found: Fidelity) -> list[str]:
        """One line for each requirement that the trajectory misses, in the order above.

        A rollout that sampled nothing beside side calls misses no `trainable_fraction`: there is nothing to share.
        """
        lines = []
        share = found.trainable_fraction
        if self.trainable_fraction is not None and share is not None and share < self.trainable_fraction:
            lines.append(f"trainable_fraction is {share:.4g}, at least {self.trainable_fraction:g} is required")
        counts = {
            "breaks": (len(found.breaks), self.max_breaks),
            "traces": (found.traces, self.max_traces),
            "missing_logprobs": (found.missing_logprobs, self.max_missing_logprobs),
            "forged_control_tokens": (found.forged_control_tokens, self.max_forged_control_tokens),
            "incomplete_calls": (found.incomplete_calls, self.max_incomplete_calls),
            "empty_calls": (found.empty_calls, self.max_empty_calls),
            "unplaced_images": (found.unplaced_images, self.max_unplaced_images),
            "versions": (len(found.versions), self.max_versions),
        }
        for name, (count, most) in counts.items():
            if most is not None and count > most:
                lines.append(f"{name} is {count}, at most {most} allowed")
        return lines
