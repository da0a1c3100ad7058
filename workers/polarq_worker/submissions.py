"""What lies in the queue that every worker serves: tasks of foreign clients, and word of tasks that have ended.

It is read over a channel of its own. Celery stops reading a channel while the node has no place, and what Redis had
already given out then waits in the socket until it has one again: harmless for a doorbell, which the ledger remembers,
but a task that is not recorded yet would wait for a busy or paused node, while others are idle.
"""

from __future__ import annotations

from typing import Any

import kombu
from celery import bootsteps

from polarq.client.deployment import SUBMIT_QUEUE

_AT_ONCE = 16
"""Taken and not yet begun."""


class Submissions(bootsteps.ConsumerStep):
    """A step of the consumer's blueprint."""

    name = "polarq.Submissions"
    requires = ("celery.worker.consumer:Tasks",)

    def start(self, c: Any) -> None:
        consumer = kombu.Consumer(
            c.connection.channel(),
            queues=[c.app.amqp.queues[SUBMIT_QUEUE]],
            on_message=c.create_task_handler(),
            accept=list(c.app.conf.accept_content),
        )
        consumer.qos(prefetch_count=_AT_ONCE)
        consumer.consume()
        self.consumers = [consumer]
