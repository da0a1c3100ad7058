"""The reaper: puts right what a lost node, a lost message or a lost last word left behind.

Every worker has one and one of them at a time is at it, by a key with an expiry in Redis. That two are at it for a
moment does no harm: each step decides again inside Redis (`polarq.ledger.reaping`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kombu.exceptions import OperationalError

from polarq.client import Client
from polarq.client.deployment import FINISH_TASK, SUBMIT_QUEUE
from polarq.contracts.task import split_rollout_id
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger
from polarq.ledger import incarnations as places
from polarq.ledger import reaping as steps
from polarq.ledger.blame import ALONE, LostTogether, Share
from polarq.ledger.incarnations import Holding
from polarq.settings import Settings
from polarq.topology import Topology
from polarq_worker.doorbells import Doorbells, Fleet, all_of
from polarq_worker.incarnation import NOT_KNOWN, Dead
from polarq_worker.orphans import Orphans

log = logging.getLogger("polarq.worker.reaper")

_SHORTEST_TURN_S = 5.0
_AT_WORK = 0.02
"""Share of the time that may go into reading queues."""
_MEND_EVERY_S = 10.0
_TASKS_AT_ONCE = 50
_LEASES_AT_ONCE = 1000


class Reaper:
    """One worker's reaper; `step` is called every few seconds."""

    def __init__(
        self,
        ledger: AsyncLedger,
        client: Client,
        topology: Topology,
        settings: Settings,
        node_id: str,
        call_back: Callable[[str], None] | None = None,
    ) -> None:
        """`call_back` starts the delivery of an ended task's callback."""
        self.ledger = ledger
        self.calls = ledger.calls
        self.client = client
        self.topology = topology
        self._call_back = call_back
        self._node_id = node_id
        self.me = f"{node_id}/{secrets.token_hex(4)}"
        self.server: str | None = None
        """The Redis that was there at the last turn."""
        self._quiet_until = 0.0
        self.read_queues_at = 0.0
        """When to read the queues again, by the monotonic clock: how long it took decides."""
        self._mend_at = 0.0
        self._cursor = 0
        self._lost: dict[tuple[str, str], LostTogether] = {}
        """(node, incarnation) -> what was lost with it, for a while."""
        self.counts: Counter[str] = Counter()
        self.doorbells = Doorbells(ledger, client, topology, settings, self.counts)
        self.orphans = Orphans(ledger, topology)
        self._stopping: asyncio.Task[None] | None = None

    async def step(self) -> None:
        """One turn, if it is this worker's. Raises `LedgerUnavailable`."""
        gateway = self.topology.gateway
        turn_s = max(_SHORTEST_TURN_S, 3 * gateway.reap_interval_s)
        try:
            if await self.ledger.do(steps.take_turn(self.calls, self.me, turn_s)):
                await self._turn()
        except LedgerUnavailable:
            # Nobody could renew either: as if all leases had been renewed when it comes back.
            self._be_quiet(gateway.lease_s)
            raise

    async def aclose(self, *, superseded: bool = False) -> None:
        """After the node said goodbye: what waits in its queue is rung elsewhere (or left to the worker that has
        taken its place), and another worker takes the turn."""
        if self._stopping is not None:
            self._stopping.cancel()
        try:
            async with asyncio.timeout(5):
                fleet = Fleet(await self.ledger.nodes(), self.topology)
                if fleet.takers and not superseded:
                    await self.doorbells.clear(self._node_id, set(), fleet, at_once=True)
                await self.ledger.do(steps.give_turn_up(self.calls, self.me))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("the reaper's turn could not be given up (%s); it ends by itself", exc)
        await self.doorbells.aclose()

    def _be_quiet(self, seconds: float) -> None:
        self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)

    async def _turn(self) -> None:
        gateway = self.topology.gateway
        try:
            await self._listen()
            for node_id in await self.ledger.do(steps.reap_nodes(self.calls, self.topology.retention.lost_nodes_s)):
                log.warning("node %s is gone without a word", node_id)
                self.counts["nodes_lost"] += 1
            reads_queues = time.monotonic() >= self.read_queues_at
            fleet = Fleet(await self.ledger.nodes(), self.topology)
            # Where no place is free nothing has to be rung, however much waits.
            most = steps.WAITING_AT_ONCE if reads_queues and fleet.has_free_places else 0
            due = await self.ledger.do(steps.look(self.calls, gateway.ring_again_s, most))
            if time.monotonic() >= self._quiet_until:
                await self._take_back(due.expired, fleet)
            await self._remind(due.untold)
            if time.monotonic() >= self._mend_at:
                self._mend_at = time.monotonic() + _MEND_EVERY_S
                await self._mend()
                self._stop_orphans(fleet)
            if reads_queues:
                began = time.monotonic()
                if await self.doorbells.ring_what_is_in_no_queue(due.waiting, fleet):
                    self.read_queues_at = time.monotonic() + (time.monotonic() - began) / _AT_WORK
        finally:
            await self._count()

    async def _count(self) -> None:
        if counts := {kind: number for kind, number in self.counts.items() if number}:
            self.counts.clear()
            await self.ledger.do(steps.count_reaped(self.calls, counts))

    async def _listen(self) -> None:
        """After a restart or a failover of Redis, workers get the time to renew what ran out meanwhile."""
        lease_s = self.topology.gateway.lease_s
        life = await self.ledger.do(steps.server_life())
        if self.server is not None and self.server != life.run_id:
            self._be_quiet(lease_s)
        elif life.up_s < lease_s:
            self._be_quiet(lease_s - life.up_s)
        self.server = life.run_id

    # --- expired leases

    async def _take_back(self, expired: Sequence[str], fleet: Fleet) -> None:
        if expired:
            holdings = await self.ledger.do(places.holdings(self.calls, expired))
            await self._see_who_is_lost(holdings)
        await self._reap(dict.fromkeys(expired, NOT_KNOWN), fleet)

    async def take_back_from(self, dead: Sequence[Dead]) -> None:
        """What these incarnations of this node held: they are dead, so nothing waits for their leases. Raises
        `LedgerUnavailable`."""
        if not dead:
            return
        by_id = {one.incarnation: one for one in dead}
        held = [h for h in await self._holdings() if h.owner == self._node_id and h.incarnation in by_id]
        await self._see_who_is_lost(held)
        lost = {h.rollout_id: by_id[h.incarnation] for h in held}
        await self._reap(lost, Fleet(await self.ledger.nodes(), self.topology))
        await self._count()

    async def _holdings(self) -> list[Holding]:
        """All that anybody holds."""
        leased = await self.ledger.do(places.leased(self.calls))
        pages = [leased[at : at + _LEASES_AT_ONCE] for at in range(0, len(leased), _LEASES_AT_ONCE)]
        return [h for page in pages for h in await self.ledger.do(places.holdings(self.calls, page))]

    async def _see_who_is_lost(self, lost: Sequence[Holding]) -> None:
        """What was lost together with these: all that their workers hold, also what is found at a later look."""
        now = time.monotonic()
        self._lost = {of: seen for of, seen in self._lost.items() if seen.until > now}
        workers = {(holding.owner, holding.incarnation) for holding in lost}
        if workers <= self._lost.keys():
            return
        for holding in await self._holdings():
            of = (holding.owner, holding.incarnation)
            if of in workers:
                until = now + self.topology.gateway.lease_s
                self._lost.setdefault(of, LostTogether(until)).add(holding)

    def _share(self, rollout_id: str) -> Share:
        shares = [seen.share(rollout_id) for seen in self._lost.values() if rollout_id in seen.before]
        return shares[-1] if shares else ALONE

    async def _reap(self, lost: Mapping[str, Dead], fleet: Fleet) -> None:
        """`lost`: rollouts, and what is known of the worker that held each."""
        most = self.topology.gateway.max_attempts
        given_back: dict[str, str] = {}
        ended: set[str] = set()
        reaping = [
            steps.reap_lost(self.calls, i, most, self._share(i), dead=worker.incarnation, how=worker.how)
            for i, worker in lost.items()
        ]
        for rollout_id, reaped in zip(lost, await all_of(self.ledger, reaping), strict=True):
            if reaped.action == "held":
                continue
            self.counts[reaped.action] += 1
            if reaped.action == "queued":
                given_back[rollout_id] = reaped.owner
            if reaped.ended:
                ended.add(split_rollout_id(rollout_id)[0])
            log.warning(
                "rollout %s: taken back from node %s (%s): %s",
                rollout_id, reaped.owner or "?", reaped.cause or "left over", reaped.action,
            )  # fmt: skip
        await self.doorbells.ring(list(given_back), fleet, avoid=given_back, at_once=True)
        for task_id in ended:
            await self._tell(task_id)

    # --- tasks

    async def _remind(self, untold: Iterable[str]) -> None:
        for task_id in untold:
            word = await self.ledger.do(steps.left_to_tell(self.calls, task_id))
            if word == "call" and self._call_back is not None:
                log.info("task %s: its callback is due", task_id)
                self._call_back(task_id)
            elif word in {"tell", "call"}:
                log.warning("task %s: it ended, and whoever ended it has not told of it", task_id)
                self.counts["reminded"] += 1
                await self._tell(task_id)

    async def _mend(self) -> None:
        self._cursor, task_ids = await self.ledger.do(steps.some_tasks(self.calls, self._cursor, _TASKS_AT_ONCE))
        words = await all_of(self.ledger, [steps.mend_task(self.calls, task_id) for task_id in task_ids])
        for task_id, word in zip(task_ids, words, strict=True):
            if word == "right":
                continue
            log.warning("task %s: its records did not fit together: %s", task_id, word)
            self.counts[word] += 1
            if word == "finished":
                await self._tell(task_id)

    def _stop_orphans(self, fleet: Fleet) -> None:
        """Beside the turn: a backend may take its time, and leases must not wait for it."""
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._stopped_orphans(fleet.gone), name="orphans of other nodes")

    async def _stopped_orphans(self, gone: Sequence[str]) -> None:
        try:
            stopped = await self.orphans.stop_of_nodes_gone(gone)
            self.counts["sandboxes_stopped"] += len(stopped)
        except LedgerUnavailable as exc:
            log.warning("sandboxes of nodes that are gone: %s", exc)

    async def _tell(self, task_id: str) -> None:
        """Has a worker tell Celery's results and the callback that a task has ended."""
        try:
            await asyncio.to_thread(
                self.client.app.send_task, FINISH_TASK, args=[task_id], queue=SUBMIT_QUEUE, ignore_result=True
            )
        except (OperationalError, RuntimeError) as exc:
            log.warning("task %s has ended; no worker could be told to say so yet: %s", task_id, exc)
