"""Reads for whoever follows many rollouts at once: plain commands, many to a round trip.

What is read here is not one consistent picture, and need not be: ends stay ends, and counters of ends only grow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.event import Event
from polarq.contracts.rollout import RolloutState
from polarq.ledger.calls import Call, Calls, read_event
from polarq.ledger.connection import stream_entries
from polarq.ledger.keys import Keys
from polarq.ledger.records import RolloutRecord, decode

_ENDS = ("completed", "failed", "timed_out", "cancelled")
_FIELDS = (
    "state", "attempt", "token", "owner", "job_id", "queued_ms", "claimed_ms", "ended_ms", "summary", "acknowledged_ms",
    "policy_version", "losses",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """How many rollouts of a task have ended."""

    task_id: str
    run_id: str
    total: int
    ended: int


@dataclass(frozen=True, slots=True)
class News:
    """Events after a cursor. `gap`: there may have been others, which are gone."""

    events: list[Event]
    cursor: str
    gap: bool


def progress(keys: Keys, task_ids: Sequence[str]) -> Call[list[Progress | None]]:
    """One entry per task, None for one that is unknown."""
    commands = tuple(("HMGET", keys.task(task_id), "run_id", "num", *_ENDS) for task_id in task_ids)

    def read(replies: list[list[bytes | None]]) -> list[Progress | None]:
        found: list[Progress | None] = []
        for task_id, (run_id, num, *ends) in zip(task_ids, replies, strict=True):
            known = num is not None
            ended = sum(int(count or 0) for count in ends)
            found.append(Progress(task_id, decode(run_id or b""), int(num or 0), ended) if known else None)
        return found

    return Call(read, commands=commands)


def ended_rollouts(keys: Keys, ids: Sequence[tuple[str, int]]) -> Call[list[RolloutRecord | None]]:
    """One entry per (task id, index), None for a rollout that has not ended or is unknown."""
    commands = tuple(("HMGET", keys.rollout(f"{task_id}.{index}"), *_FIELDS) for task_id, index in ids)

    def read(replies: list[list[bytes | None]]) -> list[RolloutRecord | None]:
        found: list[RolloutRecord | None] = []
        for (task_id, index), values in zip(ids, replies, strict=True):
            fields = {name: decode(value) for name, value in zip(_FIELDS, values, strict=True) if value is not None}
            over = "state" in fields and RolloutState(fields["state"]).terminal
            found.append(RolloutRecord.read(f"{task_id}.{index}", index, fields) if over else None)
        return found

    return Call(read, commands=commands)


def request_metadata(keys: Keys, task_id: str) -> Call[dict[str, Any]]:
    """A task's own metadata; empty when the task is gone."""

    def read(replies: list[bytes | None]) -> dict[str, Any]:
        metadata: dict[str, Any] = json.loads(replies[0] or b"{}").get("metadata") or {}
        return metadata

    return Call(read, commands=(("HGET", keys.task(task_id), "request"),))


def events_after(calls: Calls, after: str, wait_s: float) -> Call[list[Event]]:
    """Waits at the server for events after a cursor, at most `wait_s`; none when there were none."""
    command = ("XREAD", "COUNT", 500, "BLOCK", max(1, int(wait_s * 1000)), "STREAMS", calls.keys.events, after)
    return Call(lambda replies: stream_entries(replies[0]), commands=(command,))


def news(calls: Calls, after: str, wait_s: float) -> Call[News]:
    """Waits at the server for events after a cursor, at most `wait_s`."""
    events = calls.keys.events
    commands = (
        ("XREAD", "COUNT", 500, "BLOCK", max(1, int(wait_s * 1000)), "STREAMS", events, after),
        ("XRANGE", events, "-", "+", "COUNT", 1),
        ("XREVRANGE", events, "+", "-", "COUNT", 1),
    )

    def read(replies: list[Any]) -> News:
        found, first, last = stream_entries(replies[0]), *([read_event(*e) for e in reply] for reply in replies[1:])
        if not first or not last:
            return News(found, found[-1].event_id if found else "0-0", gap=after != "0-0")
        # Trimmed: what followed the cursor may be gone. Set back: the server has lost its end, and counts anew.
        trimmed = position(first[0].event_id) > position(after)
        set_back = position(last[0].event_id) < position(after)
        cursor = last[0].event_id if set_back else found[-1].event_id if found else after
        return News(found, cursor, trimmed or set_back)

    return Call(read, commands=commands)


EVENT_ID = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


def position(event_id: str) -> tuple[int, int]:
    """Event ids in their order: milliseconds, then a number within them."""
    moment, _, number = event_id.partition("-")
    return int(moment), int(number or 0)
