"""Records of sandboxes that outlive their workers: written before one is started, dropped when it has been stopped."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from polarq.contracts.rollout import RolloutState
from polarq.contracts.sandbox import SandboxRecord
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.records import decode
from polarq.ledger.states import ACTIVE

log = logging.getLogger("polarq.ledger")


def note_sandbox(keys: Keys, record: SandboxRecord) -> Call[None]:
    command = ("HSET", keys.sandboxes(record.node_id), record.runtime_id, record.model_dump_json())
    return Call(lambda _: None, commands=(command,))


def drop_sandbox(keys: Keys, record: SandboxRecord) -> Call[None]:
    return Call(lambda _: None, commands=(("HDEL", keys.sandboxes(record.node_id), record.runtime_id),))


def forget_sandboxes(keys: Keys, node_id: str, runtime_ids: Sequence[str]) -> Call[None]:
    """At least one. Those without a record are passed over."""
    return Call(lambda _: None, commands=(("HDEL", keys.sandboxes(node_id), *runtime_ids),))


def sandboxes_of(keys: Keys, node_ids: Sequence[str]) -> Call[list[SandboxRecord]]:
    """All that these nodes' workers started and nobody is known to have stopped."""

    def read(replies: list[list[bytes]]) -> list[SandboxRecord]:
        return [record for reply in replies for text in reply if (record := _read(text)) is not None]

    return Call(read, commands=tuple(("HVALS", keys.sandboxes(node_id)) for node_id in node_ids))


def of_no_use(keys: Keys, records: Sequence[SandboxRecord]) -> Call[list[SandboxRecord]]:
    """Those whose attempt is over for the ledger: nothing that happens in them counts any more. What waits for a
    rollout is of use to the worker that has its node's place."""
    commands = tuple(
        ("HMGET", keys.rollout(record.rollout_id), "state", "token")
        if record.rollout_id
        else ("GET", keys.node_alive(record.node_id))
        for record in records
    )

    def read(replies: list[Any]) -> list[SandboxRecord]:
        return [record for record, reply in zip(records, replies, strict=True) if not _held(record, reply)]

    return Call(read, commands=commands)


def _held(record: SandboxRecord, reply: Any) -> bool:
    if not record.rollout_id:
        return reply is not None and decode(reply) == record.incarnation
    state, token = reply
    return state is not None and RolloutState(decode(state)) in ACTIVE and int(token or 0) == record.token


def _read(text: bytes) -> SandboxRecord | None:
    try:
        return SandboxRecord.model_validate_json(text)
    except ValidationError as exc:
        log.error("the record of a sandbox cannot be read: %s", exc.errors()[0]["msg"])
        return None
