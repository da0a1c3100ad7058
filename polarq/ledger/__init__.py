"""The truth about every task and rollout, in Redis: records, states, claim, lease, commit, finish, events."""

from polarq.ledger.calls import Call, Calls
from polarq.ledger.connection import AsyncLedger, Ledger, calls_for
from polarq.ledger.keys import Keys
from polarq.ledger.records import (
    Cancelled,
    Claim,
    Committed,
    Refused,
    Released,
    RolloutRecord,
    Submitted,
    TaskHead,
    TaskRecord,
)
from polarq.topology.redis_address import without_password

__all__ = [
    "AsyncLedger",
    "Call",
    "Calls",
    "Cancelled",
    "Claim",
    "Committed",
    "Keys",
    "Ledger",
    "Refused",
    "Released",
    "RolloutRecord",
    "Submitted",
    "TaskHead",
    "TaskRecord",
    "calls_for",
    "without_password",
]
