"""A trainer says that it has stored results: they are archived, if the deployment has an archive, and then deleted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from polarq.client.results import Trajectories, from_summary
from polarq.client.steps import Steps, ask, work
from polarq.contracts.rollout import PayloadRef, RolloutResult
from polarq.contracts.task import Task, maybe_rollout_id, split_rollout_id
from polarq.errors import InvalidInput, PayloadCorrupt, PayloadMissing, TaskNotFound
from polarq.ledger import Call, Calls, RolloutRecord, TaskRecord
from polarq.ledger.retention import acknowledge as acknowledged
from polarq.ledger.retention import drop_payloads
from polarq.store.archive import Archive
from polarq.store.payloads import get_payload, read_raw

log = logging.getLogger("polarq.client.archive")

Batches = list[tuple[str, list[int]]]
"""(task id, indices) of what is acknowledged; no indices: all of the task's."""


def batches(rollout_ids: Iterable[str]) -> Batches:
    """Rollout ids by task. Raises `InvalidInput` for what is none."""
    found: dict[str, dict[int, None]] = {}
    wrong = []
    for rollout_id in rollout_ids:
        try:
            task_id, index = split_rollout_id(rollout_id)
        except ValueError as exc:
            wrong.append(str(exc))
        else:
            found.setdefault(task_id, {})[index] = None
    if wrong:
        raise InvalidInput("acknowledge", wrong)
    return [(task_id, list(indices)) for task_id, indices in found.items()]


def acknowledge(calls: Calls, archive: Archive | None, target: str | Iterable[str]) -> Steps[int]:
    """See `Client.acknowledge`."""
    if not isinstance(target, str):
        count = 0
        for task_id, indices in batches(target):
            count += yield from _acknowledge(calls, archive, task_id, indices)
        return count
    try:
        return (yield from _acknowledge(calls, archive, target, ()))
    except TaskNotFound:
        if maybe_rollout_id(target) is None:
            raise
    return (yield from acknowledge(calls, archive, [target]))


def _acknowledge(calls: Calls, archive: Archive | None, task_id: str, indices: Sequence[int]) -> Steps[int]:
    """How many were not acknowledged before. See `polarq.ledger.retention.acknowledge` for what it raises."""
    if archive is not None:
        yield from archive_task(calls, archive, task_id, indices)
    done = yield from ask(acknowledged(calls, task_id, indices))
    if done.left:
        # Last: whoever dies before this acknowledges again, or has them expire.
        yield from ask(drop_payloads(done.left))
    return done.count


def archive_task(calls: Calls, archive: Archive, task_id: str, indices: Sequence[int] = ()) -> Steps[int]:
    """Archives those of the rollouts that have ended and were not acknowledged. Returns how many.

    Raises `ArchiveFailed`.
    """
    record = yield from ask(calls.task(task_id, with_request=True))
    found = _to_archive(record, indices)
    for rollout in found:
        assert record is not None
        assert record.request is not None
        ref = _payload(rollout)
        read = None if ref is None else get_payload(ref)
        replies = None if read is None else (yield from ask(read_raw(read.commands)))
        yield from work(partial(_archive, archive, record.request, rollout, read, replies))
    return len(found)


def _to_archive(record: TaskRecord | None, indices: Sequence[int]) -> list[RolloutRecord]:
    if record is None:
        return []
    return [
        rollout
        for rollout in record.rollouts
        if rollout.state.terminal and rollout.acknowledged_at is None and (not indices or rollout.index in indices)
    ]


def _payload(rollout: RolloutRecord) -> PayloadRef | None:
    return rollout.summary.payload if rollout.summary is not None else None


def _archive(
    archive: Archive,
    request: Task,
    rollout: RolloutRecord,
    read: Call[RolloutResult] | None,
    replies: list[bytes | None] | None,
) -> None:
    """Writes one rollout: whole, or what the ledger has of one whose payload is not there."""
    result = from_summary(request.task_id, request.run_id, rollout, Trajectories.NONE, request.metadata)
    if read is not None:
        try:
            result = read.read(replies)
        except (PayloadMissing, PayloadCorrupt) as exc:
            # Or it was acknowledged just now by somebody else: what that one wrote is not overwritten by less.
            log.warning("rollout %s is archived without its trajectory: %s", rollout.rollout_id, exc)
    archive.keep(request, result)
