"""Tasks and their sessions: submit, read, list, cancel."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from polarq.callback.record import attempts
from polarq.client.results import Trajectories
from polarq.contracts.rollout import Outcome, RolloutState, RolloutSummary, TaskState
from polarq.errors import TaskNotFound
from polarq.http.answers import Refused, answer, json_response
from polarq.http.polar_json import session_row, session_status
from polarq.http.polar_shapes import (
    Acknowledged,
    CallbackTries,
    SessionCancelled,
    SessionList,
    SubmitAnswer,
    TaskList,
    TaskStatus,
)
from polarq.http.queries import (
    CancelQuery,
    NoQuery,
    TaskQuery,
    TasksQuery,
    json_object,
    query,
    rollout_id_of,
    task_id_of,
)
from polarq.http.shim import Shim
from polarq.http.task_body import encode, session_json, task_parts
from polarq.ledger import Cancelled, RolloutRecord, TaskRecord

log = logging.getLogger(__name__)

TOMBSTONE_S = 300


async def submit(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    done = await shim.client.submit(await json_object(request))
    made: SubmitAnswer = {"task_id": done.task_id, "status": done.state.value}
    return answer(made)


async def get_task(shim: Shim, request: web.Request) -> web.StreamResponse:
    asked = query(request, TaskQuery)
    record = await shim.ended_record(task_id_of(request), asked.wait)
    return await _task_answer(shim, request, record, asked)


async def cancel_task(shim: Shim, request: web.Request) -> web.StreamResponse:
    asked = query(request, CancelQuery)
    task_id = task_id_of(request)
    done = await _cancel(shim, task_id, None, TOMBSTONE_S if asked.register_if_missing else 0)
    if done.registered:
        gone: TaskStatus = {
            "task_id": task_id,
            "status": TaskState.CANCELLED.value,
            "total_sessions": 0,
            "completed_sessions": 0,
            "results": [],
            "result_paths": [],
        }
        return answer(gone)
    record = await shim.ended_record(task_id, asked.wait)
    if not done.already_over:
        shim.call_back(record)
    return await _task_answer(shim, request, record, asked)


async def acknowledge_task(shim: Shim, request: web.Request) -> web.StreamResponse:
    """The trainer has stored the results: archived where there is an archive, then deleted."""
    query(request, NoQuery)
    task_id = task_id_of(request)
    await shim.record(task_id)
    made: Acknowledged = {"task_id": task_id, "acknowledged": await shim.client.acknowledge(task_id)}
    return answer(made)


async def acknowledge_session(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    record, rollout = await _session(shim, request)
    made: Acknowledged = {
        "task_id": record.task_id,
        "acknowledged": await shim.client.acknowledge([rollout.rollout_id]),
    }
    return answer(made)


async def list_tasks(shim: Shim, request: web.Request) -> web.StreamResponse:
    asked = query(request, TasksQuery)
    rows = await shim.index.rows(
        lambda task: (
            (asked.status is None or task.state.value == asked.status)
            and (asked.harness is None or task.harness == asked.harness)
            and task.updated_ms >= asked.since * 1000
        ),
        asked.limit,
    )
    made: TaskList = {"tasks": rows}
    return answer(made)


async def list_sessions(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    record = await shim.client.record(task_id_of(request))
    made: SessionList = {
        "task_id": record.task_id,
        "sessions": [session_row(record.task_id, rollout) for rollout in record.rollouts],
    }
    return answer(made)


async def list_callbacks(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    record = await shim.client.record(task_id_of(request))
    ledger = shim.client.ledger
    tries = await ledger.do(attempts(ledger.calls.keys, record.task_id))
    made: CallbackTries = {"task_id": record.task_id, "attempts": [a.model_dump(mode="json") for a in tries]}
    return answer(made)


async def get_session(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    record, rollout = await _session(shim, request)
    summary = rollout.summary or RolloutSummary(outcome=Outcome(state=rollout.state))
    view = {
        "session_id": rollout.rollout_id,
        "task_id": record.task_id,
        "status": session_status(rollout.state),
        "node_id": rollout.owner,
        "attempt": rollout.attempt,
        "completion_count": summary.calls,
    }
    if rollout.policy_version is not None:
        view["policy_version"] = rollout.policy_version
    result = await session_json(shim.client.ledger, record, rollout) if rollout.state.terminal else b"null"
    body = encode(view).removesuffix(b"}") + b',"result":' + result + b"}"
    return json_response(body)


async def cancel_session(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    record, rollout = await _session(shim, request)
    if not rollout.state.terminal:
        done = await _cancel(shim, record.task_id, rollout.index, 0)
        record = await shim.record(record.task_id)
        rollout = record.rollouts[rollout.index]
        if not done.already_over:
            shim.call_back(record)
    made: SessionCancelled = {
        "session_id": rollout.rollout_id,
        "deleted": rollout.state is RolloutState.CANCELLED or rollout.cancel_requested,
        "messages_deleted": 0,
        "status": session_status(rollout.state),
    }
    return answer(made)


async def _session(shim: Shim, request: web.Request) -> tuple[TaskRecord, RolloutRecord]:
    task_id, index = rollout_id_of(request)
    try:
        record = await shim.record(task_id)
    except TaskNotFound:
        raise Refused(404, "Session not found") from None
    for rollout in record.rollouts:
        if rollout.index == index:
            return record, rollout
    raise Refused(404, "Session not found")


async def _cancel(shim: Shim, task_id: str, index: int | None, tombstone_s: int) -> Cancelled:
    """Cancels in the ledger, then tells the workers at once; without a broker their next heartbeat tells them."""
    client = shim.client
    done = await client.ledger.do(client.ledger.calls.cancel(task_id, index, tombstone_s))
    if not done.known and not done.registered:
        raise TaskNotFound(f"no task '{task_id}' in the ledger")
    await asyncio.to_thread(client.spread_word, task_id, done)
    return done


async def _task_answer(shim: Shim, request: web.Request, record: TaskRecord, asked: TaskQuery) -> web.StreamResponse:
    """Streams the status, so that a task of any size needs two sessions' memory. A failure in the middle cuts the
    connection: a client never takes half a body for a whole one."""
    paths = await shim.files.paths(record) if shim.files is not None else []
    parts = task_parts(
        shim.client.ledger,
        record,
        asked.trajectories,
        offset=asked.offset,
        limit=asked.limit,
        paths=paths,
        waiting_for=await shim.client.waiting_for(record.task_id) if record.counts.queued else None,
    )
    first = await anext(parts)
    if asked.trajectories is not Trajectories.FULL or not record.counts.ended:
        body = first + b"".join([part async for part in parts])
        return json_response(body)
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    await response.prepare(request)
    try:
        await response.write(first)
        async for part in parts:
            await response.write(part)
    except ConnectionResetError:
        raise
    except Exception:
        log.exception("the status of task %s broke off while it was sent", record.task_id)
        if request.transport is not None:
            request.transport.abort()
    return response
