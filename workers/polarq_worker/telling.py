"""What others are told of a task: its Celery result and its callback follow the ledger, where the truth is.

That either fails costs nobody a rollout, and neither is waited for by the task's own end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from polarq.callback.outbox import deliver_task_callback
from polarq.client import Client
from polarq.client.states import publish_state
from polarq.errors import PolarqError
from polarq.ledger import AsyncLedger
from polarq.ledger.reaping import left_to_tell
from polarq.topology import Topology

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("polarq.worker.node")


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
        self._callbacks: set[asyncio.Task[None]] = set()

    def tell(self, task_id: str) -> None:
        """Tells how a task is now. Blocks until Celery's result is written; to be called in a job's thread."""
        published = False
        try:
            publish_state(self._app, self._client, task_id)
            published = True
        except Exception:
            log.exception("task %s: its Celery result could not be written; the ledger has it", task_id)
        # Does nothing unless the task has ended, has an address, and nobody else delivers.
        self._loop.call_soon_threadsafe(self._start_callback, task_id, published)

    def stop(self) -> None:
        """Gives up callbacks under way: another process delivers them. To be called on the loop."""
        for delivery in self._callbacks:
            delivery.cancel()

    def _start_callback(self, task_id: str, published: bool) -> None:
        delivery = asyncio.create_task(self._call_back(task_id, published), name=f"callback {task_id}")
        self._callbacks.add(delivery)
        delivery.add_done_callback(self._callbacks.discard)

    async def _call_back(self, task_id: str, published: bool) -> None:
        """Runs beside everything else: the task's own end does not wait for the trainer's server."""
        try:
            await deliver_task_callback(self._ledger, self._topology, task_id, secret=self._secret)
            if published:
                await self._ledger.do(left_to_tell(self._ledger.calls, task_id, told=True))
        except PolarqError as exc:
            log.error("task %s: its callback was not delivered: %s", task_id, exc)
