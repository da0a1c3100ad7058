"""Training runs: which there are, pause and resume, the policy version."""

from __future__ import annotations

import re

from aiohttp import web

from polarq.contracts.base import ID_PATTERN
from polarq.http.answers import Refused, answer, problems
from polarq.http.polar_shapes import RunList, RunRow
from polarq.http.queries import NoQuery, PolicyVersionQuery, query
from polarq.http.shim import Shim
from polarq.ledger.control import RunState


async def list_runs(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    made: RunList = {"runs": [_row(run) for run in await shim.client.runs()]}
    return answer(made)


async def pause_run(shim: Shim, request: web.Request) -> web.StreamResponse:
    """A run that nothing was submitted of yet can be paused too: then its first task waits."""
    query(request, NoQuery)
    return answer(_row(await shim.client.pause_run(_run_id(request))))


async def resume_run(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    return answer(_row(await shim.client.resume_run(_run_id(request))))


async def get_run(shim: Shim, request: web.Request) -> web.StreamResponse:
    """A run that nothing was submitted of is one of which nothing waits."""
    query(request, NoQuery)
    return answer(_row(await shim.client.run(_run_id(request))))


async def set_policy_version(shim: Shim, request: web.Request) -> web.StreamResponse:
    asked = query(request, PolicyVersionQuery)
    return answer(_row(await shim.client.set_policy_version(_run_id(request), asked.version)))


def _run_id(request: web.Request) -> str:
    run_id = request.match_info["run_id"]
    if not re.fullmatch(ID_PATTERN, run_id):
        raise Refused(422, problems([f"run_id: '{run_id}' is not a run id"], "path"))
    return run_id


def _row(run: RunState) -> RunRow:
    row: RunRow = {"run_id": run.run_id, "paused": run.paused, "waiting": run.waiting, "in_flight": run.held}
    if run.policy_version is not None:
        row["policy_version"] = run.policy_version
    return row
