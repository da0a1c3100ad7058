"""The node: registration, heartbeat, leases, drain; it supervises the proxy and lends the engine to Celery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polarq.client import Client
from polarq.contracts.task import Task
from polarq.errors import ArtifactsUnavailable, LedgerUnavailable
from polarq.ledger import AsyncLedger, calls_for
from polarq.ledger.records import ActiveRollout
from polarq.settings import Settings
from polarq.topology import Node, Topology, redis_url
from polarq.topology.redis_address import without_password
from polarq_worker.collected import settle_leftovers
from polarq_worker.engine import Ended, Engine, Stop, as_job_result
from polarq_worker.entering import check_redis, make_folders, take_place
from polarq_worker.incarnation import Incarnation
from polarq_worker.lease_watch import LoopWatch
from polarq_worker.leftovers import clear_sandboxes
from polarq_worker.limits import Limits
from polarq_worker.looks import SHORTEST_LOOK_S, Looks
from polarq_worker.loops import every
from polarq_worker.network.sandbox_network import Networks
from polarq_worker.orphans import Orphans
from polarq_worker.patience import Patience
from polarq_worker.presence import Presence
from polarq_worker.proxy_process import ProxyProcess
from polarq_worker.reaper import Reaper
from polarq_worker.renewal import Renewal
from polarq_worker.requests import doorbell_of
from polarq_worker.services import Services
from polarq_worker.slots import Slots
from polarq_worker.spool import Spool, commit_leftovers
from polarq_worker.telling import Telling
from polarq_worker.upkeep import Upkeep
from polarq_worker.warm.ahead import LookAhead
from polarq_worker.warm.parts import Warm
from polarq_worker.warm.sweeping import Sweeper
from polarq_worker.work import WorkSeeker, place_of

if TYPE_CHECKING:
    from celery import Celery

    from polarq_worker.pool import EnginePool

log = logging.getLogger("polarq.worker.node")

_SWEEP_S = 600.0
_LOOK_AHEAD_S = 0.5
"""Between two looks at what will be asked for. Most find nothing that was not known."""
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
        self.proxy: ProxyProcess | None = None
        self._loops: list[asyncio.Task[None]] = []
        self.patience = Patience()
        self._notes: set[asyncio.Task[None]] = set()
        self._redis_url = redis_url(topology, settings)
        deployment = f"{without_password(self._redis_url)} {topology.redis.prefix}"
        self.incarnation = Incarnation(self.state_dir, deployment)
        self.spool = Spool(self.state_dir / "spool", topology.retention.result_s)
        self.watch = LoopWatch(topology.gateway.lease_s / 4, self._on_loop_return)

    # --- life

    async def start(self) -> None:
        """Connects, starts the proxy, announces the node. Raises `PolarqError` with one line that says what to do."""
        make_folders(self.state_dir)
        self.ledger = AsyncLedger(self._redis_url, calls_for(self.topology))
        await check_redis(self.ledger)
        self._others = await asyncio.to_thread(self.incarnation.begin)
        self.incarnation.say_how_it_ends()
        await self._take_place(0)
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
        self.limits = Limits(self.ledger, self.topology, node.id)
        place = replace(place_of(node, self.topology, self.incarnation.id), runs=self.limits.runs)
        relay_log = self.state_dir / "logs" / "relay.log"
        at = None if self.proxy is None else self.proxy.relay_address
        self.networks = Networks(node, self.topology, self.settings, relay_log, at)
        self.warm = Warm.of(self.topology, node, self.incarnation.id, self.ledger, self.patience, self.state_dir)
        self.engine = Engine(
            Services(
                topology=self.topology,
                node=node,
                place=place,
                ledger=self.ledger,
                slots=slots,
                warm=self.warm,
                networks=self.networks,
                patience=self.patience,
                spool=self.spool,
                state_dir=self.state_dir,
                proxy_there=self._proxy_there,
                ring=self._ring,
                tell=self._tell,
            )
        )
        self.presence = Presence(self.engine, self.watch, self.settings)
        self.telling = Telling(
            self.app, self.client, self.ledger, self.topology, self.settings.callback_secret, self.pool.loop
        )
        self.work = WorkSeeker(
            self.ledger,
            self.client,
            self.topology,
            self.settings,
            place,
            capacity=lambda: self.capacity,
            in_flight=lambda: self.pool.in_flight,
        )
        self.look_ahead = LookAhead(
            self.ledger,
            self.topology,
            node,
            place,
            self.warm.recipes,
            self.warm.pool,
            takes_work=lambda: self.capacity > 0,
            is_full=lambda: self.pool.in_flight >= self.capacity,
            claimed=self.engine.without_sandbox,
        )
        self.sweeper = Sweeper(self.warm.maker, self.ledger, alone=self._alone)
        self.looks = Looks(self.presence, self.work, self.pool)
        self._renewal = Renewal(self.engine, self.topology.gateway.lease_s)
        await self._take_place(self.presence.alive_s)
        await self._clear_leftovers()
        await self.presence.look_around()
        await self.presence.clock.ask(self.ledger)
        # Whoever sees the node finds its limits too.
        await self.limits.publish()
        await self.presence.announce()
        await self.presence.note("node.joined")
        self.watch.start()
        gateway = self.topology.gateway
        self.reaper = Reaper(self.ledger, self.client, self.topology, self.settings, node.id, self.telling.call_back)
        await self.reaper.take_back_from(self._others.dead)
        await asyncio.to_thread(self.incarnation.forget, self._others.dead)
        self._loops = [
            asyncio.create_task(every(self._renewal.period_s, self._renewal.renew), name="leases"),
            asyncio.create_task(every(gateway.heartbeat_interval_seconds, self._beat), name="heartbeat"),
            asyncio.create_task(every(SHORTEST_LOOK_S, self.looks.when_told), name="looks"),
            asyncio.create_task(every(SHORTEST_LOOK_S, self.looks.when_freed), name="work"),
            asyncio.create_task(every(gateway.reap_interval_s, self.reaper.step), name="reaper"),
            *self._upkeep_loops(),
        ]
        # What has waited for this node has no message in its queue.
        self.looks.freed()
        log.info("node %s is up: proxy %s, capacity %d", node.id, node.proxy_url, node.capacity)

    def _upkeep_loops(self) -> list[asyncio.Task[None]]:
        upkeep = Upkeep(self.ledger, self.topology)
        period_s = self.topology.gateway.heartbeat_interval_seconds
        loops = [
            asyncio.create_task(every(period_s, upkeep.memory_step), name="memory"),
            asyncio.create_task(every(period_s, self.limits.step), name="limits"),
        ]
        loops.append(asyncio.create_task(every(self.topology.gateway.lease_s, self._stop_orphans), name="orphans"))
        loops.append(asyncio.create_task(every(_LOOK_AHEAD_S, self._look_ahead), name="look ahead"))
        loops.append(asyncio.create_task(every(_SWEEP_S, self._sweep_artifacts), name="artifacts"))
        if upkeep.archives:
            loops.append(asyncio.create_task(every(period_s, upkeep.archive_step), name="archive"))
        return loops

    async def _take_place(self, alive_s: float) -> None:
        await take_place(self.ledger, self.node.id, self.incarnation.id, self._others, alive_s)

    async def _clear_leftovers(self) -> None:
        """What a killed worker of this node left: results it had finished are committed, sandboxes removed."""
        dead = {one.incarnation for one in self._others.dead}
        await Orphans(self.ledger, self.topology).stop_own(self.node.id, self.incarnation.id, dead)
        if self._others.living:
            log.warning("another worker of this node lives in %s; what lies there is left to it", self.state_dir)
            return
        services = self.engine.services
        cleared = await asyncio.to_thread(clear_sandboxes, services.rollouts_dir, services.logs_dir)
        if cleared:
            log.warning("cleared the sandboxes of a worker that was killed: %s", ", ".join(cleared))
        # After their logs were kept.
        await self.sweeper.at_start()
        await self.warm.snapshots.settle()
        for task_id in await commit_leftovers(self.spool, self.ledger, self.topology.gateway.lease_s):
            await asyncio.to_thread(self.telling.tell, task_id)
        dropped = await settle_leftovers(services.collecting_dir, services.artifacts, self.ledger)
        if dropped:
            log.warning("dropped the files of %d attempts whose results were not taken", dropped)

    async def _sweep_artifacts(self) -> None:
        """Files that came back from sandboxes and have lain for as long as they are kept."""
        try:
            await asyncio.to_thread(self.engine.services.artifacts.sweep, self.topology.artifacts.keep_s)
        except ArtifactsUnavailable as exc:
            log.warning("%s", exc)

    def _alone(self) -> bool:
        return not self._others.living and not self.presence.superseded

    async def _look_ahead(self) -> None:
        if self.engine.stopping:
            self.warm.pool.tidy(all_of_it=True)
        else:
            await self.look_ahead.step()

    async def _stop_orphans(self) -> None:
        """What was left by a worker of this node of which it was not known at the start that it is dead, and what is in
        nobody's record."""
        await self.reaper.orphans.stop_own(self.node.id, self.incarnation.id)
        await self.sweeper.step()

    async def _proxy_there(self) -> None:
        # One that somebody else runs is watched by whoever runs it.
        if self.proxy is not None:
            await self.proxy.listening.wait()

    def leaving(self) -> None:
        """The worker is stopping: nothing new is taken, and a cancelled job is given back. Safe from any thread."""
        self.engine.stopping = True

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; lets what runs end within the grace, then gives it back to the queue."""
        self.leaving()
        await self.presence.say_leaving()
        await self.presence.note("node.draining")
        if self.engine.held:
            log.info("stopping: %d rollouts in flight get up to %g s", len(self.engine.held), grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self.engine.idle.wait()
        except TimeoutError:
            await self.release_all()

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
        for loop in [*self._loops, *self._notes]:
            loop.cancel()
        await self.telling.aclose()
        self.watch.stop()
        # What the ledger does not take now, the next start sees.
        self.patience.over = True
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.warm.pool.aclose()
        except TimeoutError:
            log.error("not all sandboxes that waited were stopped within %g s", _LAST_WORDS_S)
        await self.networks.aclose()
        if self.proxy is not None:
            await self.proxy.stop()
        await self.presence.depart()
        await self.reaper.aclose(superseded=self.presence.superseded)
        await self.presence.note("node.left")
        await self.presence.aclose()
        await self.work.aclose()
        await self.ledger.aclose()
        await self._renewal.aclose()
        await asyncio.to_thread(self.incarnation.end)
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

    # --- jobs

    @property
    def capacity(self) -> int:
        """Rollouts that may be in flight now."""
        return self.presence.capacity

    def awaited(self, tracer_args: Any) -> Coroutine[Any, Any, Ended | None] | None:
        """What a job waits for, if it is a doorbell."""
        doorbell = doorbell_of(tracer_args)
        if doorbell is None:
            return None
        if self.pool.in_flight < self.capacity:
            # A doorbell came and there is more room: more may wait than was rung for.
            self.looks.others_first()
        return self.engine.run(*doorbell)

    def run_job(self, rollout_id: str, job_id: str) -> dict[str, Any] | None:
        """Ends one doorbell's job in the calling thread; see `polarq.tasks.RolloutRunner`."""
        try:
            ended = self.pool.result(lambda: self.engine.run(rollout_id, job_id))
        except LedgerUnavailable as exc:
            # Only when the worker has to go. Celery would try for minutes to store that in the same Redis.
            log.error("rollout %s: left as it is in the ledger: %s", rollout_id, exc)
            return None
        if ended is None:
            return None
        self.telling.tell(ended.task_id)
        return as_job_result(ended)

    # --- loops

    def _on_loop_return(self, stood_s: float, whole_process: bool) -> None:
        noting = asyncio.create_task(
            self.presence.note("node.blocked", blocked_s=round(stood_s, 3), whole_process=whole_process), name="note"
        )
        self._notes.add(noting)
        noting.add_done_callback(self._notes.discard)

    async def _beat(self) -> None:
        await asyncio.to_thread(self.incarnation.beat)
        await self.presence.look_around()
        await self.looks.look()
