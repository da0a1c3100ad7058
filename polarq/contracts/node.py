"""A node (one Celery worker with its proxy) as the ledger knows it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from polarq.contracts.base import Contract


class StageMetrics(Contract):
    """Polar's six numbers: how full each stage of a node is."""

    init_queue_depth: int = Field(0, ge=0)
    init_inflight: int = Field(0, ge=0)
    ready_depth: int = Field(0, ge=0)
    run_inflight: int = Field(0, ge=0)
    postrun_queue_depth: int = Field(0, ge=0)
    postrun_inflight: int = Field(0, ge=0)


class PoolMetrics(Contract):
    """A node's warm pool: sandboxes made ahead, what recipes left on disk, and how sandboxes were come by so far."""

    idle: int = Field(0, ge=0)
    coming: int = Field(0, ge=0)
    """Being made ahead."""
    snapshots: int = Field(0, ge=0)
    snapshots_mb: int = Field(0, ge=0)
    taken_warm: int = Field(0, ge=0)
    taken_from_snapshot: int = Field(0, ge=0)
    taken_cold: int = Field(0, ge=0)


class NodeHealth(Contract):
    """What the node last saw of its parts. None: not checked yet."""

    proxy: bool | None = None
    inference: bool | None = None
    disk: bool | None = None
    """Whether its state folder has room for another rollout."""
    message: str = ""

    @property
    def unusable(self) -> str | None:
        """Why nothing new makes sense on this node, a few words; None: nothing speaks against it."""
        if self.inference is False:
            return "has no usable inference"
        return "has no room on its disk" if self.disk is False else None


class NodeRecord(Contract):
    """One node. `alive` is judged by Redis (a key with a short expiry), never by comparing clocks."""

    node_id: str
    alive: bool = False
    draining: bool = False
    paused: bool = False
    stopping: bool = False
    """Its worker was told to stop: it finishes what it has."""
    max_init_workers: int = Field(1, ge=1)
    max_run_workers: int = Field(1, ge=1)
    max_postrun_workers: int = Field(1, ge=1)
    metrics: StageMetrics = StageMetrics()
    pool: PoolMetrics = PoolMetrics()
    loop_lag_s: float | None = Field(None, ge=0)
    """How late the engine's loop turns: 99th percentile of the last minute, in seconds."""
    queue_depth: int = Field(0, ge=0)
    """Messages in its queue: for free places and a few ahead. What waits is in the ledger, for any node."""
    places: int = Field(0, ge=0)
    """Rollouts it holds at once, over all stages; 0: not said."""
    proxy_url: str = ""
    inference_url: str = ""
    engine: str = ""
    model: str = ""
    labels: dict[str, str] = {}
    runtimes: list[str] = []
    """Kinds of sandboxes that are installed; empty: not said."""
    default_runtime: bool | None = None
    """Whether it runs tasks that name no runtime; None: not said."""
    health: NodeHealth = NodeHealth()
    version: str = ""
    hostname: str = ""
    pid: int = 0
    started_at: datetime | None = None
    last_seen_at: datetime | None = None
    extra: dict[str, Any] = {}
