"""Training runs: which there are, pause and resume, the policy version; and the limits they share."""

from __future__ import annotations

from aiohttp import web

from polarq.contracts.base import check_id
from polarq.errors import InvalidInput
from polarq.http.answers import Refused, answer, problems
from polarq.http.polar_shapes import LimitsView, RunList, RunRow
from polarq.http.queries import NoQuery, PolicyVersionQuery, json_object, query
from polarq.http.shim import Shim
from polarq.ledger.control import RunState
from polarq.ledger.limits import Published
from polarq.topology.models import LimitsSection


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


async def get_limits(shim: Shim, request: web.Request) -> web.StreamResponse:
    """Those that hold: the deployment's, or where nobody has published any, this server's own."""
    query(request, NoQuery)
    return answer(_limits(await shim.client.limits()))


async def set_limits(shim: Shim, request: web.Request) -> web.StreamResponse:
    query(request, NoQuery)
    wanted = LimitsSection.parse(await json_object(request), what="limits", error=InvalidInput)
    return answer(_limits(await shim.client.set_limits(wanted)))


def _limits(now: Published) -> LimitsView:
    return {
        "version": now.version,
        "by": now.by,
        "published_at": None if now.at is None else now.at.timestamp(),
        "limits": now.limits.model_dump(mode="json"),
    }


def _run_id(request: web.Request) -> str:
    try:
        return check_id("run", request.match_info["run_id"])
    except InvalidInput as exc:
        raise Refused(422, problems([f"run_id: {problem}" for problem in exc.problems], "path")) from None


def _row(run: RunState) -> RunRow:
    row: RunRow = {"run_id": run.run_id, "paused": run.paused, "waiting": run.waiting, "in_flight": run.held}
    if run.policy_version is not None:
        row["policy_version"] = run.policy_version
    return row
