"""Celery requests with two differences: what they show of their arguments, and what a cancellation means."""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request


class QuietRequest(Request):
    """A Celery request whose arguments are not shown, whatever its sender put into the headers."""

    def __init__(self, message: Any, **kwargs: Any) -> None:
        given = kwargs.pop("headers", None) or message.headers
        super().__init__(message, headers={**given, "argsrepr": "(<task>)", "kwargsrepr": "{}"}, **kwargs)


class RolloutRequest(Request):
    """A doorbell's request. `revoke(terminate=True)` cancels the rollout; Celery's own cancellation of what runs, when
    the worker stops cold, gives it back to the queue instead."""

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        if self.time_start:
            pool.give_back(self.worker_pid)
