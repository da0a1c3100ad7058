"""Celery's consumer, which here outlives whatever Redis answers and whatever lies in a queue.

Celery's own takes a lost connection for a reason to connect again, and anything else for the end of the worker: a Redis
that is full, a primary that becomes a replica, one message that is no message. None of these is a reason to give up
rollouts that run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty
from typing import Any

from celery.worker import state
from celery.worker.consumer import Consumer as CeleryConsumer
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

log = logging.getLogger("polarq.worker.consumer")

_PAUSE_S = 1.0
_STEP_S = 0.1
_OF_THE_QUEUE = (Empty, OSError, RedisError, KombuError)
"""What is not a message's own fault."""


class Consumer(CeleryConsumer):
    """Chosen by the node's bootstep."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lost: tuple[type[Exception], ...] = self.connection_errors  # type: ignore[has-type]
        self.connection_errors = (Exception,)

    def connection_for_read(self, heartbeat: float | None = None) -> Any:
        connection = self.app.connection_for_read(heartbeat=heartbeat)
        transport: Any = connection.transport
        transport.Channel = _forgiving(transport.Channel)
        return self.ensure_connected(connection)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        if isinstance(exc, self._lost):
            super().on_connection_error_after_connected(exc)
            return
        log.error("the queues cannot be read (%s); trying again in %g s", " ".join(str(exc).split()), _PAUSE_S)
        log.debug("what was refused", exc_info=exc)
        until = time.monotonic() + _PAUSE_S
        while time.monotonic() < until:
            state.maybe_shutdown()
            time.sleep(_STEP_S)

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)

        def heard(message: Any) -> None:
            try:
                handle(message)
            except _OF_THE_QUEUE:
                raise
            except Exception as exc:
                _dropped(exc)
                message.reject_log_error(log, (Exception,))

        return heard


def _forgiving(channel: type) -> type:
    """That kind of channel, which drops what is no message and goes on with the next."""

    class Channel(channel):  # type: ignore[misc]
        def _brpop_read(self, **options: Any) -> Any:
            try:
                return super()._brpop_read(**options)
            except _OF_THE_QUEUE:
                raise
            except Exception as exc:
                _dropped(exc)
                return True

    return Channel


def _dropped(exc: Exception) -> None:
    log.error("a message in the queue cannot be read and is dropped (%s: %s)", type(exc).__name__, exc)
