"""A deployment as its clients see it: where its Redis is, what a task may ask for, and how a doorbell is rung."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polarq.client.routing import celery_priority
from polarq.contracts.task import Task
from polarq.errors import NotQueued
from polarq.ledger import Cancelled, calls_for, without_password
from polarq.settings import Settings
from polarq.topology import Topology, broker_url, load_topology, redis_url

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger("polarq.client")

TaskSource = Task | Mapping[str, Any] | str | os.PathLike[str]

RUN_ROLLOUT = "polarq.run_rollout"
SUBMIT_ROLLOUT = "polarq.submit_rollout"
FINISH_TASK = "polarq.finish_task"
SUBMIT_QUEUE = "polarq"
"""The queue every worker also takes: where a client that knows only the task's name submits."""

LOOK = "polarq_look"
"""The broadcast that makes every node read its flags now, and look for work."""


class Deployment:
    """What both clients share: topology, settings, the layout of the ledger, and the doorbells."""

    def __init__(self, topology: Topology | None, settings: Settings | None, app: Celery | None) -> None:
        self.settings = settings or Settings.from_env()
        self.topology = topology or load_topology(settings=self.settings)
        self.url = redis_url(self.topology, self.settings)
        self.calls = calls_for(self.topology)
        self._app = app

    @property
    def app(self) -> Celery:
        """The Celery app that rings the doorbells; loaded only when something is submitted."""
        if self._app is None:
            from polarq.celery import make_app

            self._app = make_app(self.topology, self.settings)
        return self._app

    def ring(self, task: Task, queues: Mapping[int, str]) -> None:
        """Publishes doorbells (index -> queue). Nothing depends on one: nodes look for what waits by themselves."""
        from kombu.exceptions import OperationalError

        priority = celery_priority(task.dispatch_priority)
        try:
            with self.app.producer_or_acquire() as producer:
                for index, queue in queues.items():
                    self.app.send_task(
                        RUN_ROLLOUT,
                        args=[task.rollout_id(index), 0],
                        queue=queue,
                        priority=priority,
                        shadow=f"rollout.{task.agent.harness or 'custom'}",
                        producer=producer,
                        # The ledger has the result. Celery would subscribe this process to a channel per rollout.
                        ignore_result=True,
                    )
        except (OperationalError, RuntimeError) as exc:
            # RuntimeError: kombu's own, when the connection it is retrying on was closed under it.
            where = without_password(broker_url(self.topology, self.settings))
            raise NotQueued(
                f"task '{task.task_id}' is recorded, but the queue at {where} went away ({type(exc).__name__}): submit "
                f"it again, under task_id '{task.task_id}' it is the same task"
            ) from exc

    def ring_node(self, node_id: str, rollout_ids: Sequence[str]) -> None:
        """Publishes doorbells for waiting rollouts on one node's queue. Raises `NotQueued`."""
        from kombu.exceptions import OperationalError

        try:
            with self.app.producer_or_acquire() as producer:
                for rollout_id in rollout_ids:
                    self.app.send_task(
                        RUN_ROLLOUT, args=[rollout_id, 0], queue=node_id, producer=producer, ignore_result=True
                    )
        except (OperationalError, RuntimeError) as exc:
            raise NotQueued(f"the queue of node '{node_id}' went away ({type(exc).__name__})") from exc

    def spread_word(self, task_id: str, cancelled: Cancelled) -> None:
        """After a cancel: speeds it up for what runs, and where nothing runs any more has a worker tell of the end."""
        from kombu.exceptions import OperationalError

        job_ids = [rollout.job_id for rollout in cancelled.active if rollout.job_id]
        try:
            if job_ids:
                self.app.control.revoke(job_ids, terminate=True)
            if cancelled.known and not cancelled.already_over and not cancelled.active:
                # Whoever commits a task's last rollout tells its Celery results and callback. Nobody committed here.
                self.app.send_task(FINISH_TASK, args=[task_id], queue=SUBMIT_QUEUE, ignore_result=True)
        except (OperationalError, RuntimeError) as exc:
            log.warning("task %s is cancelled in the ledger; its workers could not be told at once: %s", task_id, exc)

    def hurry(self) -> None:
        """Tells the nodes to look. That it does not reach one costs a heartbeat's time."""
        try:
            self.app.control.broadcast(LOOK)
        except Exception as exc:
            log.warning("the nodes could not be told at once; they see it with their next heartbeat: %s", exc)
