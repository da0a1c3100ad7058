"""Doorbells that nobody hears: rollouts that wait without being in a queue, and queues of nodes that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from polarq.client import Client
from polarq.client.routing import Candidate, able, fleet_of
from polarq.contracts.node import NodeRecord
from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import InvalidTask, NotQueued
from polarq.ledger import AsyncLedger, Call
from polarq.ledger import reaping as steps
from polarq.ledger.control import run_state
from polarq.ledger.records import Unreadable
from polarq.settings import Settings
from polarq.topology import Topology, broker_url

log = logging.getLogger("polarq.worker.doorbells")

T = TypeVar("T")

_RINGS_AT_ONCE = 200
"""About; what is left over is rung at the next turn."""
_LONGEST_PAUSE_S = 60.0
_PAGE = 1000
"""Messages read at once."""
_STEPS_AT_ONCE = 32


class Doorbells:
    """What a reaper does about them; `counts` says what it did."""

    def __init__(
        self, ledger: AsyncLedger, client: Client, topology: Topology, settings: Settings, counts: Counter[str]
    ) -> None:
        self.ledger = ledger
        self.calls = ledger.calls
        self.client = client
        self.after_s = topology.gateway.ring_again_s
        self.counts = counts
        self._limits = topology.limits
        url = broker_url(topology, settings)
        self._broker = ledger if url == ledger.url else AsyncLedger(url, self.calls, max_connections=2)

    async def aclose(self) -> None:
        if self._broker is not self.ledger:
            await self._broker.aclose()

    async def ring_what_is_in_no_queue(self, waiting: Sequence[str], fleet: Fleet) -> bool:
        """Rings what waits although a node that takes work has free places and nothing in its queue is for them.
        Whether that was all.

        Nodes do so themselves (`polarq_worker.work`); this is for what they do not see, as behind very many others in
        line that they cannot run, and for one whose own looking fails.
        """
        if not fleet.takers:
            return True
        gone = fleet.gone
        depths = await self._broker.do(steps.queue_depths(self.calls, [*fleet.takers, *gone]))
        left = [node_id for node_id in gone if depths[node_id]]
        if not waiting and not left:
            return True
        found: set[str] = set()
        for node_id in fleet.takers:
            if depths[node_id]:
                found |= (await self._read(node_id)).rollout_ids
        missing = [rollout_id for rollout_id in waiting if rollout_id not in found]
        rung = await self.ring(missing, fleet)
        for node_id in left:
            await self.clear(node_id, found | rung, fleet)
        return len(rung) < _RINGS_AT_ONCE

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

    async def clear(self, node_id: str, elsewhere: set[str], fleet: Fleet, *, at_once: bool = False) -> None:
        """Deletes the queue of a node that is gone, once all that waits in it is for others too: rung elsewhere, or in
        line for the next place that gets free."""
        queue = await self._read(node_id)
        if not queue.lengths:
            return
        waiting = await self.ledger.do(steps.still_waiting(self.calls, sorted(queue.rollout_ids)))
        left = [rollout_id for rollout_id in waiting if rollout_id not in elsewhere]
        await self.ring(left, fleet, avoid=dict.fromkeys(left, node_id), at_once=at_once)
        if queue.strange or not all([await self._has_a_taker(rollout_id, fleet) for rollout_id in left]):
            return
        if await self._broker.do(steps.drop_lists(queue.lengths)):
            log.warning("node %s is gone: the %d messages in its queue are dropped, all of it is elsewhere or over",
                        node_id, sum(queue.lengths.values()))  # fmt: skip
            self.counts["queues_dropped"] += 1

    async def ring(
        self,
        rollout_ids: Sequence[str],
        fleet: Fleet,
        *,
        avoid: Mapping[str, str] | None = None,
        at_once: bool = False,
    ) -> set[str]:
        """Rings waiting rollouts on nodes that take work and have free places; answers those that were rung.

        `avoid`: nodes that should not get them if others can. `at_once`: they were just given back; others are rung
        only when they have waited for a while since the last time.
        """
        rung: set[str] = set()
        held: dict[str, bool] = {}
        for task_id, of_task in _by_task(rollout_ids).items():
            if not fleet.has_free_places:
                break
            try:
                record = await self.ledger.do(self.calls.task(task_id, with_request=True))
            except Unreadable as exc:
                log.warning("%s; it is not rung", exc)
                continue
            task = None if record is None else record.request
            ids = of_task
            if task is not None:
                if task.run_id not in held:
                    held[task.run_id] = await self._is_held(task.run_id)
                if held[task.run_id]:
                    continue
                ids = of_task[: fleet.free_for(task)]
            leave = [steps.ring_due(self.calls, i, self.after_s, _LONGEST_PAUSE_S, given_back=at_once) for i in ids]
            words = await all_of(self.ledger, leave)
            self.counts.update(word for word in words if word in {"orphan", "index"})
            queues: dict[int, str] = {}
            for rollout_id, word in zip(ids, words, strict=True):
                node_id = fleet.choose(task, (avoid or {}).get(rollout_id)) if task is not None else None
                if word == "ring" and node_id is not None:
                    queues[split_rollout_id(rollout_id)[1]] = node_id
                    fleet.add(node_id)
            if task is not None and queues and await self._publish(task, queues, again=not at_once):
                rung.update(task.rollout_id(index) for index in queues)
            if len(rung) >= _RINGS_AT_ONCE:
                break
        return rung

    async def _has_a_taker(self, rollout_id: str, fleet: Fleet) -> bool:
        """Whether some node that takes work can run it, now or when it has a free place."""
        try:
            record = await self.ledger.do(self.calls.task(split_rollout_id(rollout_id)[0], with_request=True))
        except Unreadable:
            return False
        return record is None or record.request is None or fleet.can(record.request)

    async def _is_held(self, run_id: str) -> bool:
        """Whether nothing of a run may start now, so that each of its doorbells would be in vain."""
        run = await self.ledger.do(run_state(self.calls.keys, run_id))
        most = self._limits.of_run(run_id).max_in_flight
        return run.paused or (most is not None and run.held >= most)

    async def _publish(self, task: Task, queues: Mapping[int, str], *, again: bool) -> bool:
        try:
            await asyncio.to_thread(self.client.ring, task, queues)
        except NotQueued as exc:
            log.warning("task %s: its messages could not be sent; they are tried again: %s", task.task_id, exc)
            return False
        self.counts["rung"] += len(queues)
        if again:
            where = ", ".join(sorted(set(queues.values())))
            log.warning(
                "task %s: %d of its rollouts waited beside free places; rung on %s", task.task_id, len(queues), where
            )
        return True


class _Queue:
    """What lies in a node's queue."""

    def __init__(self) -> None:
        self.rollout_ids: set[str] = set()
        self.lengths: dict[str, int] = {}
        self.strange = 0
        """Messages of another kind."""


