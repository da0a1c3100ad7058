"""The reaper's steps: what a lost node, a lost message or a lost last word left behind is put right.

Each step looks at everything again inside Redis, by the server's clock, so that two reapers at once, a renewal or a
commit that comes in between do no harm: whoever is first wins.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.rollout import Boundary, Outcome, RolloutState, RolloutSummary
from polarq.contracts.task import split_rollout_id
from polarq.ledger.blame import ALONE, LOSSES_PER_ATTEMPT, Share
from polarq.ledger.calls import Call, Calls
from polarq.ledger.records import decode, text_fields
from polarq.ledger.scripts import script

LEASES_AT_ONCE = 500
WAITING_AT_ONCE = 20_000
UNTOLD_AT_ONCE = 100
LOST_NODES_KEPT = 1000
"""Records of nodes that are gone, at most."""
LONGEST_TELL_S = 3600.0

_ROLLOUT_ID = re.compile(r".+\.[0-9]+", re.DOTALL)

LOST_TOO_OFTEN = "lost_too_often"

_FAILED = RolloutSummary(
    outcome=Outcome(state=RolloutState.FAILED, boundary=Boundary.NODE, reason=LOST_TOO_OFTEN, message="")
)
_CANCELLED = RolloutSummary(
    outcome=Outcome(
        state=RolloutState.CANCELLED,
        boundary=Boundary.CONTROL,
        reason="cancelled",
        message="cancelled on request; its node was lost before it could say so",
    )
)


def _for_lua(summary: RolloutSummary) -> str:
    """To be completed there: Lua's JSON would make an empty list an object, so what is empty is left out."""
    return summary.model_dump_json(exclude_defaults=True)


@dataclass(frozen=True, slots=True)
class Due:
    """What a reaper finds at a look."""

    expired: tuple[str, ...]
    """Rollouts whose lease ran out."""
    waiting: tuple[str, ...]
    """Rollouts that have waited for the given time, longest first."""
    untold: tuple[str, ...]
    """Tasks that ended and of which nobody said that Celery and the callback know."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of a rollout whose lease had run out. `action`: queued, failed or cancelled; held (somebody renewed
    it meanwhile), index (only the index was wrong) or orphan (there is no such rollout)."""

    action: str
    owner: str
    cause: str

    @property
    def ended(self) -> bool:
        return self.action in {"failed", "cancelled"}


@dataclass(frozen=True, slots=True)
class ServerLife:
    """Tells a server from its successor, and how long it has been up."""

    run_id: str
    up_s: float


def take_turn(calls: Calls, me: str, while_s: float) -> Call[bool]:
    """Whether `me` is the reaper now; then for `while_s` more."""
    keys, args = (calls.keys.reaper,), (me, int(while_s * 1000))
    return Call(lambda reply: int(reply) == 1, script("reap_turn"), keys, args)


def give_turn_up(calls: Calls, me: str) -> Call[None]:
    """Another worker may be the reaper at once."""
    body = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
    return Call(lambda _: None, commands=(("EVAL", body, 1, calls.keys.reaper, me),))


def server_life() -> Call[ServerLife]:
    def read(replies: list[Any]) -> ServerLife:
        info: dict[str, Any] = replies[0]
        return ServerLife(str(info.get("run_id", "")), float(info.get("uptime_in_seconds", 0)))

    return Call(read, commands=(("INFO", "server"),))


def _rollout_ids(found: Sequence[str]) -> tuple[str, ...]:
    """Those that are: whatever else stands in an index, the reaper goes on."""
    return tuple(item for item in found if _ROLLOUT_ID.fullmatch(item))


def look(calls: Calls, waited_s: float, most_waiting: int = WAITING_AT_ONCE) -> Call[Due]:
    """What is due, by the server's clock."""
    k = calls.keys
    args = (int(waited_s * 1000), LEASES_AT_ONCE, most_waiting, UNTOLD_AT_ONCE)

    def read(reply: list[list[bytes]]) -> Due:
        expired, waiting, untold = (tuple(decode(item) for item in part) for part in reply)
        return Due(_rollout_ids(expired), _rollout_ids(waiting), untold)

    return Call(read, script("reap_look"), (k.leases, k.waiting, k.untold), args)


def reap_lost(
    calls: Calls, rollout_id: str, max_attempts: int, share: Share = ALONE, *, dead: str = "", how: str = ""
) -> Call[Reaped]:
    """Takes a rollout back from an owner whose lease ran out, or whose incarnation is `dead`: queued again, or failed
    when it was the same crash too often (see `polarq.ledger.blame`). `how`: how its worker ended, if known."""
    k, task_id = calls.keys, split_rollout_id(rollout_id)[0]
    keys = (k.task(task_id), k.rollout(rollout_id), k.leases, k.events, k.tasks)
    args = (
        rollout_id, task_id, calls.events_max, k.rollout_stem(task_id), calls.keep_s, max_attempts,
        _for_lua(_FAILED), _for_lua(_CANCELLED), dead,
        LOSSES_PER_ATTEMPT * max_attempts, share.beside, share.share, how,
    )  # fmt: skip
    return Call(lambda reply: Reaped(*(decode(part) for part in reply)), script("reap_lost"), keys, args)


