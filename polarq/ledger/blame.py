"""How far the loss of a worker is held against each rollout it had.

A worker that is lost takes everything it holds with it, and any of that may be the cause: a rollout that ends its
worker every time (poison), or none of them, when it was the machine. What tells them apart is the common factor:

- Each loss counts 1 and is shared, in equal parts, by those of the rollouts lost together that had been lost before
  most often. One that was alone with its worker, or the only one that had been lost before, gets all of it; each of 200
  on a node whose power failed gets 1/200; one that had not been lost before gets nothing while another beside it had.
- Shares add up where the losses have the same signature: the worker died (or hung: it lives, and its leases were not
  renewed), at the same stage, and in the same way as far as that is known (a fault in native code, memory). When they
  come to `gateway.max_attempts`, the rollout has failed: the same crash each time.
- However the shares fall, a rollout that was lost `LOSSES_PER_ATTEMPT` times as often as that has failed, too.

Attempts that were given back in order (a drain, a worker that stops) are no losses. The history of losses is the
outcome's message, is in the result (`losses`), and is shown by `polarq show`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polarq.ledger.incarnations import Holding

LOSSES_PER_ATTEMPT = 4


@dataclass(frozen=True, slots=True)
class Share:
    """Of one loss."""

    beside: int = 0
    """Rollouts that were lost together with it."""
    share: float = 1.0
    """How much of the loss is held against the rollout, 0 to 1."""


ALONE = Share()


@dataclass(slots=True)
class LostTogether:
    """What one worker held when it was lost: rollout -> how often it had been lost before. Found in several looks: the
    leases of one worker do not all end in the same moment."""

    until: float = 0.0
    """When this is over, by the clock of whoever looks."""
    before: dict[str, int] = field(default_factory=dict)

    def add(self, holding: Holding) -> None:
        self.before.setdefault(holding.rollout_id, holding.lost)

    def share(self, rollout_id: str) -> Share:
        if rollout_id not in self.before:
            return ALONE
        most = max(self.before.values())
        suspects = sum(lost == most for lost in self.before.values())
        suspected = self.before[rollout_id] == most
        return Share(len(self.before) - 1, 1 / suspects if suspected else 0.0)
