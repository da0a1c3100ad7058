"""The node: registration, heartbeat, leases, drain; it supervises the proxy and lends the engine to Celery."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx

import polarq
from polarq.callback.outbox import deliver_task_callback
from polarq.client import Client
from polarq.client.states import publish_state
from polarq.contracts.node import NodeHealth, NodeRecord
from polarq.contracts.task import Task
from polarq.errors import LedgerUnavailable, PolarqError
from polarq.ledger import AsyncLedger, calls_for, without_password
from polarq.ledger.reaping import left_to_tell
from polarq.ledger.records import ActiveRollout
from polarq.ledger.server import server_facts
from polarq.registry import names
from polarq.settings import Settings
from polarq.topology import Node, Topology, redis_url
from polarq_worker.engine import Engine, Stop, as_job_result
from polarq_worker.flags import Flags
from polarq_worker.lease_watch import LoopWatch
from polarq_worker.leftovers import OneWorker, clear_sandboxes
from polarq_worker.patience import Patience
from polarq_worker.proxy_process import ProxyProcess
from polarq_worker.reaper import Reaper
from polarq_worker.renewal import Renewal
from polarq_worker.services import Services
from polarq_worker.slots import Slots
from polarq_worker.spool import Spool, commit_leftovers
from polarq_worker.upkeep import Upkeep
from polarq_worker.work import WorkSeeker, place_of

if TYPE_CHECKING:
    from celery import Celery

    from polarq_worker.pool import EnginePool

log = logging.getLogger("polarq.worker.node")

_ALIVE_FACTOR = 2.5
"""A node counts as gone after this many missed heartbeats."""

_HEALTH_TIMEOUT_S = 5.0

_SHORTEST_LOOK_S = 0.05
"""Between two looks at flags or work, however often there is reason to."""

_LAST_WORDS_S = 20.0
"""How long a leaving worker tries to tell the ledger what it gives back."""


class NodeService:
    """One worker's node. `start` and `stop` are called on the pool's loop, `run_job` in a job's thread."""

    def __init__(self, app: Celery, pool: EnginePool, node: Node, topology: Topology, settings: Settings) -> None:
        self.app = app
        self.pool = pool
        self.node = node
        self.topology = topology
        self.settings = settings
        self.state_dir = settings.state_dir / node.id
        self.health = NodeHealth()
        self._look_soon = asyncio.Event()
        self._freed = asyncio.Event()
        self.flags = Flags()
        self.proxy: ProxyProcess | None = None
        self._started_at = datetime.now(UTC)
        self._loops: list[asyncio.Task[None]] = []
        self.patience = Patience()
        self._callbacks: set[asyncio.Task[None]] = set()
        self._notes: set[asyncio.Task[None]] = set()
        self._one_worker = OneWorker(self.state_dir)
        self.spool = Spool(self.state_dir / "spool", topology.retention.result_s)
        self.watch = LoopWatch(topology.gateway.lease_s / 4, self._on_loop_return)

    # --- life

    async def start(self) -> None:
        """Connects, starts the proxy, announces the node. Raises `PolarqError` with one line that says what to do."""
        self._make_folders()
        self.ledger = AsyncLedger(redis_url(self.topology, self.settings), calls_for(self.topology))
        await self._check_redis()
        self.client = Client(self.topology, self.settings, self.app)
        if self.node.proxy.mode == "embedded":
            self.proxy = ProxyProcess(
                self.node.id, self.settings.topology_path, self.state_dir, self.settings.proxy_redis_url
            )
            await self.proxy.start()
        node = self.node
        slots = Slots(
            prepare=node.max_init_workers,
            ready=node.ready_places,
            run=node.max_run_workers,
            post=node.max_postrun_workers,
        )
        place = place_of(node, self.topology)
        self.engine = Engine(
            Services(
                topology=self.topology,
                node=node,
                place=place,
                ledger=self.ledger,
                slots=slots,
                patience=self.patience,
                spool=self.spool,
                state_dir=self.state_dir,
                proxy_url=lambda: self.node.proxy_url,
                ring=self._ring,
                tell=self._tell,
            )
        )
        self.work = WorkSeeker(self.ledger, self.client, self.topology, self.settings, place, lambda: self.free)
        self._renewal = Renewal(self.engine, self.topology.gateway.lease_s)
        await self._clear_leftovers()
        await self._look_at_proxy()
        await self._announce()
        await self._note("node.joined")
        self.watch.start()
        gateway = self.topology.gateway
        self.reaper = Reaper(self.ledger, self.client, self.topology, self.settings, node.id)
        self._loops = [
            asyncio.create_task(self._every(self._renewal.period_s, self._renewal.renew), name="leases"),
            asyncio.create_task(self._every(gateway.heartbeat_interval_seconds, self._beat), name="heartbeat"),
            asyncio.create_task(self._every(_SHORTEST_LOOK_S, self._look_when_told), name="looks"),
            asyncio.create_task(self._every(_SHORTEST_LOOK_S, self._seek_when_freed), name="work"),
            asyncio.create_task(self._every(gateway.reap_interval_s, self.reaper.step), name="reaper"),
            *self._upkeep_loops(),
        ]
        log.info("node %s is up: proxy %s, capacity %d", node.id, node.proxy_url, node.capacity)

    def _upkeep_loops(self) -> list[asyncio.Task[None]]:
        upkeep = Upkeep(self.ledger, self.topology)
        period_s = self.topology.gateway.heartbeat_interval_seconds
        loops = [asyncio.create_task(self._every(period_s, upkeep.memory_step), name="memory")]
        if upkeep.archives:
            loops.append(asyncio.create_task(self._every(period_s, upkeep.archive_step), name="archive"))
        return loops

    async def _clear_leftovers(self) -> None:
        """What a killed worker of this node left: results it had finished are committed, sandboxes removed."""
        if not self._one_worker.take():
            log.warning("another worker of this node lives in %s; what lies there is left to it", self.state_dir)
            return
        services = self.engine.services
        cleared = await asyncio.to_thread(clear_sandboxes, services.rollouts_dir, services.logs_dir)
        if cleared:
            log.warning("cleared the sandboxes of a worker that was killed: %s", ", ".join(cleared))
        for task_id in await commit_leftovers(self.spool, self.ledger, self.topology.gateway.lease_s):
            await asyncio.to_thread(self.finish_task, task_id)

    async def _check_redis(self) -> None:
        """Refuses a Redis that would lose rollouts, and says what is risky about it otherwise."""
        facts = await self.ledger.do(server_facts())
        where = f"Redis at {without_password(self.ledger.url)}"
        if facts.problem is not None:
            raise LedgerUnavailable(f"{where}: {facts.problem}")
        if facts.warning is not None:
            log.warning("%s: %s", where, facts.warning)

    def _make_folders(self) -> None:
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            (self.state_dir / "logs").mkdir(exist_ok=True)
            (self.state_dir / "rollouts").mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise PolarqError(
                f"the state folder {self.state_dir} cannot be used ({exc.strerror}); set POLARQ_STATE_DIR to another"
            ) from None

    def leaving(self) -> None:
        """The worker is stopping: nothing new is taken, and a cancelled job is given back. Safe from any thread."""
        self.engine.stopping = True

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; lets what runs end within the grace, then gives it back to the queue."""
        self.leaving()
        await self._say_so()
        await self._note("node.draining")
        if self.engine.held:
            log.info("stopping: %d rollouts in flight get up to %g s", len(self.engine.held), grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self.engine.idle.wait()
        except TimeoutError:
            await self.release_all()

    async def _say_so(self) -> None:
        """Announces the node as it is now and not at the next heartbeat."""
        try:
            async with asyncio.timeout(5):
                await self._announce()
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("the ledger could not be told that the node is stopping: %s", exc)

    async def release_all(self) -> None:
        """Gives everything in flight back to the queue now. While the ledger is away this is tried for a while only."""
        self.leaving()
        self.engine.stop_all(Stop.RELEASE)
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.engine.idle.wait()
        except TimeoutError:
            rest = ", ".join(sorted(self.engine.held))
            log.error("could not give back %s: the ledger is away; their leases end by themselves", rest)
            self.patience.over = True
            await self.engine.idle.wait()

    async def stop(self) -> None:
        """After the drain: leaves the ledger and stops the proxy."""
        for loop in [*self._loops, *self._callbacks, *self._notes]:
            loop.cancel()
        self.watch.stop()
        if self.proxy is not None:
            await self.proxy.stop()
        try:
            async with asyncio.timeout(5):
                await self.ledger.do(self.ledger.calls.depart(self.node.id))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("could not say goodbye to the ledger (%s); the node's record expires by itself", exc)
        await self.reaper.aclose()
        await self._note("node.left")
        await self.work.aclose()
        await self.ledger.aclose()
        await self._renewal.aclose()
        self._one_worker.release()
        self.client.close()

    def _tell(self, stopping: Sequence[ActiveRollout]) -> None:
        for rollout in stopping:
            if (held := self.engine.held.get(rollout.rollout_id)) is not None:
                held.stop(Stop.CANCEL)
        elsewhere = [r.job_id for r in stopping if r.rollout_id not in self.engine.held and r.job_id]
        if elsewhere:
            telling = asyncio.create_task(asyncio.to_thread(self._revoke, elsewhere), name="tell of an early stop")
            self._notes.add(telling)
            telling.add_done_callback(self._notes.discard)

    def _revoke(self, job_ids: Sequence[str]) -> None:
        try:
            self.app.control.revoke(job_ids, terminate=True)
        except Exception as exc:
            log.warning("rollouts that have to stop could not be told at once: %s", exc)

    async def _ring(self, task: Task, rollout_id: str) -> None:
        index = int(rollout_id.rpartition(".")[2])
        try:
            await asyncio.to_thread(self.client.ring_again, task, index, leaving=self.node.id)
        except Exception as exc:
            log.warning("rollout %s: its doorbell could not be rung (%s); it waits in the ledger", rollout_id, exc)

    async def _note(self, kind: str, **data: Any) -> None:
        """Writes an event about this node; a ledger that is away costs the event only."""
        try:
            async with asyncio.timeout(5):
                await self.ledger.do(self.ledger.calls.note(kind, {"node_id": self.node.id, **data}))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("event %s not written: %s", kind, exc)

    # --- jobs

    @property
    def capacity(self) -> int:
        """Rollouts that may be in flight now. 0 while draining, paused, stopping, blocked, or without inference."""
        if self.engine.stopping or self.watch.blocked:
            return 0
        if self.flags.holds_back:
            return 0
        return 0 if self.health.inference is False else self.places

    @property
    def free(self) -> int:
        """Rollouts it would take now beside those in flight."""
        return self.capacity - self.pool.in_flight

    @property
    def places(self) -> int:
        """Rollouts it may hold at once."""
        return self.flags.resized(self.node).capacity

    def run_job(self, rollout_id: str, job_id: str) -> dict[str, Any] | None:
        """Runs one doorbell in the calling thread; see `polarq.tasks.RolloutRunner`."""
        try:
            ended = self.pool.run(self.engine.run(rollout_id, job_id))
        except LedgerUnavailable as exc:
            # Only when the worker has to go. Celery would try for minutes to store that in the same Redis.
            log.error("rollout %s: left as it is in the ledger: %s", rollout_id, exc)
            return None
        if ended is None:
            return None
        self.finish_task(ended.task_id)
        return as_job_result(ended)

    def finish_task(self, task_id: str) -> None:
        """Celery's result and the callback follow the ledger; that they fail costs nobody a rollout."""
        published = False
        try:
            publish_state(self.app, self.client, task_id)
            published = True
        except Exception:
            log.exception("task %s: its Celery result could not be written; the ledger has it", task_id)
        # Does nothing unless the task has ended, has an address, and nobody else delivers.
        self.pool.loop.call_soon_threadsafe(self._start_callback, task_id, published)

    def _start_callback(self, task_id: str, published: bool) -> None:
        delivery = asyncio.create_task(self._call_back(task_id, published), name=f"callback {task_id}")
        self._callbacks.add(delivery)
        delivery.add_done_callback(self._callbacks.discard)

    async def _call_back(self, task_id: str, published: bool) -> None:
        """Runs beside everything else: the task's own end does not wait for the trainer's server."""
        try:
            await deliver_task_callback(self.ledger, self.topology, task_id, secret=self.settings.callback_secret)
            if published:
                await self.ledger.do(left_to_tell(self.ledger.calls, task_id, told=True))
        except PolarqError as exc:
            log.error("task %s: its callback was not delivered: %s", task_id, exc)

    # --- loops

    async def _every(self, period_s: float, step: Any) -> None:
        """Calls `step` once a period. A step that fails is logged and tried again: the loop never ends by itself."""
        due = time.monotonic()
        while True:
            due = max(due + period_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                await step()
            except LedgerUnavailable as exc:
                log.warning("%s", exc)
            except Exception:
                log.exception("node %s: %s failed", self.node.id, step.__name__)

    def _on_loop_return(self, stood_s: float, whole_process: bool) -> None:
        noting = asyncio.create_task(
            self._note("node.blocked", blocked_s=round(stood_s, 3), whole_process=whole_process), name="note"
        )
        self._notes.add(noting)
        noting.add_done_callback(self._notes.discard)

    def look_again(self) -> None:
        """Reads the flags before the next heartbeat is due. Safe from any thread."""
        self.pool.loop.call_soon_threadsafe(self._look_soon.set)

    def freed(self) -> None:
        """A job has ended: what waits for other nodes may be for its place. Safe from any thread."""
        if not self.pool.loop.is_closed():
            self.pool.loop.call_soon_threadsafe(self._freed.set)

    async def _seek_when_freed(self) -> None:
        await self._freed.wait()
        self._freed.clear()
        await self.work.seek()

    async def _look_when_told(self) -> None:
        await self._look_soon.wait()
        self._look_soon.clear()
        await self._announce()
        self.pool.wake()
        await self.work.seek()

    async def _beat(self) -> None:
        await self._look_at_proxy()
        await self._announce()
        self.pool.wake()
        await self.work.seek()

    async def _announce(self) -> None:
        alive_s = self.topology.gateway.heartbeat_interval_seconds * _ALIVE_FACTOR
        before = self.flags
        said = await self.ledger.do(self.ledger.calls.announce(self.record(), alive_s))
        self.flags = Flags.read(said)
        if before.holds_back != self.flags.holds_back:
            await self._note("node.paused" if self.flags.holds_back else "node.resumed")
        if before.run_workers != self.flags.run_workers:
            now = self.flags.resized(self.node)
            self.engine.services.slots.resize(run=now.max_run_workers, ready=now.ready_places)
            await self._note("node.resized", run_workers=now.max_run_workers)
        if self.flags.drain_over and self.engine.held:
            log.info("the drain's deadline has passed: %d rollouts are given back", len(self.engine.held))
            self.engine.stop_all(Stop.RELEASE)

    def record(self) -> NodeRecord:
        """What this node says of itself."""
        node, endpoint = self.node, self.node.endpoints[0]
        return NodeRecord(
            node_id=node.id,
            stopping=self.engine.stopping,
            max_init_workers=node.max_init_workers,
            max_run_workers=self.flags.resized(node).max_run_workers,
            max_postrun_workers=node.max_postrun_workers,
            metrics=self.engine.services.slots.metrics(),
            loop_lag_s=round(self.watch.lag_s, 4),
            proxy_url=node.proxy_url,
            inference_url=endpoint.base_url,
            engine=endpoint.engine,
            model=node.model_served or endpoint.model,
            places=self.places,
            labels=node.labels,
            runtimes=names("runtimes"),
            default_runtime=node.default_runtime is not None,
            health=self.health,
            version=polarq.__version__,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            last_seen_at=datetime.now(UTC),
        )

    async def _look_at_proxy(self) -> None:
        """Asks the proxy how it and the inference behind it are. Without inference nothing new is taken."""
        before = self.health.inference
        self.health = await self._health()
        if self.health.inference is False and before is not False:
            log.error("node %s takes no rollouts: %s", self.node.id, self.health.message)
        elif self.health.inference and before is False:
            log.info("node %s: inference is back", self.node.id)

    async def _health(self) -> NodeHealth:
        try:
            async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False) as http:
                token = self.settings.token
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                answer = (await http.get(f"{self.node.proxy_url}/health", headers=headers)).json()
        except (httpx.HTTPError, ValueError) as exc:
            text = f"the proxy at {self.node.proxy_url} does not answer: {type(exc).__name__}"
            return NodeHealth(proxy=False, inference=self.health.inference, message=text)
        return read_health(answer)


def read_health(answer: Any) -> NodeHealth:
    """The proxy's /health as a node's health: inference is usable when one endpoint answers and gives token ids."""
    endpoints = answer.get("inference") if isinstance(answer, dict) else None
    if not isinstance(endpoints, list) or not endpoints:
        return NodeHealth(proxy=True)
    problems = [_problem(endpoint) for endpoint in endpoints]
    if all(problems):
        return NodeHealth(proxy=True, inference=False, message="; ".join(p for p in problems if p))
    if any(e.get("reachable") and e.get("ids") for e in endpoints):
        return NodeHealth(proxy=True, inference=True)
    return NodeHealth(proxy=True)


def _problem(endpoint: Any) -> str | None:
    """Why every rollout on this endpoint would be wasted; None when it would not, or is not known yet."""
    url, served, model = endpoint.get("url"), endpoint.get("served") or [], endpoint.get("model")
    if endpoint.get("reachable") is False:
        return str(endpoint.get("problem") or f"{url} does not answer")
    if served and model not in served:
        return f"{url} serves {', '.join(served)} and not '{model}'; set the node's model_served to what it serves"
    if endpoint.get("ids") is False:
        return str(endpoint.get("problem") or f"{url} gives no token ids; use vLLM 0.14 or later")
    return None
