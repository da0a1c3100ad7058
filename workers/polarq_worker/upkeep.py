"""What a worker does for the deployment as a whole: watches Redis' memory, and archives what would expire unread.

Every worker watches, and one at a time archives; that two do the same for a moment is no harm.
"""

from __future__ import annotations

import logging
import secrets
import time

from polarq.client.acknowledging import archive_task
from polarq.client.steps import outcome_async
from polarq.errors import ArchiveFailed, LedgerUnavailable
from polarq.ledger import AsyncLedger, without_password
from polarq.ledger.memory import MEMORY_ADVICE, MemoryLevel, memory_of, memory_use, tell_memory
from polarq.ledger.records import Unreadable
from polarq.ledger.retention import archive_turn, ending_soon, mark_archived, not_archived, server_ms
from polarq.store.archive import Archive
from polarq.topology import Topology

log = logging.getLogger("polarq.worker.upkeep")

_AHEAD = 0.25
"""Share of a task's time in Redis that is left when it is archived: so long may the archive be away."""
_LONGEST_AHEAD_S = 24 * 3600.0
_TASKS_AT_ONCE = 20
_MOST_REFUSALS = 3
"""Tasks in a row that cannot be archived until it is left for now."""
_TURN_S = 60.0
_WARN_AGAIN_S = 3600.0
_TOLD_S = 60.0
"""How long it counts what a worker has seen of the memory of another Redis."""


class Upkeep:
    """One worker's share. The steps are called every few seconds each, and may raise `LedgerUnavailable`."""

    def __init__(self, ledger: AsyncLedger, topology: Topology) -> None:
        self._ledger = ledger
        self._archive = Archive.of(topology)
        self._refused: dict[str, float] = {}
        """Tasks that could not be archived, by when that was last tried."""
        self._me = secrets.token_hex(8)
        self._level = MemoryLevel.OK
        self._warned_at = 0.0

    @property
    def archives(self) -> bool:
        """Whether `archive_step` has anything to do."""
        return self._archive is not None

    async def memory_step(self) -> None:
        """Looks how full Redis is. A change is an event, and stands in the log of every worker."""
        await self._look_elsewhere()
        memory = await self._ledger.do(memory_use(self._ledger.calls))
        now = time.monotonic()
        if memory.level is MemoryLevel.OK:
            if self._level is not MemoryLevel.OK:
                log.info("%s", memory.line)
        elif memory.level is not self._level or now - self._warned_at > _WARN_AGAIN_S:
            full = memory.level is MemoryLevel.FULL
            what = "new tasks are refused, results are still taken" if full else "at 95 % new tasks are refused"
            log.log(logging.ERROR if full else logging.WARNING, "%s: %s; %s", memory.line, what, MEMORY_ADVICE)
            self._warned_at = now
        self._level = memory.level

    async def _look_elsewhere(self) -> None:
        calls = self._ledger.calls
        for server, url in calls.elsewhere.items():
            try:
                used, budget = await self._ledger.do(memory_of(calls, server))
            except LedgerUnavailable as exc:
                log.warning("the memory of Redis at %s (%s) is not known: %s", without_password(url), server, exc)
            else:
                await self._ledger.do(tell_memory(calls, server, used, budget, _TOLD_S))

    async def archive_step(self) -> None:
        """Archives ended tasks that expire soon without having been acknowledged."""
        if self._archive is None:
            return
        ledger, calls = self._ledger, self._ledger.calls
        left_s = min(calls.keep_s * _AHEAD, _LONGEST_AHEAD_S)
        due = await ledger.do(ending_soon(calls, await ledger.do(server_ms()), left_s))
        left = await ledger.do(not_archived(calls, due))
        # What was refused goes last: one task that cannot be written must not cost the others their place.
        self._refused = {task_id: at for task_id, at in self._refused.items() if task_id in left}
        refusals = 0
        for task_id in sorted(left, key=lambda task_id: self._refused.get(task_id, 0.0))[:_TASKS_AT_ONCE]:
            if not await ledger.do(archive_turn(calls, self._me, _TURN_S)):
                return
            try:
                count = await outcome_async(ledger, archive_task(calls, self._archive, task_id))
            except (ArchiveFailed, Unreadable) as exc:
                log.error("task %s expires soon: %s", task_id, exc)
                self._refused[task_id] = time.monotonic()
                refusals += 1
                if refusals == _MOST_REFUSALS:
                    return  # it is the archive itself
                continue
            refusals = 0
            await ledger.do(mark_archived(calls, task_id))
            log.info("task %s expires soon: %d rollouts archived", task_id, count)
