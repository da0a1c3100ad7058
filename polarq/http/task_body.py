"""A task as Polar's TaskStatus JSON, one session at a time.

A task with trajectories may be gigabytes. So the body is made in pieces: no more than two sessions are in memory at
once, and decoding and encoding happen beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from polarq.client.results import Trajectories, assemble
from polarq.contracts.rollout import RolloutResult
from polarq.errors import PayloadCorrupt, PayloadMissing
from polarq.http.polar_json import counts, session_result
from polarq.http.polar_shapes import SessionResult, TaskStatus
from polarq.ledger import AsyncLedger
from polarq.ledger.calls import Call
from polarq.ledger.records import RolloutRecord, TaskRecord
from polarq.store.payloads import get_payload, read_raw


def encode(value: Any) -> bytes:
    """JSON bytes; a number that is not finite becomes null."""
    return msgspec.json.encode(value)


def ended(record: TaskRecord) -> list[RolloutRecord]:
    """The rollouts that have ended, in sample order."""
    return [rollout for rollout in record.rollouts if rollout.state.terminal]


def task_head(
    record: TaskRecord, offset: int = 0, paths: Sequence[str] = (), waiting_for: str | None = None
) -> TaskStatus:
    """Everything of a task's status but the results."""
    return {
        "task_id": record.task_id,
        "status": record.state.value,
        "total_sessions": record.counts.total,
        "completed_sessions": record.counts.ended,
        "result_paths": list(paths),
        "counts": counts(record.counts),
        "run_id": record.run_id,
        "waiting_for": waiting_for,
        "created_at": record.created_at.timestamp(),
        "updated_at": record.updated_at.timestamp(),
        "results_offset": offset,
        "results_total": len(ended(record)),
        "results": [],
    }


async def task_parts(
    ledger: AsyncLedger,
    record: TaskRecord,
    wanted: Trajectories = Trajectories.FULL,
    *,
    offset: int = 0,
    limit: int | None = None,
    paths: Sequence[str] = (),
    waiting_for: str | None = None,
) -> AsyncIterator[bytes]:
    """The JSON of a task's status in pieces. `record` must hold the request.

    Raises `LedgerUnavailable`; a reader that was sent a part already must then be cut off, never be sent the rest.
    """
    page = ended(record)[offset:][:limit]
    head = encode(task_head(record, offset, paths, waiting_for))
    opening = head.removesuffix(b"]}")
    assert opening != head, "results must stand last"
    piece = opening
    for number, rollout in enumerate(page):
        made = await session_json(ledger, record, rollout, wanted)
        yield piece
        piece = b"," + made if number else made
    yield piece + b"]}"


async def task_body(
    ledger: AsyncLedger, record: TaskRecord, wanted: Trajectories = Trajectories.FULL, paths: Sequence[str] = ()
) -> bytes:
    """The whole JSON of a task with all its ended sessions, for the callback."""
    return b"".join([part async for part in task_parts(ledger, record, wanted, paths=paths)])


async def session_json(
    ledger: AsyncLedger, record: TaskRecord, rollout: RolloutRecord, wanted: Trajectories = Trajectories.FULL
) -> bytes:
    """One ended rollout as the JSON of Polar's SessionResult."""
    ref = rollout.summary.payload if rollout.summary and rollout.acknowledged_at is None else None
    if wanted is not Trajectories.FULL or ref is None:
        return encode(_without_payload(record, rollout, wanted))
    # The reply is taken as it is, and decoded in a thread: a payload may be 50 MB.
    read = get_payload(ref)
    raw = await ledger.do(read_raw(read.commands))
    return await asyncio.to_thread(_decoded, read, raw, record, rollout)


def _decoded(read: Call[RolloutResult], raw: list[Any], record: TaskRecord, rollout: RolloutRecord) -> bytes:
    try:
        result = read.read(raw)
    except (PayloadMissing, PayloadCorrupt) as exc:
        return encode(_without_payload(record, rollout, Trajectories.REFS, problem=str(exc)))
    return encode(session_result(result))


def _without_payload(
    record: TaskRecord, rollout: RolloutRecord, wanted: Trajectories, problem: str | None = None
) -> SessionResult:
    request = record.request
    assert request is not None
    alone = replace(record, rollouts=(rollout,))
    (result,) = assemble(alone, {}, wanted, request.metadata).results
    return session_result(result, builder=request.builder.strategy, summary=rollout.summary, problem=problem)
