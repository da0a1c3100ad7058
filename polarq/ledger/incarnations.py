"""A node's place, and who has it: each worker process is one incarnation of its node, told from every other by an id.

A node id is one worker's. `node-alive` holds the id of the incarnation that has the place, every claim is under one,
and a worker that finds its place taken takes nothing any more. What an incarnation held that is known to be dead (the
kernel says so on its own machine, see `polarq_worker.incarnation`) is taken back at once, whatever its leases say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.node import NodeRecord
from polarq.ledger.calls import Call, Calls
from polarq.ledger.records import decode
from polarq.ledger.scripts import script


@dataclass(frozen=True, slots=True)
class Holder:
    """The incarnation that has a node's place."""

    incarnation: str
    left_s: float
    """Until it counts as gone, unless it says that it lives."""
    record: NodeRecord | None


@dataclass(frozen=True, slots=True)
class Holding:
    """A rollout as somebody holds it."""

    rollout_id: str
    owner: str
    incarnation: str
    """Blank: not said."""
    lost: int
    """Attempts of it that ended with the loss of their worker."""


def enter(
    calls: Calls, node_id: str, incarnation: str, alive_s: float, *, dead: Collection[str] = ()
) -> Call[Holder | None]:
    """Takes a node's place; answers who has it, when another does that is not known to be dead and not stopping. With
    `alive_s` 0 this only asks."""
    args = (node_id, incarnation, int(alive_s * 1000), *dead)

    def read(reply: list[Any]) -> Holder | None:
        if decode(reply[0]) == "entered":
            return None
        record = NodeRecord.stored(reply[3]) if reply[3] else None
        return Holder(decode(reply[1]), int(reply[2]) / 1000, record)

    return Call(read, script("enter"), (calls.keys.node_alive(node_id), calls.keys.nodes), args)


def leased(calls: Calls) -> Call[list[str]]:
    """Every rollout that somebody holds, soonest to run out first."""
    return Call(lambda replies: [decode(i) for i in replies[0]], commands=(("ZRANGE", calls.keys.leases, 0, -1),))


def holdings(calls: Calls, rollout_ids: Sequence[str]) -> Call[list[Holding]]:
    """Who holds these rollouts; those that nobody holds are left out."""
    commands = tuple(
        ("HMGET", calls.keys.rollout(rollout_id), "owner", "incarnation", "lost") for rollout_id in rollout_ids
    )

    def read(replies: list[list[bytes | None]]) -> list[Holding]:
        return [
            Holding(rollout_id, decode(owner), decode(incarnation or b""), int(lost or 0))
            for rollout_id, (owner, incarnation, lost) in zip(rollout_ids, replies, strict=True)
            if owner is not None
        ]

    return Call(read, commands=commands)
