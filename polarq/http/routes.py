"""Every route in one table: what serves it, and what `/openapi.json` says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from polarq.contracts.base import Contract
from polarq.contracts.task import Task
from polarq.http import events, nodes, polar_shapes, runs, tasks
from polarq.http.queries import (
    CancelQuery,
    CapacityQuery,
    DrainQuery,
    EventsQuery,
    InferenceQuery,
    NoQuery,
    PauseQuery,
    PolicyVersionQuery,
    TaskQuery,
    TasksQuery,
)
from polarq.http.shim import Shim
from polarq.topology.models import LimitsSection

Handler = Callable[[Shim, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path. `refusals`: status codes beside those that every route has."""

    method: str
    path: str
    handler: Handler
    summary: str
    answer: Any
    """The shape of the JSON; a content type as text for what is not JSON."""
    query: type[Contract] = NoQuery
    body: type[Contract] | None = None
    refusals: tuple[int, ...] = ()


_SHAPES = polar_shapes
_NODE_LIST = list[polar_shapes.GatewayNodeInfo]

ROUTES: tuple[Route, ...] = (
    Route("GET", "/health", nodes.health, "The process lives; needs no token", _SHAPES.Health),
    Route("GET", "/ready", nodes.ready, "Redis is reachable and usable", _SHAPES.Ready, refusals=(503,)),
    Route("GET", "/metrics", nodes.metrics, "Prometheus metrics", "text/plain"),
    Route(
        "POST", "/rollout/task/submit", tasks.submit, "Submit a task; the same request again is the same task",
        _SHAPES.SubmitAnswer, body=Task, refusals=(400, 409, 413, 429),
    ),
    Route(
        "GET", "/rollout/task/{task_id}", tasks.get_task, "A task with its ended sessions",
        _SHAPES.TaskStatus, query=TaskQuery, refusals=(404,),
    ),
    Route(
        "DELETE", "/rollout/task/{task_id}", tasks.cancel_task, "Cancel a task",
        _SHAPES.TaskStatus, query=CancelQuery, refusals=(404,),
    ),
    Route(
        "GET", "/rollout/task/{task_id}/callbacks", tasks.list_callbacks, "Tries to deliver the task's callback",
        _SHAPES.CallbackTries, refusals=(404,),
    ),
    Route(
        "POST", "/rollout/task/{task_id}/acknowledge", tasks.acknowledge_task,
        "The task's results are stored: archive and delete them", _SHAPES.Acknowledged, refusals=(404, 409),
    ),
    Route("GET", "/rollout/status", nodes.server_status, "Tasks, waiting sessions and nodes", _SHAPES.ServerStatus),
    Route("GET", "/tasks", tasks.list_tasks, "Tasks, newest change first", _SHAPES.TaskList, query=TasksQuery),
    Route(
        "GET", "/tasks/{task_id}/sessions", tasks.list_sessions, "Sessions of a task",
        _SHAPES.SessionList, refusals=(404,),
    ),
    Route(
        "GET", "/sessions/{session_id}", tasks.get_session, "One session, with its result once it has ended",
        _SHAPES.SessionView, refusals=(404,),
    ),
    Route(
        "DELETE", "/sessions/{session_id}", tasks.cancel_session, "Cancel one session",
        _SHAPES.SessionCancelled, refusals=(404,),
    ),
    Route(
        "POST", "/sessions/{session_id}/acknowledge", tasks.acknowledge_session,
        "The session's result is stored: archive and delete it", _SHAPES.Acknowledged, refusals=(404, 409),
    ),
    Route("GET", "/nodes", nodes.list_nodes, "Nodes", _NODE_LIST),
    Route("GET", "/nodes/{node_id}", nodes.get_node, "One node", _SHAPES.GatewayNodeInfo, refusals=(404,)),
    Route(
        "DELETE", "/nodes/{node_id}", nodes.drain_node, "Drain a node",
        _SHAPES.GatewayNodeInfo, query=DrainQuery, refusals=(404,),
    ),
    Route(
        "POST", "/nodes/{node_id}/undrain", nodes.undrain_node, "Let a node take work again",
        _SHAPES.GatewayNodeInfo, refusals=(404,),
    ),
    Route(
        "POST", "/nodes/{node_id}/pause", nodes.pause_node, "Let a node take nothing new",
        _SHAPES.GatewayNodeInfo, refusals=(404,),
    ),
    Route(
        "POST", "/nodes/{node_id}/resume", nodes.resume_node, "Let a paused node take work again",
        _SHAPES.GatewayNodeInfo, refusals=(404,),
    ),
    Route(
        "POST", "/nodes/{node_id}/capacity", nodes.set_capacity, "Change how many harnesses a node runs at once",
        _SHAPES.GatewayNodeInfo, query=CapacityQuery, refusals=(404,),
    ),
    Route("GET", "/runs", runs.list_runs, "Runs that wait, are in flight or are paused", _SHAPES.RunList),
    Route("GET", "/runs/{run_id}", runs.get_run, "One run", _SHAPES.RunRow),
    Route("POST", "/runs/{run_id}/pause", runs.pause_run, "Start nothing of a run", _SHAPES.RunRow),
    Route("POST", "/runs/{run_id}/resume", runs.resume_run, "Let a run's rollouts start again", _SHAPES.RunRow),
    Route(
        "GET", "/events", events.stream, "What happens, as server-sent events",
        "text/event-stream", query=EventsQuery,
    ),
    Route(
        "POST", "/admin/runs/{run_id}/policy-version", runs.set_policy_version,
        "Say which policy a run's engines sample with from now on", _SHAPES.RunRow, query=PolicyVersionQuery,
    ),
    Route("GET", "/limits", runs.get_limits, "What bounds the queue and shares the nodes", _SHAPES.LimitsView),
    Route(
        "POST", "/admin/limits", runs.set_limits, "Set the deployment's limits",
        _SHAPES.LimitsView, body=LimitsSection, refusals=(400,),
    ),
    Route(
        "GET", "/admin/inference/status", nodes.inference_status, "Whether inference is paused",
        _SHAPES.InferenceStatus, query=InferenceQuery,
    ),
    Route(
        "POST", "/admin/inference/pause", nodes.pause_inference, "Hold model calls back; waits until none is in flight",
        _SHAPES.InferenceStatus, query=PauseQuery, refusals=(504,),
    ),
    Route(
        "POST", "/admin/inference/resume", nodes.resume_inference, "Let model calls pass again",
        _SHAPES.InferenceStatus, query=InferenceQuery,
    ),
    Route("POST", "/nodes/register", nodes.not_over_http, "Nodes register through Redis", None, refusals=(501,)),
    Route("POST", "/nodes/{node_id}/heartbeat", nodes.not_over_http, "Nodes beat through Redis", None, refusals=(501,)),
    Route("POST", "/callbacks/session_result", nodes.not_over_http, "Nodes commit to Redis", None, refusals=(501,)),
)  # fmt: skip
