"""The trainer's side on an event loop; see `polarq.client.client` for what each method does and raises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from typing import TYPE_CHECKING, Self, TypeVar

from polarq.client import acknowledging, controls, pausing, reading, submitting
from polarq.client.deployment import Deployment, TaskSource
from polarq.client.pausing import LEASE_S, TIMEOUT_S, InferenceState, of_run
from polarq.client.results import Trajectories
from polarq.client.steps import OUTAGE_S, Outage, Steps, each_async, outcome_async
from polarq.client.streaming import stream
from polarq.contracts.base import check_id
from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import RolloutResult, TaskResult
from polarq.ledger import AsyncLedger, Cancelled, Submitted, TaskHead, TaskRecord
from polarq.ledger.control import RunState, run_state
from polarq.ledger.limits import BY_COMMAND, Published, publish, published
from polarq.ledger.policy import set_policy_version
from polarq.settings import Settings
from polarq.store.archive import Archive
from polarq.store.pauses import PauseMode
from polarq.topology import Topology
from polarq.topology.models import LimitsSection

if TYPE_CHECKING:
    from celery import Celery

R = TypeVar("R")


class AsyncClient(Deployment):
    """As `Client`, for asyncio. What blocks (publishing, decoding a large result) is done beside the loop."""

    def __init__(
        self, topology: Topology | None = None, settings: Settings | None = None, app: Celery | None = None
    ) -> None:
        super().__init__(topology, settings, app)
        self.ledger = AsyncLedger(self.url, self.calls)

    async def _do(self, steps: Steps[R]) -> R:
        return await outcome_async(self.ledger, steps)

    # --- tasks

    async def submit(self, source: TaskSource, *, celery_id: str | None = None) -> Submitted:
        return await self._do(submitting.submit(self, source, celery_id))

    async def waiting_for(self, task_id: str) -> str | None:
        return await self._do(submitting.waiting_for(self, task_id))

    async def cancel(self, task_id: str, *, register_if_missing: bool = False) -> Cancelled:
        return await self._do(submitting.cancel(self, task_id, register_if_missing=register_if_missing))

    async def get(self, task_id: str, trajectories: Trajectories | str = Trajectories.FULL) -> TaskResult:
        return await self._do(reading.get(self.calls, task_id, Trajectories(trajectories)))

    async def rollout(self, rollout_id: str) -> RolloutResult:
        return await self._do(reading.rollout(self.calls, rollout_id))

    async def head(self, task_id: str) -> TaskHead:
        return await self._do(reading.head_of(self.calls, task_id))

    async def record(self, task_id: str) -> TaskRecord:
        return await self._do(reading.record_of(self.calls, task_id))

    async def wait(
        self,
        task_id: str,
        timeout_s: float | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
    ) -> TaskResult:
        return await self._do(reading.wait(self.calls, task_id, timeout_s, Trajectories(trajectories)))

    def follow(
        self, task_id: str | None = None, after: str | None = None, wait_s: float = 15.0, outage_s: float = OUTAGE_S
    ) -> AsyncIterator[Event]:
        return each_async(self.ledger, reading.follow(self.calls, task_id, after, wait_s, Outage(outage_s)))

    # --- results

    def results(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> AsyncIterator[RolloutResult]:
        steps = stream(
            self.calls, task_ids, run_id, Trajectories(trajectories), seen, timeout_s=timeout_s, outage_s=outage_s
        )
        return each_async(self.ledger, steps)

    def groups(
        self,
        task_ids: str | Iterable[str] = (),
        *,
        run_id: str | None = None,
        trajectories: Trajectories | str = Trajectories.FULL,
        seen: Collection[str] = (),
        timeout_s: float | None = None,
        outage_s: float = OUTAGE_S,
    ) -> AsyncIterator[TaskResult]:
        steps = stream(
            self.calls, task_ids, run_id, Trajectories(trajectories), seen,
            whole_tasks=True, timeout_s=timeout_s, outage_s=outage_s,
        )  # fmt: skip
        return each_async(self.ledger, steps)

    async def acknowledge(self, target: str | Iterable[str]) -> int:
        return await self._do(acknowledging.acknowledge(self.calls, Archive.of(self.topology), target))

    # --- runs

    async def run(self, run_id: str) -> RunState:
        return await self.ledger.do(run_state(self.calls.keys, check_id("run", run_id)))

    async def runs(self) -> list[RunState]:
        return await self._do(controls.runs(self))

    async def pause_run(self, run_id: str) -> RunState:
        return await self._do(controls.pause_run(self, run_id, on=True))

    async def resume_run(self, run_id: str) -> RunState:
        return await self._do(controls.pause_run(self, run_id, on=False))

    async def limits(self) -> Published:
        return await self.ledger.do(published(self.calls.keys, self.topology.limits))

    async def set_limits(self, limits: LimitsSection) -> Published:
        await self.ledger.do(publish(self.calls, limits, BY_COMMAND, anyway=True))
        return await self.limits()

    async def set_policy_version(self, run_id: str, version: int) -> RunState:
        await self.ledger.do(set_policy_version(self.calls, run_id, version))
        return await self.run(run_id)

    # --- model calls

    async def inference_state(self, run_id: str | None = None) -> InferenceState:
        return await self._do(pausing.inference_state(self.calls, of_run(run_id)))

    async def pause_inference(
        self,
        *,
        mode: PauseMode = "drain",
        timeout_s: float = TIMEOUT_S,
        lease_s: float = LEASE_S,
        run_id: str | None = None,
    ) -> InferenceState:
        steps = pausing.pause_inference(
            self.calls, mode=mode, timeout_s=timeout_s, lease_s=lease_s, run_id=of_run(run_id)
        )
        return await self._do(steps)

    async def resume_inference(self, run_id: str | None = None) -> bool:
        return await self._do(pausing.resume_inference(self.calls, of_run(run_id)))

    # --- nodes

    async def nodes(self) -> list[NodeRecord]:
        return await self.ledger.nodes()

    async def drain(self, node_id: str, on: bool = True, deadline_s: float | None = None) -> NodeRecord:
        return await self._do(controls.drain(self, node_id, on, deadline_s))

    async def pause_node(self, node_id: str, on: bool = True) -> NodeRecord:
        return await self._do(controls.pause_node(self, node_id, on))

    async def resume_node(self, node_id: str) -> NodeRecord:
        return await self.pause_node(node_id, on=False)

    async def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        return await self._do(controls.set_capacity(self, node_id, run_workers))

    async def aclose(self) -> None:
        await self.ledger.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
