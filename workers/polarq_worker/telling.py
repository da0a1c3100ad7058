"""What others are told of a task: its Celery result and its callback follow the ledger, where the truth is.

That either fails costs nobody a rollout, and neither is waited for by the task's own end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from polarq.callback.lanes import Lanes
from polarq.callback.outbox import deliver_task_callback
from polarq.client import Client
from polarq.client.states import publish_state
from polarq.errors import PolarqError
from polarq.ledger import AsyncLedger
from polarq.ledger.reaping import left_to_tell
from polarq.ledger.records import TaskHead
from polarq.topology import Topology

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("polarq.worker.node")

_MOST_CALLBACKS = 1000
"""Callbacks on their way or waiting for a place, of one worker; what comes beyond is due again within a minute."""


class Telling:
    """One worker's."""

    def __init__(
        self,
        app: Celery,
        client: Client,
        ledger: AsyncLedger,
        topology: Topology,
        callback_secret: str | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Callbacks are delivered on `loop`."""
        self._app = app
        self._client = client
        self._ledger = ledger
        self._topology = topology
        self._secret = callback_secret
        self._loop = loop
        self._lanes = Lanes()
        self._callbacks: dict[str, asyncio.Task[None]] = {}
        """By task."""
        self._publishing: dict[str, bool] = {}
        """Tasks whose result is being written, and whether it has to be once more: something ended meanwhile."""
        self._lock = threading.Lock()

    def tell(self, task_id: str) -> None:
        """Tells how a task is now; to be called in a job's thread, when a rollout of it has ended in the ledger.

        Of the rollouts of a task that end together, one tells for all: each telling costs as much as the task has
        rollouts. Whoever finds another at it leaves at once, and the other writes once more.
        """
        if not self._is_next(task_id):
            return
        head = self._publish(task_id)
        while self._is_again(task_id):
            head = self._publish(task_id)
        if head is None or head.state.terminal:
            # Does nothing unless the task has ended, has an address, and nobody else delivers.
            self._loop.call_soon_threadsafe(self.call_back, task_id, head is not None)

    def _is_next(self, task_id: str) -> bool:
        with self._lock:
            another = task_id in self._publishing
            self._publishing[task_id] = another
            return not another

    def _is_again(self, task_id: str) -> bool:
        """Whether something ended since the last writing began; after a no, the next caller of `tell` writes."""
        with self._lock:
            if self._publishing[task_id]:
                self._publishing[task_id] = False
                return True
            del self._publishing[task_id]
            return False

    def _publish(self, task_id: str) -> TaskHead | None:
        """What was written; None when it could not be."""
        try:
            return publish_state(self._app, self._client, task_id)
        except Exception:
            log.exception("task %s: its Celery result could not be written; the ledger has it", task_id)
            return None

    async def aclose(self) -> None:
        """Gives up callbacks under way: another process delivers them."""
        under_way = list(self._callbacks.values())
        for delivery in under_way:
            delivery.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def call_back(self, task_id: str, published: bool = True) -> None:
        """Starts the delivery of an ended task's callback; `published`: its Celery result has been written."""
        if task_id in self._callbacks:
            return
        if len(self._callbacks) >= _MOST_CALLBACKS:
            log.warning("task %s: %d callbacks are on their way; its own is tried later", task_id, _MOST_CALLBACKS)
            return
        delivery = asyncio.create_task(self._call_back(task_id, published), name=f"callback {task_id}")
        self._callbacks[task_id] = delivery
        delivery.add_done_callback(lambda _: self._callbacks.pop(task_id))

    async def _call_back(self, task_id: str, published: bool) -> None:
        """Runs beside everything else: the task's own end does not wait for the trainer's server."""
        try:
            told = left_to_tell(self._ledger.calls, task_id, told=True)
            if published and await self._ledger.do(told) == "nothing":
                return
            await deliver_task_callback(self._ledger, self._topology, task_id, secret=self._secret, lanes=self._lanes)
            if published:
                await self._ledger.do(told)
        except PolarqError as exc:
            log.error("task %s: its callback was not delivered: %s", task_id, exc)
