"""The worker's remote control: a command of polarq's own beside Celery's, and a refusal for those of Celery's that
would change what the ledger knows nothing of.

Celery's own versions answer that it is done. A node whose queue is cancelled would still say that it has room; a rate
limit leaves jobs in no pool, also when it is lifted; a grown pool and a time limit change nothing here.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import Panel, control_command

from polarq.client.deployment import LOOK, SUBMIT_QUEUE

_CAPACITY = "a node's size is in the ledger; polarq capacity {node} N changes how many harnesses run at once"
_QUEUES = "a worker takes the queue of its own node and no other; polarq pause {node} lets it take nothing new"
_RATE = "polarq tasks have no rate limit; polarq capacity {node} N and `limits:` in the topology bound what runs"
_TIME = "a rollout's time limits are its task's: `timeout_seconds` and `timeouts:`"

REFUSED = {
    "pool_grow": _CAPACITY,
    "pool_shrink": _CAPACITY,
    "pool_restart": _CAPACITY,
    "autoscale": _CAPACITY,
    "add_consumer": _QUEUES,
    "cancel_consumer": _QUEUES,
    "rate_limit": _RATE,
    "time_limit": _TIME,
}
"""Celery's commands that a node does not carry out -> what is said instead. Flower has a button for each."""


@control_command(name=LOOK)
def look(state: Any) -> None:
    """Reads the node's flags now, and looks for work."""
    looks_again = getattr(state.app, "look_again", None)
    if looks_again is not None:
        looks_again()


def _refuse(command: str, why: str) -> None:
    def refused(state: Any, *_: Any, **__: Any) -> dict[str, str]:
        queues = [name for name in state.app.amqp.queues.consume_from if name != SUBMIT_QUEUE]
        return {"error": why.format(node=queues[0] if queues else "NODE")}

    Panel.data[command] = refused


for _command, _why in REFUSED.items():
    _refuse(_command, _why)
