"""What happened, as a resumable stream. Ids are Redis stream ids; times come from the server."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from polarq.contracts.base import Contract


class Event(Contract):
    """One line of the event stream.

    Types: task.created, task.updated, task.completed, task.cancelling, session.state_changed, node.joined, node.left,
    node.draining, node.paused, node.resumed, node.blocked (its engine stood still, and does no more), node.lost,
    node.superseded (another worker, `by`, has taken its place), node.sandboxes_abandoned (it is forgotten, and nobody
    could stop these), session.reaped (its node was lost; what became of it is the next event),
    limits.published (the deployment has others: `version`, `by`),
    run.policy_version (its trainer has published another policy; `before` is left out for its first),
    task.acknowledged (its trainer has stored results), redis.memory (how full Redis is has changed). `data` always has
    `task_id` for task and session events.
    """

    event_id: str
    type: str
    at: datetime
    data: dict[str, Any] = {}
