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
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from kombu.exceptions import OperationalError

from polarq.client import Client
from polarq.client.client import FINISH_TASK, SUBMIT_QUEUE
from polarq.client.routing import Candidate, able, fleet_of
from polarq.contracts.node import NodeRecord
from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import InvalidTask, LedgerUnavailable, NotQueued
from polarq.ledger import AsyncLedger, Call
from polarq.ledger import reaping as steps
from polarq.settings import Settings
from polarq.topology import Topology, broker_url

log = logging.getLogger("polarq.worker.reaper")

T = TypeVar("T")

_SHORTEST_TURN_S = 5.0
_RINGS_AT_ONCE = 200
"""About; what is left over is rung at the next turn."""
_LONGEST_RING_PAUSE_S = 60.0
_PAGE = 1000
"""Messages read at once."""
_AT_WORK = 0.05
"""Share of the time that may go into reading queues."""
_MEND_EVERY_S = 10.0
_TASKS_AT_ONCE = 50
_STEPS_AT_ONCE = 32


class Reaper:
    """One worker's reaper; `step` is called every few seconds."""

    def __init__(
        self, ledger: AsyncLedger, client: Client, topology: Topology, settings: Settings, node_id: str
    ) -> None:
        self.ledger = ledger
        self.calls = ledger.calls
        self.client = client
        self.topology = topology
        self.me = f"{node_id}/{secrets.token_hex(4)}"
        url = broker_url(topology, settings)
        self._broker = ledger if url == ledger.url else AsyncLedger(url, self.calls, max_connections=2)
        self._server: str | None = None
        self._quiet_until = 0.0
        self._read_queues_at = 0.0
        self._mend_at = 0.0
        self._cursor = 0
        self._counts: Counter[str] = Counter()

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

    async def aclose(self) -> None:
        """Lets another worker take the turn at once."""
        try:
            async with asyncio.timeout(5):
                await self.ledger.do(steps.give_turn_up(self.calls, self.me))
        except (LedgerUnavailable, TimeoutError) as exc:
            log.warning("the reaper's turn could not be given up (%s); it ends by itself", exc)
        if self._broker is not self.ledger:
            await self._broker.aclose()

    def _be_quiet(self, seconds: float) -> None:
        self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)

    async def _turn(self) -> None:
        gateway = self.topology.gateway
        try:
            await self._listen()
            for node_id in await self.ledger.do(steps.reap_nodes(self.calls, self.topology.retention.lost_nodes_s)):
                log.warning("node %s is gone without a word", node_id)
                self._counts["nodes_lost"] += 1
            due = await self.ledger.do(steps.look(self.calls, gateway.ring_again_s))
            round_ = _Fleet(await self.ledger.nodes(), self.topology)
            if time.monotonic() >= self._quiet_until:
                await self._take_back(due.expired, round_)
            await self._remind(due.untold)
            if time.monotonic() >= self._mend_at:
                self._mend_at = time.monotonic() + _MEND_EVERY_S
                await self._mend()
            if time.monotonic() >= self._read_queues_at:
                began = time.monotonic()
                await self._ring_what_is_in_no_queue(due.waiting, round_)
                self._read_queues_at = time.monotonic() + (time.monotonic() - began) / _AT_WORK
        finally:
            if self._counts:
                counts, self._counts = self._counts, Counter()
                await self.ledger.do(steps.count_reaped(self.calls, counts))

    async def _listen(self) -> None:
        """After a restart or a failover of Redis, workers get the time to renew what ran out meanwhile."""
        lease_s = self.topology.gateway.lease_s
        life = await self.ledger.do(steps.server_life())
        if self._server is not None and self._server != life.run_id:
            self._be_quiet(lease_s)
        elif life.up_s < lease_s:
            self._be_quiet(lease_s - life.up_s)
        self._server = life.run_id

    # --- expired leases

    async def _take_back(self, expired: Sequence[str], fleet: _Fleet) -> None:
        most = self.topology.gateway.max_attempts
        given_back: dict[str, str] = {}
        ended: set[str] = set()
        answers = await self._all(steps.reap_lost(self.calls, rollout_id, most) for rollout_id in expired)
        for rollout_id, reaped in zip(expired, answers, strict=True):
            if reaped.action == "held":
                continue
            self._counts[reaped.action] += 1
            if reaped.action == "queued":
                given_back[rollout_id] = reaped.owner
            if reaped.ended:
                ended.add(split_rollout_id(rollout_id)[0])
            log.warning(
                "rollout %s: taken back from node %s (%s): %s",
                rollout_id, reaped.owner or "?", reaped.cause or "left over", reaped.action,
            )  # fmt: skip
        await self._ring(list(given_back), fleet, avoid=given_back)
        for task_id in ended:
            await self._tell(task_id)

    # --- doorbells

    async def _ring_what_is_in_no_queue(self, waiting: Sequence[str], fleet: _Fleet) -> None:
        """Rings what waits for a node that takes work without being in the queue of one."""
        if not fleet.takers:
            return
        gone = fleet.gone
        depths = await self._broker.do(steps.queue_depths(self.calls, [*fleet.takers, *gone]))
        left = [node_id for node_id in gone if depths[node_id]]
        if not waiting and not left:
            return
        found: set[str] = set()
        for node_id in fleet.takers:
            if depths[node_id]:
                found |= (await self._read(node_id)).rollout_ids
        missing = [rollout_id for rollout_id in waiting if rollout_id not in found]
        found |= await self._ring(missing, fleet)
        for node_id in left:
            await self._clear(node_id, found)

    async def _read(self, node_id: str) -> _Queue:
        queue = _Queue()
        for name in self.calls.keys.queue_lists(node_id):
            start = 0
            while True:
                page = await self._broker.do(steps.queued_messages(name, start, _PAGE))
                start += len(page)
                if page:
                    ids = await asyncio.to_thread(_rollouts_of, page)
                    queue.rollout_ids.update(i for i in ids if i is not None)
                    queue.strange += ids.count(None)
                if len(page) < _PAGE:
                    break
            if start:
                queue.lengths[name] = start
        return queue

    async def _clear(self, node_id: str, elsewhere: set[str]) -> None:
        """Deletes the queue of a node that is gone, once all that waits in it is rung elsewhere."""
        queue = await self._read(node_id)
        waiting = await self.ledger.do(steps.still_waiting(self.calls, sorted(queue.rollout_ids)))
        if queue.strange or not queue.lengths or any(rollout_id not in elsewhere for rollout_id in waiting):
            return
        if await self._broker.do(steps.drop_lists(queue.lengths)):
            log.warning("node %s is gone: the %d messages in its queue are dropped, all of it is elsewhere or over",
                        node_id, sum(queue.lengths.values()))  # fmt: skip
            self._counts["queues_dropped"] += 1

    async def _ring(
        self, rollout_ids: Sequence[str], fleet: _Fleet, *, avoid: Mapping[str, str] | None = None
    ) -> set[str]:
        """Rings rollouts on nodes that take work, and on none in vain; answers those that were rung. `avoid`: the nodes
        that just lost them."""
        after_s = self.topology.gateway.ring_again_s
        rung: set[str] = set()
        for task_id, ids in _by_task(rollout_ids).items():
            record = await self.ledger.do(self.calls.task(task_id, with_request=True))
            task = None if record is None else record.request
            if task is not None and fleet.choose(task) is None:
                continue
            words = await self._all(
                steps.ring_due(self.calls, i, after_s, _LONGEST_RING_PAUSE_S, given_back=avoid is not None) for i in ids
            )
            self._counts.update(word for word in words if word in {"orphan", "index"})
            queues: dict[int, str] = {}
            for rollout_id, word in zip(ids, words, strict=True):
                node_id = fleet.choose(task, (avoid or {}).get(rollout_id)) if task is not None else None
                if word == "ring" and node_id is not None:
                    queues[split_rollout_id(rollout_id)[1]] = node_id
                    fleet.add(node_id)
            if task is not None and queues:
                await self._publish(task, queues, again=avoid is None)
            rung.update(f"{task_id}.{index}" for index in queues)
            if len(rung) >= _RINGS_AT_ONCE:
                break
        return rung

    async def _publish(self, task: Task, queues: Mapping[int, str], *, again: bool) -> None:
        try:
            await asyncio.to_thread(self.client.ring, task, queues)
        except NotQueued as exc:
            log.warning("task %s: its messages could not be sent; they are tried again: %s", task.task_id, exc)
            return
        self._counts["rung"] += len(queues)
        if again:
            where = ", ".join(sorted(set(queues.values())))
            log.warning("task %s: %d of its rollouts waited in no queue; rung on %s", task.task_id, len(queues), where)

    # --- tasks

    async def _remind(self, untold: Iterable[str]) -> None:
        for task_id in untold:
            if await self.ledger.do(steps.left_to_tell(self.calls, task_id)) == "tell":
                log.warning("task %s: it ended, and whoever ended it has not told of it", task_id)
                self._counts["reminded"] += 1
                await self._tell(task_id)

    async def _mend(self) -> None:
        self._cursor, task_ids = await self.ledger.do(steps.some_tasks(self.calls, self._cursor, _TASKS_AT_ONCE))
        words = await self._all(steps.mend_task(self.calls, task_id) for task_id in task_ids)
        for task_id, word in zip(task_ids, words, strict=True):
            if word == "right":
                continue
            log.warning("task %s: its records did not fit together: %s", task_id, word)
            self._counts[word] += 1
            if word == "finished":
                await self._tell(task_id)

    async def _tell(self, task_id: str) -> None:
        """Has a worker tell Celery's results and the callback that a task has ended."""
        try:
            await asyncio.to_thread(
                self.client.app.send_task, FINISH_TASK, args=[task_id], queue=SUBMIT_QUEUE, ignore_result=True
            )
        except (OperationalError, RuntimeError) as exc:
            log.warning("task %s has ended; no worker could be told to say so yet: %s", task_id, exc)

    async def _all(self, calls: Iterable[Call[T]]) -> list[T]:
        """The answers to many calls, a few at a time."""
        answers: list[T] = []
        todo = list(calls)
        for at in range(0, len(todo), _STEPS_AT_ONCE):
            batch: list[Awaitable[T]] = [self.ledger.do(call) for call in todo[at : at + _STEPS_AT_ONCE]]
            answers += await asyncio.gather(*batch)
        return answers


