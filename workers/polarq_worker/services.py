"""What the walk of a rollout needs from its node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polarq.contracts.task import Task
from polarq.ledger import AsyncLedger
from polarq.ledger.admission import Place
from polarq.ledger.records import ActiveRollout
from polarq.topology import Node, Topology
from polarq_worker.patience import Patience
from polarq_worker.slots import Slots
from polarq_worker.spool import Spool


@dataclass(frozen=True, slots=True)
class Services:
    """One node's parts, shared by all its rollouts."""

    topology: Topology
    node: Node
    place: Place
    """The node, as work is chosen for it."""
    ledger: AsyncLedger
    slots: Slots
    patience: Patience
    spool: Spool
    state_dir: Path
    proxy_url: Callable[[], str]
    """Address under which sandboxes reach the node's proxy now."""
    proxy_there: Callable[[], Awaitable[object]]
    """Returns when the node's proxy listens: at once, or when it has been started again."""
    tell: Callable[[Sequence[ActiveRollout]], None]
    """Tells whoever runs these rollouts that they have to stop; their leases' renewal tells them too, later."""
    ring: Callable[[Task, str], Awaitable[None]]
    """Publishes a doorbell for a rollout that was given back to the queue."""

    @property
    def rollouts_dir(self) -> Path:
        return self.state_dir / "rollouts"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"
