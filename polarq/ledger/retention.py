"""What is let go, and when: acknowledged results, and tasks whose time in Redis is nearly over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.rollout import TaskState
from polarq.errors import NotEnded, TaskNotFound
from polarq.ledger.calls import Call, Calls
from polarq.ledger.records import decode
from polarq.ledger.scripts import script


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What an acknowledgement did."""

    count: int
    """Rollouts that were not acknowledged before."""
    left: tuple[str, ...]
    """Payloads in a Redis of their own, for `drop_payloads`: all attempts', also of those acknowledged before."""


def acknowledge(calls: Calls, task_id: str, indices: Sequence[int] = ()) -> Call[Acknowledged]:
    """Deletes the payloads and captured calls of these rollouts (all of the task's when none are named); their
    summaries stay as long as the task does. Payloads in a Redis of their own are left to `drop_payloads`.

    All or none: raises `NotEnded` when one has not ended, `TaskNotFound` when one does not exist.
    """
    k = calls.keys
    args = (
        task_id, calls.events_max, k.rollout_stem(task_id),
        "" if "payloads" in calls.elsewhere else k.payload_stem(task_id), k.completions_stem(task_id), *indices,
    )  # fmt: skip

    def read(reply: list[Any]) -> Acknowledged:
        word, *rest = [decode(part) for part in reply]
        if word == "unknown":
            which = f"rollout '{task_id}.{rest[0]}'" if rest else f"task '{task_id}'"
            raise TaskNotFound(f"no {which} in the ledger (never submitted, or expired)")
        if word == "not_ended":
            raise NotEnded(
                f"rollout '{task_id}.{rest[0]}' is {rest[1]}: only what has ended can be acknowledged; nothing was"
            )
        left = rest[1:] if "payloads" in calls.elsewhere else []
        return Acknowledged(int(rest[0]), tuple(k.payload_stem(task_id) + name for name in left))

    return Call(read, script("acknowledge"), (k.task(task_id), k.events), args)


def drop_payloads(stems: Sequence[str]) -> Call[None]:
    """Deletes payloads from a Redis of their own, once the ledger does not name them any more. Harmless to repeat;
    what is never dropped expires by itself."""
    source = (
        "for _, stem in ipairs(ARGV) do local n = 0 "
        "while redis.call('UNLINK', stem .. ':' .. n) == 1 do n = n + 1 end end return 1"
    )
    return Call(lambda _: None, commands=(("EVAL", source, 0, *stems),), at="payloads")


def ending_soon(calls: Calls, now_ms: float, left_s: float) -> Call[list[str]]:
    """Tasks whose last change was so long ago that, if they have ended, they expire within `left_s`; oldest first."""
    until = now_ms - (calls.keep_s - left_s) * 1000
    command = ("ZRANGEBYSCORE", calls.keys.tasks, now_ms - calls.keep_s * 1000, int(until))
    return Call(lambda replies: [decode(task_id) for task_id in replies[0]], commands=(command,))


def not_archived(calls: Calls, task_ids: Sequence[str]) -> Call[list[str]]:
    """Those of the tasks that have ended and are not marked as archived."""
    commands = tuple(("HMGET", calls.keys.task(task_id), "state", "archived") for task_id in task_ids)

    def read(replies: list[list[bytes | None]]) -> list[str]:
        return [
            task_id
            for task_id, (state, archived) in zip(task_ids, replies, strict=True)
            if state is not None and TaskState(decode(state)).terminal and archived is None
        ]

    return Call(read, commands=commands)


def archive_turn(calls: Calls, me: str, turn_s: float) -> Call[bool]:
    """Whether it is this worker that archives now: one at a time, for a while."""
    return Call(lambda reply: int(reply) == 1, script("reap_turn"), (calls.keys.archiver,), (me, int(turn_s * 1000)))


def mark_archived(calls: Calls, task_id: str) -> Call[None]:
    """Says that a task needs no archiving any more. A task that expired meanwhile stays gone."""
    source = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'archived', '1') end return 1"
    return Call(lambda _: None, commands=(("EVAL", source, 1, calls.keys.task(task_id)),))


def server_ms() -> Call[float]:
    """The server's clock, in milliseconds."""

    def read(replies: list[Any]) -> float:
        seconds, micros = replies[0]
        return int(seconds) * 1000 + int(micros) / 1000

    return Call(read, commands=(("TIME",),))
