"""What is kept of each try to deliver a callback, with its task in the ledger."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from polarq.contracts.base import Contract
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys

ATTEMPTS_KEPT = 50
"""Of one task, the newest."""


class Ending(StrEnum):
    """How one try ended."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    """The receiver answered with a status that another try will not change."""
    REDIRECTED = "redirected"
    UNWELL = "unwell"
    """The receiver answered that it cannot now (408, 425, 429, 5xx)."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke before a status came."""
    TOO_SLOW = "too_slow"
    UNKNOWN_HOST = "unknown_host"
    FORBIDDEN_ADDRESS = "forbidden_address"
    """The address is not allowed, or its name leads to where callbacks must not go. Nothing was sent."""

    @property
    def final(self) -> bool:
        return self in {Ending.DELIVERED, Ending.REFUSED, Ending.REDIRECTED, Ending.FORBIDDEN_ADDRESS}


class CallbackAttempt(Contract):
    """One try, as it is kept in the ledger."""

    delivery_id: str
    number: int
    """From 1."""
    at: datetime
    ending: Ending
    status: int | None = None
    host: str
    """Host and port as the task named them (the rest of the address may hold a secret)."""
    address: str | None = None
    """Where the connection went."""
    duration_s: float = 0.0
    message: str = ""
    retry_after_s: float | None = None
    """What the receiver asked to wait, where it did."""


def record_attempt(keys: Keys, task_id: str, attempt: CallbackAttempt, keep_s: int) -> Call[None]:
    key = keys.callbacks(task_id)
    commands = (
        ("RPUSH", key, attempt.model_dump_json()),
        ("LTRIM", key, -ATTEMPTS_KEPT, -1),
        ("EXPIRE", key, keep_s),
    )
    return Call(lambda _: None, commands=commands)


def attempts(keys: Keys, task_id: str) -> Call[list[CallbackAttempt]]:
    """Every kept try of a task's callback, oldest first."""
    command = ("LRANGE", keys.callbacks(task_id), 0, -1)
    return Call(lambda replies: [CallbackAttempt.stored(r) for r in replies[0]], commands=(command,))


def last_number(keys: Keys, task_id: str) -> Call[int]:
    """How often it was tried."""
    command = ("LRANGE", keys.callbacks(task_id), -1, -1)
    return Call(lambda r: CallbackAttempt.stored(r[0][0]).number if r[0] else 0, commands=(command,))
