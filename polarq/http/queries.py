"""What requests may ask for: query parameters and bodies, read into models. An unknown parameter is refused."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from pydantic import Field

from polarq.client.controls import LONGEST_DRAIN_S, MOST_RUN_WORKERS
from polarq.client.pausing import LEASE_S, LONGEST_S, TIMEOUT_S
from polarq.client.results import Trajectories
from polarq.contracts.base import ID_PATTERN, Contract
from polarq.errors import InvalidInput, TaskNotFound
from polarq.http.answers import Refused, problems
from polarq.ledger.policy import MOST
from polarq.store.pauses import PauseMode

Q = TypeVar("Q", bound=Contract)

MAX_WAIT_S = 60.0
_LARGE_BODY = 256 * 1024
_DEEPEST = 200
"""Nesting of a task's JSON; deeper ones would break recursive readers behind this one."""
_ID = re.compile(ID_PATTERN)
_ROLLOUT_ID = re.compile(r"(.+)\.([0-9]{1,6})")


class NoQuery(Contract):
    """For routes without parameters."""


class TaskQuery(Contract):
    """Parameters of `GET /rollout/task/{task_id}`."""

    trajectories: Trajectories = Field(Trajectories.FULL, description="How much of each result: none, refs or full.")
    wait: float = Field(0.0, ge=0, le=MAX_WAIT_S, description="Seconds to wait for the task's end before answering.")
    offset: int = Field(0, ge=0, description="Ended results to skip (in sample order).")
    limit: int | None = Field(None, ge=1, description="Most results to answer with.")


class CancelQuery(TaskQuery):
    """Parameters of `DELETE /rollout/task/{task_id}`."""

    register_if_missing: bool = Field(False, description="Refuse the task for 300 s if it is submitted later.")
    wait: float = Field(10.0, ge=0, le=MAX_WAIT_S, description="Seconds to wait until everything has stopped.")


class TasksQuery(Contract):
    """Parameters of `GET /tasks`."""

    status: str | None = Field(None, pattern="^(running|completed|failed|cancelling|cancelled)$")
    harness: str | None = None
    since: float = Field(0.0, ge=0, description="Seconds since 1970; tasks that changed at or after it.")
    limit: int = Field(200, ge=1, le=1000)


class EventsQuery(Contract):
    """Parameters of `GET /events`."""

    after: str | None = Field(None, description="An event id to resume after; the header Last-Event-ID wins over it.")
    task_id: str | None = Field(None, description="Events of one task only.")


class DrainQuery(Contract):
    """Parameters of `DELETE /nodes/{node_id}`."""

    deadline_seconds: float | None = Field(
        None,
        ge=0,
        le=LONGEST_DRAIN_S,
        description="What has not ended by then goes back to the queue; without it there is no hurry.",
    )


class CapacityQuery(Contract):
    """Parameters of `POST /nodes/{node_id}/capacity`."""

    run_workers: int | None = Field(
        None,
        ge=1,
        le=MOST_RUN_WORKERS,
        description="Harnesses that run at once; without it: what the node's topology says.",
    )


class PolicyVersionQuery(Contract):
    """Parameters of `POST /admin/runs/{run_id}/policy-version`."""

    version: int = Field(ge=0, le=MOST, description="What the run's engines sample with from now on.")


class InferenceQuery(Contract):
    """Parameters of `/admin/inference/status` and `/admin/inference/resume`."""

    run_id: str | None = Field(None, pattern=ID_PATTERN, description="That run's own pause instead of that of all.")


class PauseQuery(InferenceQuery):
    """Parameters of `POST /admin/inference/pause`."""

    timeout_seconds: float = Field(
        TIMEOUT_S, gt=0, le=LONGEST_S, description="How long to wait until no call is in flight."
    )
    lease_seconds: float = Field(LEASE_S, gt=0, le=LONGEST_S, description="The pause ends by itself after this time.")
    mode: PauseMode = Field("drain", description="drain: calls in flight end; abort: they are cut.")


def query(request: web.Request, model: type[Q]) -> Q:
    """Raises `Refused` (422) with every mistake."""
    try:
        return model.parse(dict(request.query), what="query", error=InvalidInput)
    except InvalidInput as exc:
        raise Refused(422, problems(exc.problems, "query")) from None


async def no_body(request: web.Request) -> None:
    """Raises `Refused` (422) for a body that asks for something: parameters in it would have no effect."""
    data = (await request.read()).strip()
    try:
        empty = not data or msgspec.json.decode(data) == {}
    except (msgspec.DecodeError, RecursionError):
        empty = False
    if not empty:
        where = "/admin/inference/pause?mode=abort&timeout_seconds=...&lease_seconds=..."
        raise Refused(422, problems([f"the body is not read; send none, parameters go into the query ({where})"]))


def task_id_of(request: web.Request) -> str:
    """The id in the path. One that cannot be an id is answered like one that is not there."""
    task_id = request.match_info["task_id"]
    if not _ID.fullmatch(task_id):
        raise TaskNotFound(f"'{task_id}' is not a task id")
    return task_id


def rollout_id_of(request: web.Request) -> tuple[str, int]:
    """(task id, index) of the session id in the path."""
    match = _ROLLOUT_ID.fullmatch(request.match_info["session_id"])
    if match is None or not _ID.fullmatch(match[1]):
        raise Refused(404, "Session not found")
    return match[1], int(match[2])


def node_id_of(request: web.Request) -> str:
    return request.match_info["node_id"]


async def json_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object. Raises `Refused`: 400 for what is no JSON, 413, 422 for another kind of JSON."""
    data = (await request.read()).removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise Refused(400, f"the body is not UTF-8 text (byte {exc.start}); send JSON in UTF-8") from None
    try:
        if len(data) > _LARGE_BODY:
            value = await asyncio.to_thread(msgspec.json.decode, data)
        else:
            value = msgspec.json.decode(data)
    except msgspec.DecodeError as exc:
        raise Refused(400, f"the body is not JSON: {exc}") from None
    except RecursionError:
        raise Refused(400, "the body's JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise Refused(422, problems(["the body must be a JSON object with the fields of a task"]))
    if _deeper_than(value, _DEEPEST):
        raise Refused(400, f"the body's JSON is nested more than {_DEEPEST} levels deep")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            part
            for item in level
            for part in (item.values() if isinstance(item, dict) else item)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True
