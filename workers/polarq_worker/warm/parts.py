"""The warm pool of one node, put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polarq.ledger import AsyncLedger
from polarq.topology import Node, Topology
from polarq_worker.patience import Patience
from polarq_worker.runtimes.base import Host
from polarq_worker.warm.making import Maker
from polarq_worker.warm.pool import WarmPool
from polarq_worker.warm.recipe import Recipes
from polarq_worker.warm.snapshots import Snapshots


@dataclass(frozen=True, slots=True)
class Warm:
    """What rollouts ask for sandboxes."""

    recipes: Recipes
    maker: Maker
    snapshots: Snapshots
    pool: WarmPool

    @classmethod
    def of(
        cls, topology: Topology, node: Node, incarnation: str, ledger: AsyncLedger, patience: Patience, state_dir: Path
    ) -> Warm:
        host = Host(node.id, incarnation, state_dir / "runtimes", node.runtimes, (state_dir,))
        recipes = Recipes(topology, host)
        maker = Maker(
            host,
            topology.security,
            state_dir / "rollouts",
            ledger.calls.keys,
            lambda call: patience.insist(ledger, call),
        )
        snapshots = Snapshots(maker, recipes, state_dir / "logs")
        return cls(recipes, maker, snapshots, WarmPool(maker, snapshots))