class Fleet:
    """The nodes as they are in this turn, and what the turn has rung on them."""

    def __init__(self, nodes: Sequence[NodeRecord], topology: Topology) -> None:
        self._candidates = fleet_of(nodes, topology)
        self._added: Counter[str] = Counter()
        self.takers = [c.node_id for c in self._candidates if c.idle_because is None]
        alive = {node.node_id for node in nodes if node.alive}
        known = {node.node_id for node in nodes} | {node.id for node in topology.gateway.nodes}
        self.gone = sorted(known - alive)

    @property
    def has_free_places(self) -> bool:
        return any(self._free(c) for c in self._candidates if c.idle_because is None)

    def can(self, task: Task) -> bool:
        """Whether a node that takes work can run it."""
        return bool(self._takers_of(task))

    def free_for(self, task: Task) -> int:
        """Places for it that nothing is in or on its way to."""
        return sum(self._free(c) for c in self._takers_of(task))

    def choose(self, task: Task, avoid: str | None = None) -> str | None:
        """The least loaded node that can run the task and has a free place, another than `avoid` if there is one."""
        with_room = [c for c in self._takers_of(task) if self._free(c)]
        choice = [c for c in with_room if c.node_id != avoid] or with_room
        return min(choice, key=lambda c: (self._load(c), c.node_id)).node_id if choice else None

    def _takers_of(self, task: Task) -> list[Candidate]:
        try:
            return [c for c in able(task, self._candidates) if c.idle_because is None]
        except InvalidTask:
            return []

    def _free(self, candidate: Candidate) -> int:
        return max(0, candidate.free - self._added[candidate.node_id])

    def add(self, node_id: str) -> None:
        self._added[node_id] += 1

    def _load(self, candidate: Candidate) -> float:
        return candidate.load + self._added[candidate.node_id] / candidate.capacity


async def all_of(ledger: AsyncLedger, calls: Iterable[Call[T]]) -> list[T]:
    """The answers to many calls, a few at a time."""
    answers: list[T] = []
    todo = list(calls)
    for at in range(0, len(todo), _STEPS_AT_ONCE):
        batch: list[Awaitable[T]] = [ledger.do(call) for call in todo[at : at + _STEPS_AT_ONCE]]
        answers += await asyncio.gather(*batch)
    return answers


def _rollouts_of(messages: Sequence[bytes]) -> list[str | None]:
    return [steps.rollout_of(message) for message in messages]


def _by_task(rollout_ids: Iterable[str]) -> dict[str, list[str]]:
    tasks: dict[str, list[str]] = {}
    for rollout_id in rollout_ids:
        tasks.setdefault(split_rollout_id(rollout_id)[0], []).append(rollout_id)
    return tasks
