"""What Celery's own result of a task says: progress while it runs, a plain JSON result when it has ended.

Written by workers, for clients that know Celery but not polarq. The ledger is the truth; this follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polarq.client.results import Trajectories, payload_refs
from polarq.contracts.rollout import TaskResult
from polarq.ledger.records import TaskHead, TaskRecord

if TYPE_CHECKING:
    from celery import Celery

    from polarq.client.client import Client

PROGRESS = "PROGRESS"
STARTED = "STARTED"


def publish_state(app: Celery, client: Client, task_id: str) -> TaskHead:
    """Stores the task's present state under every Celery id that waits for it, and returns what it stored.

    Two workers may publish at once. Each reads the ledger again after it wrote, so the last writer wrote what is true.
    """
    head = client.head(task_id)
    while True:
        _store(app, client, head)
        now = client.head(task_id)
        if now == head:
            return head
        head = now


def _store(app: Celery, client: Client, head: TaskHead) -> None:
    if head.state.terminal:
        state, value = "SUCCESS", foreign_result(client, client.record(head.task_id))
    else:
        state = PROGRESS if head.counts.ended else STARTED
        value = {"task_id": head.task_id, **head.counts.model_dump()}
    for celery_id in head.celery_ids:
        app.backend.store_result(celery_id, value, state)


def foreign_result(client: Client, record: TaskRecord) -> dict[str, Any]:
    """Outcomes, rewards and references as JSON; trajectories inline while they are small."""
    refs = payload_refs(record)
    small = sum(ref.raw_bytes for ref in refs.values()) <= client.topology.budgets.inline_result_bytes
    wanted = Trajectories.FULL if small else Trajectories.REFS
    result: TaskResult = client.get(record.task_id, wanted)
    return {**result.model_dump(mode="json"), "rewards": result.rewards, "trajectories": wanted.value}
