"""What of tasks that wait a node reads ahead of their turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarq.contracts.task import Task
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.records import Unreadable, decode, read_request


def requests_of(keys: Keys, task_ids: Sequence[str]) -> Call[list[Task | None]]:
    """Their requests, in order. None: it has gone meanwhile, or cannot be read here."""
    commands = tuple(("HGET", keys.task(task_id), "request") for task_id in task_ids)

    def read(replies: list[Any]) -> list[Task | None]:
        return [_read(task_id, reply) for task_id, reply in zip(task_ids, replies, strict=True)]

    return Call(read, commands=commands)


def _read(task_id: str, reply: bytes | str | None) -> Task | None:
    if reply is None:
        return None
    try:
        return read_request(task_id, decode(reply))
    except Unreadable:
        return None
