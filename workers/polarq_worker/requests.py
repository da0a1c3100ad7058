"""Celery requests with some differences: what they show of their arguments, whose clock their times mean, and what a
cancellation means."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Literal

from celery.worker.request import Request
from celery.worker.state import revoked

from polarq.client.deployment import RUN_ROLLOUT
from polarq_worker.server_clock import ServerClock


class QuietRequest(Request):
    """A Celery request whose arguments are not shown, whatever its sender put into the headers.

    Celery compares `eta` and `expires` with the clock of the worker that happens to get the message; here it is the
    ledger's clock, so that a worker whose own is wrong, or is set meanwhile, neither runs a message early nor drops it.
    """

    _eta: datetime | None

    def __init__(self, message: Any, **kwargs: Any) -> None:
        given = kwargs.pop("headers", None) or message.headers
        super().__init__(message, headers={**given, "argsrepr": "(<task>)", "kwargsrepr": "{}"}, **kwargs)
        self._clock: ServerClock | None = getattr(self.app, "server_clock", None)
        if self._eta is not None and self._clock is not None:
            # Celery turns it into a moment of the monotonic clock at once, by this host's.
            self._eta += datetime.now(UTC) - self._clock.now()

    def maybe_expire(self) -> Literal[True] | None:
        now = datetime.now(UTC) if self._clock is None else self._clock.now()
        if self.expires is None or now <= self.expires:
            return None
        revoked.add(self.id)
        return True


class RolloutRequest(Request):
    """A doorbell's request. `revoke(terminate=True)` cancels the rollout; Celery's own cancellation of what runs, when
    the worker stops cold, gives it back to the queue instead."""

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        if self.time_start:
            pool.give_back(self.worker_pid)


def doorbell_of(tracer_args: Any) -> tuple[str, str] | None:
    """(rollout_id, the job's Celery id), given what Celery's tracer gets of a job: its name, id, request, raw body and
    the body's type. None for any other job, and for a message that is not as polarq sends it: the tracer refuses it."""
    if len(tracer_args) < 5 or tracer_args[0] != RUN_ROLLOUT or tracer_args[4] != "application/json":
        return None
    _, job_id, _, body, *_ = tracer_args
    try:
        (rollout_id, *_), *_ = json.loads(bytes(body))
    except (ValueError, TypeError):
        return None
    return (rollout_id, str(job_id)) if isinstance(rollout_id, str) else None
