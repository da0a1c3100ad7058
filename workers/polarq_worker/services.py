"""What the walk of a rollout needs from its node."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from polarq.contracts.task import Task
from polarq.ledger import AsyncLedger
from polarq.ledger.admission import Place
from polarq.ledger.records import ActiveRollout
from polarq.store.artifacts import ArtifactStore
from polarq.topology import Node, Topology
from polarq_worker.evaluators.base import EngineAddress, NodeRules
from polarq_worker.network.sandbox_network import Networks
from polarq_worker.patience import Patience
from polarq_worker.runtimes.base import Host
from polarq_worker.slots import Slots
from polarq_worker.spool import Spool
from polarq_worker.warm.parts import Warm


@dataclass(frozen=True, slots=True)
class Services:
    """One node's parts, shared by all its rollouts."""

    topology: Topology
    node: Node
    place: Place
    """The node, as work is chosen for it."""
    ledger: AsyncLedger
    slots: Slots
    warm: Warm
    """Sandboxes, made ahead and kept."""
    networks: Networks
    """What sandboxes reach."""
    patience: Patience
    spool: Spool
    state_dir: Path
    proxy_there: Callable[[], Awaitable[object]]
    """Returns when the node's proxy listens: at once, or when it has been started again."""
    tell: Callable[[Sequence[ActiveRollout]], None]
    """Tells whoever runs these rollouts that they have to stop; their leases' renewal tells them too, later."""
    ring: Callable[[Task, str], Awaitable[None]]
    """Publishes a doorbell for a rollout that was given back to the queue."""

    @property
    def host(self) -> Host:
        """The machine, as sandboxes are started on it."""
        return self.warm.maker.host

    @property
    def artifacts(self) -> ArtifactStore:
        """Where files that come back from sandboxes are put."""
        return ArtifactStore(self.topology.artifacts.place or str(self.state_dir / "artifacts"))

    @property
    def evaluator_rules(self) -> NodeRules:
        """What evaluators may do here. Keys are where the operator put them: in this process' environment."""
        security = self.topology.security
        return NodeRules(
            upload_roots=security.upload_roots,
            judge_hosts=security.judge_hosts,
            judge_keys={name: os.environ[name] for name in security.judge_key_envs if os.environ.get(name)},
            judge_cache=self.state_dir / "judge",
            engines=[
                EngineAddress(
                    endpoint.engine,
                    endpoint.base_url,
                    endpoint.model or self.node.model_served,
                    os.environ.get(endpoint.api_key_env) if endpoint.api_key_env else None,
                )
                for endpoint in self.node.endpoints
            ],
        )

    @property
    def collecting_dir(self) -> Path:
        """Attempts whose files were collected and of whose result it is not known yet if it was taken."""
        return self.state_dir / "collecting"

    def collecting(self, rollout_id: str, token: int) -> Path:
        return self.collecting_dir / f"{rollout_id}-{token}"

    @property
    def rollouts_dir(self) -> Path:
        return self.state_dir / "rollouts"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"