class _Queue:
    """What lies in a node's queue."""

    def __init__(self) -> None:
        self.rollout_ids: set[str] = set()
        self.lengths: dict[str, int] = {}
        self.strange = 0
        """Messages of another kind."""


class _Fleet:
    """The nodes as they are in this turn, and what the turn has rung on them."""

    def __init__(self, nodes: Sequence[NodeRecord], topology: Topology) -> None:
        self._candidates = fleet_of(nodes, topology)
        self._added: Counter[str] = Counter()
        self.takers = [c.node_id for c in self._candidates if c.idle_because is None]
        alive = {node.node_id for node in nodes if node.alive}
        known = {node.node_id for node in nodes} | {node.id for node in topology.gateway.nodes}
        self.gone = sorted(known - alive)

    def choose(self, task: Task, avoid: str | None = None) -> str | None:
        """The least loaded node that can run the task and takes work, another than `avoid` if there is one."""
        try:
            able_now = [c for c in able(task, self._candidates) if c.idle_because is None]
        except InvalidTask:
            return None
        choice = [c for c in able_now if c.node_id != avoid] or able_now
        return min(choice, key=lambda c: (self._load(c), c.node_id)).node_id if choice else None

    def add(self, node_id: str) -> None:
        self._added[node_id] += 1

    def _load(self, candidate: Candidate) -> float:
        return candidate.load + self._added[candidate.node_id] / candidate.capacity


def _rollouts_of(messages: Sequence[bytes]) -> list[str | None]:
    return [steps.rollout_of(message) for message in messages]


def _by_task(rollout_ids: Iterable[str]) -> dict[str, list[str]]:
    tasks: dict[str, list[str]] = {}
    for rollout_id in rollout_ids:
        tasks.setdefault(split_rollout_id(rollout_id)[0], []).append(rollout_id)
    return tasks
