"""Looks at what the ledger has waiting for this node, and has the pool make what it will ask for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger
from polarq.ledger.admission import Place
from polarq.ledger.waiting import requests_of
from polarq.topology import Node, Topology
from polarq_worker.harnesses.create import create_harness
from polarq_worker.outcomes import OF_OTHERS
from polarq_worker.warm.members import Wish
from polarq_worker.warm.pool import WarmPool
from polarq_worker.warm.recipe import Recipes, with_runtime

log = logging.getLogger("polarq.worker.warm")

_SEEN = 256
"""Tasks that are kept, so that each is read once."""
_WISH_S = 15.0
"""How long a task is taken to ask for what it did when it was last looked at: its uploads are looked through for that.
Where they have changed meanwhile, something is made that nobody asks for."""


class LookAhead:
    """One node's; `step` is called now and then. `takes_work` says whether the node may begin anything, `claimed` which
    of its rollouts have no sandbox yet, and `is_full` whether it holds all that it may: before that, what waits is
    about to be taken, by this node or another."""

    def __init__(
        self,
        ledger: AsyncLedger,
        topology: Topology,
        node: Node,
        place: Place,
        recipes: Recipes,
        pool: WarmPool,
        takes_work: Callable[[], bool],
        is_full: Callable[[], bool],
        claimed: Callable[[], list[Task]],
    ) -> None:
        self._ledger = ledger
        self._allowed = topology.security.allowed_modules
        self._node = node
        self._place = place
        self._recipes = recipes
        self._pool = pool
        self._takes_work = takes_work
        self._is_full = is_full
        self._claimed = claimed
        pool_holds = node.runtimes.pool.max_idle
        self._most = max(pool_holds, node.capacity) if pool_holds else 0
        """How far it looks: what it could take if all that it has ended now. 0: not at all."""
        self._tasks: OrderedDict[str, Task | None] = OrderedDict()
        """None: one that cannot be read."""
        self._wishes: OrderedDict[str, tuple[Wish | None, float]] = OrderedDict()
        """By task: and until when."""

    async def step(self) -> None:
        """Raises `LedgerUnavailable`."""
        self._pool.tidy()
        if not self._most or not self._takes_work():
            return
        tasks = self._claimed()[: self._most]
        if self._is_full() and (more := self._most - len(tasks)) > 0:
            rollout_ids = await self._ledger.do(self._ledger.calls.look(self._place, more))
            tasks += await self._tasks_of([split_rollout_id(rollout_id)[0] for rollout_id in rollout_ids])
        wishes = [wish for task in tasks if (wish := await self._wish(task)) is not None]
        # Paused or told to stop meanwhile.
        if self._takes_work():
            self._pool.ahead(wishes)

    async def _tasks_of(self, task_ids: Sequence[str]) -> list[Task]:
        """One per rollout, in order, without those that cannot be read."""
        unknown = [task_id for task_id in dict.fromkeys(task_ids) if task_id not in self._tasks]
        if unknown:
            requests = await self._ledger.do(requests_of(self._ledger.calls.keys, unknown))
            self._tasks.update(zip(unknown, requests, strict=True))
        found = []
        for task_id in task_ids:
            self._tasks.move_to_end(task_id)
            if (task := self._tasks[task_id]) is not None:
                found.append(task)
        while len(self._tasks) > _SEEN:
            self._tasks.popitem(last=False)
        return found

    async def _wish(self, task: Task) -> Wish | None:
        """None where the task cannot be run: that is said when its turn comes."""
        now = asyncio.get_running_loop().time()
        wish, until = self._wishes.get(task.task_id, (None, now))
        if until <= now:
            wish = await self._looked_at(task)
            self._wishes[task.task_id] = (wish, now + _WISH_S)
        self._wishes.move_to_end(task.task_id)
        while len(self._wishes) > _SEEN:
            self._wishes.popitem(last=False)
        return wish

    async def _looked_at(self, task: Task) -> Wish | None:
        task = with_runtime(task, self._node)
        try:
            harness = create_harness(task.agent, self._allowed)
            return Wish(await self._recipes.of_agent(task, harness), task.budgets().prepare_s)
        except LedgerUnavailable:
            raise
        except OF_OTHERS as exc:
            log.debug("nothing is made ahead for task %s: %s", task.task_id, exc)
            return None
