"""What every handler of the shim works with."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from polarq.callback.lanes import Lanes
from polarq.callback.outbox import deliver_task_callback
from polarq.client import AsyncClient
from polarq.errors import PolarqError, TaskNotFound
from polarq.http.access import Access
from polarq.http.feed import Feed
from polarq.http.index import TaskIndex
from polarq.http.metrics import RequestCounts
from polarq.http.session_files import SessionFiles
from polarq.ledger import TaskRecord
from polarq.settings import Settings
from polarq.topology import Topology

log = logging.getLogger(__name__)

_REREAD_S = 5.0
"""Longest wait on events before the ledger itself is read again: an event may be lost, a record is not."""


@dataclass(slots=True)
class Shim:
    """One running shim: its parts and its background work."""

    client: AsyncClient
    topology: Topology
    settings: Settings
    access: Access
    feed: Feed
    index: TaskIndex
    requests: RequestCounts
    files: SessionFiles | None
    lanes: Lanes = field(default_factory=Lanes)
    _work: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    def of(cls, client: AsyncClient, topology: Topology, settings: Settings, access: Access) -> Shim:
        feed = Feed(client.ledger)
        folder = topology.rollout.save_dir
        return cls(
            client,
            topology,
            settings,
            access,
            feed,
            TaskIndex(client.ledger),
            RequestCounts(),
            SessionFiles(client.ledger, feed, folder) if folder is not None else None,
        )

    async def running(self, _: web.Application) -> AsyncIterator[None]:
        """The background work of the application's life (aiohttp's cleanup context)."""
        self.start("reading events", self.feed.run())
        if self.files is not None:
            self.start("writing session files", self.files.run())
        yield
        for work in self._work:
            work.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._work, return_exceptions=True)

    def start(self, what: str, work: Coroutine[Any, Any, Any]) -> None:
        """Runs something beside the requests; its failure is logged, not lost."""

        async def logged() -> None:
            try:
                await work
            except PolarqError as exc:
                log.warning("%s: %s", what, exc)
            except Exception:
                log.exception("%s failed", what)

        task = asyncio.create_task(logged(), name=what)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    # --- reading tasks

    async def record(self, task_id: str) -> TaskRecord:
        """A task with its request. Raises `TaskNotFound`."""
        found = await self.client.ledger.do(self.client.ledger.calls.task(task_id, with_request=True))
        if found is None:
            raise TaskNotFound(f"no task '{task_id}' in the ledger")
        return found

    async def ended_record(self, task_id: str, wait_s: float) -> TaskRecord:
        """The task once it has ended, or as it is after `wait_s` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while True:
            cursor = await self.feed.newest()
            record = await self.record(task_id)
            if record.state.terminal or loop.time() >= until or self.feed.closed:
                return record
            await self._something_ended(task_id, cursor, min(until, loop.time() + _REREAD_S))

    async def _something_ended(self, task_id: str, cursor: str, until: float) -> None:
        loop = asyncio.get_running_loop()
        while (left := until - loop.time()) > 0 and await self.feed.news(cursor, left):
            for event in await self.feed.after(cursor):
                cursor = event.event_id
                if event.type == "task.completed" and event.data.get("task_id") == task_id:
                    return

    # --- after a cancel

    def call_back(self, record: TaskRecord) -> None:
        """A task that ended without a worker (cancelled in the queue) has nobody else to send its callback."""
        if record.state.terminal and record.request is not None and record.request.callback_url is not None:
            work = deliver_task_callback(
                self.client.ledger,
                self.topology,
                record.task_id,
                secret=self.settings.callback_secret,
                lanes=self.lanes,
            )
            self.start(f"callback of task {record.task_id}", work)


SHIM = web.AppKey("shim", Shim)