def ring_due(calls: Calls, rollout_id: str, after_s: float, longest_s: float, *, given_back: bool = False) -> Call[str]:
    """Asks for leave to ring a waiting rollout again: 'ring', or 'early', 'index' or 'orphan' (nothing to ring)."""
    k, task_id = calls.keys, split_rollout_id(rollout_id)[0]
    keys = (k.task(task_id), k.rollout(rollout_id), k.waiting)
    args = (rollout_id, int(after_s * 1000), int(longest_s * 1000), "1" if given_back else "0")
    return Call(decode, script("reap_ring"), keys, args)


def reap_nodes(calls: Calls, keep_s: float) -> Call[list[str]]:
    """Notices nodes that are gone, each once, and forgets those gone for `keep_s`; answers the newly noticed."""
    keys = (calls.keys.nodes, calls.keys.nodes_lost, calls.keys.events)
    args = (calls.events_max, int(keep_s * 1000), LOST_NODES_KEPT)
    return Call(lambda reply: [decode(i) for i in reply], script("reap_nodes"), keys, args)


def mend_task(calls: Calls, task_id: str) -> Call[str]:
    """Puts a running task's indexes and counters right, and ends it when all its rollouts have ended: 'finished',
    'mended', or 'right' (nothing to do)."""
    k = calls.keys
    keys = (k.task(task_id), k.leases, k.waiting, k.events, k.tasks)
    return Call(decode, script("reap_task"), keys, (task_id, calls.events_max, k.rollout_stem(task_id), calls.keep_s))


def some_tasks(calls: Calls, cursor: int, count: int) -> Call[tuple[int, list[str]]]:
    """(cursor to go on with, 0 at the end; about `count` task ids), in no order."""

    def read(replies: list[Any]) -> tuple[int, list[str]]:
        after, found = replies[0]
        flat = found.keys() if isinstance(found, dict) else [i[0] if isinstance(i, (list, tuple)) else i for i in found]
        return int(after), [decode(i) for i in flat]

    return Call(read, commands=(("ZSCAN", calls.keys.tasks, cursor, "COUNT", count),))


def left_to_tell(calls: Calls, task_id: str, *, told: bool = False) -> Call[str]:
    """What is left to tell of an ended task: 'nothing', 'wait' or 'tell'. With `told`, Celery's results know it."""
    k = calls.keys
    keys = (k.task(task_id), k.untold, k.callback_claim(task_id))
    return Call(decode, script("reap_untold"), keys, (task_id, "1" if told else "0", int(LONGEST_TELL_S * 1000)))


def count_reaped(calls: Calls, counts: Mapping[str, int]) -> Call[None]:
    commands = tuple(("HINCRBY", calls.keys.reaped, name, number) for name, number in counts.items())
    return Call(lambda _: None, commands=commands)


def reaped_counts(calls: Calls) -> Call[dict[str, int]]:
    """What reapers did since ever, by kind."""

    def read(replies: list[Any]) -> dict[str, int]:
        found = replies[0]
        pairs = found if isinstance(found, dict) else text_fields(found)
        return {decode(name): int(number) for name, number in pairs.items()}

    return Call(read, commands=(("HGETALL", calls.keys.reaped),))


# --- the queues, which may lie in another Redis


def queue_depths(calls: Calls, node_ids: Sequence[str]) -> Call[dict[str, int]]:
    """Messages per node's queue."""
    lists = [(node_id, name) for node_id in node_ids for name in calls.keys.queue_lists(node_id)]

    def read(replies: list[Any]) -> dict[str, int]:
        depths = dict.fromkeys(node_ids, 0)
        for (node_id, _), length in zip(lists, replies, strict=True):
            depths[node_id] += int(length)
        return depths

    return Call(read, commands=tuple(("LLEN", name) for _, name in lists))


def queued_messages(name: str, start: int, count: int) -> Call[list[bytes]]:
    """A page of one list. Newest first: what is taken meanwhile moves nothing, what is added is seen twice at most."""
    return Call(lambda replies: list(replies[0]), commands=(("LRANGE", name, start, start + count - 1),))


def rollout_of(message: bytes) -> str | None:
    """The rollout whose doorbell a message is; None for a message of another kind."""
    try:
        envelope = json.loads(message)
        if envelope["headers"]["task"] != "polarq.run_rollout":
            return None
        return str(json.loads(b64decode(envelope["body"]))[0][0])
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def drop_lists(lengths: Mapping[str, int]) -> Call[int]:
    """Deletes lists that are as long as they were when they were read; answers how many."""
    body = (
        "local n = 0 for i, k in ipairs(KEYS) do if redis.call('LLEN', k) == tonumber(ARGV[i]) then "
        "n = n + redis.call('DEL', k) end end return n"
    )
    command = ("EVAL", body, len(lengths), *lengths.keys(), *lengths.values())
    return Call(lambda replies: int(replies[0]), commands=(command,))


def still_waiting(calls: Calls, rollout_ids: Sequence[str]) -> Call[list[str]]:
    """Those of the rollouts that wait."""
    commands = tuple(("ZSCORE", calls.keys.waiting, rollout_id) for rollout_id in rollout_ids)

    def read(replies: list[Any]) -> list[str]:
        return [rollout_id for rollout_id, score in zip(rollout_ids, replies, strict=True) if score is not None]

    return Call(read, commands=commands)
