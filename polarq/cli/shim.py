"""The HTTP shim as a door: Polar's routes, and what polarq puts beside Polar's fields."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from urllib.parse import quote, unquote, urlsplit

import httpx

from polarq.callback.record import CallbackAttempt
from polarq.cli.checks.ledger import is_loopback
from polarq.cli.door import Accepted, Stopped, Update, time_left
from polarq.cli.outcome import Unreachable, Unusable
from polarq.cli.picture import Picture, TaskLine
from polarq.cli.shim_json import event_of, inference_of, limits_of, picture_of, task_line_of
from polarq.client.pausing import InferenceState
from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task
from polarq.errors import (
    InvalidInput,
    InvalidTask,
    NodeNotFound,
    NotEnded,
    NotPaused,
    PayloadMissing,
    QueueFull,
    TaskConflict,
    TaskNotFound,
)
from polarq.http.polar_results import result_of
from polarq.ledger.control import RunState
from polarq.ledger.limits import Published
from polarq.store.pauses import PauseMode
from polarq.topology.models import LimitsSection

CONNECT_S = 10.0
ANSWER_S = 120.0
QUIET_S = 30.0
"""Longest silence of an event stream that pings every 15 s."""

_BUSY = frozenset({502, 503, 504})


_MOST_TASKS = 1000
"""As many as the shim lists at most."""


class ShimDoor:
    """A deployment behind its HTTP shim."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
            httpx.URL(self.url)
        except (ValueError, httpx.InvalidURL):
            usable = False
        if not usable:
            raise InvalidInput("--url", [f"'{url}' is not an http or https address"])
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            # An HTTP proxy of the environment does not know this machine.
            trust_env=not is_loopback(parts.hostname or ""),
        )

    @property
    def where(self) -> str:
        return f"shim {self.url}"

    def submit(self, task: Task) -> Accepted:
        answer = self._ask("POST", "/rollout/task/submit", json=task.model_dump(mode="json"))
        return Accepted(str(answer.get("task_id", task.task_id)), created=True)

    def picture(self, task_id: str) -> Picture:
        path = quote(task_id, safe="")
        status = self._ask("GET", f"/rollout/task/{path}", params={"trajectories": "none"})
        return picture_of(status, self._ask("GET", f"/tasks/{path}/sessions"))

    def rollout(self, rollout_id: str) -> RolloutResult:
        view = self._ask("GET", f"/sessions/{quote(rollout_id, safe='')}")
        if not isinstance(view.get("result"), Mapping):
            raise TaskNotFound(f"rollout '{rollout_id}' has not ended")
        return result_of(view["result"])

    def cancel(self, task_id: str, index: int | None) -> Stopped:
        before = self.picture(task_id)
        rows = before.rows if index is None else before.rows[index : index + 1]
        target = f"/rollout/task/{quote(task_id, safe='')}"
        self._ask("DELETE", target if index is None else f"/sessions/{quote(f'{task_id}.{index}', safe='')}")
        stopping = tuple(row.rollout_id for row in rows if not row.state.terminal and row.node_id)
        return Stopped(all(row.state.terminal for row in rows), stopping)

    def acknowledge(self, task_id: str, index: int | None) -> int:
        target = f"/rollout/task/{quote(task_id, safe='')}"
        if index is not None:
            target = f"/sessions/{quote(f'{task_id}.{index}', safe='')}"
        return int(self._ask("POST", f"{target}/acknowledge")["acknowledged"])

    def callbacks(self, task_id: str) -> list[CallbackAttempt]:
        told = self._ask("GET", f"/rollout/task/{quote(task_id, safe='')}/callbacks")
        return [CallbackAttempt.model_validate(attempt) for attempt in told["attempts"]]

    def tasks(self, limit: int) -> list[TaskLine]:
        return [task_line_of(row) for row in self._ask("GET", "/tasks", params={"limit": limit})["tasks"]]

    def run_tasks(self, run_id: str) -> list[str]:
        rows = self.tasks(_MOST_TASKS)
        if len(rows) == _MOST_TASKS:
            raise InvalidInput("--run", [f"the shim lists {_MOST_TASKS} tasks; name the tasks, or go to Redis itself"])
        found = [row.task_id for row in rows if row.run_id == run_id]
        if not found:
            raise TaskNotFound(f"no task of run '{run_id}' in the ledger (never submitted, or expired)")
        return found

    def nodes(self) -> list[NodeRecord]:
        return [_node(info) for info in self._ask("GET", "/nodes")]

    def drain(self, node_id: str, on: bool, deadline_s: float | None) -> NodeRecord:
        path = f"/nodes/{quote(node_id, safe='')}"
        params = {} if deadline_s is None else {"deadline_seconds": deadline_s}
        return _node(self._ask("DELETE", path, params=params) if on else self._ask("POST", f"{path}/undrain"))

    def pause_node(self, node_id: str, on: bool) -> NodeRecord:
        return _node(self._ask("POST", f"/nodes/{quote(node_id, safe='')}/{'pause' if on else 'resume'}"))

    def set_capacity(self, node_id: str, run_workers: int | None) -> NodeRecord:
        params = {} if run_workers is None else {"run_workers": run_workers}
        return _node(self._ask("POST", f"/nodes/{quote(node_id, safe='')}/capacity", params=params))

    def runs(self) -> list[RunState]:
        return [_run(row) for row in self._ask("GET", "/runs")["runs"]]

    def limits(self) -> Published:
        return limits_of(self._ask("GET", "/limits"))

    def set_limits(self, limits: LimitsSection) -> Published:
        return limits_of(self._ask("POST", "/admin/limits", json=limits.model_dump(mode="json")))

    def run(self, run_id: str) -> RunState:
        return _run(self._ask("GET", f"/runs/{quote(run_id, safe='')}"))

    def set_policy_version(self, run_id: str, version: int) -> RunState:
        path = f"/admin/runs/{quote(run_id, safe='')}/policy-version"
        return _run(self._ask("POST", path, params={"version": version}))

    def inference_state(self, run_id: str | None) -> InferenceState:
        return inference_of(self._ask("GET", "/admin/inference/status", params=_of_run(run_id)))

    def pause_inference(self, mode: PauseMode, timeout_s: float, lease_s: float, run_id: str | None) -> InferenceState:
        params = {"mode": mode, "timeout_seconds": timeout_s, "lease_seconds": lease_s, **_of_run(run_id)}
        timeout = httpx.Timeout(timeout_s + ANSWER_S, connect=CONNECT_S)
        return inference_of(self._ask("POST", "/admin/inference/pause", params=params, timeout=timeout))

    def resume_inference(self, run_id: str | None) -> InferenceState:
        return inference_of(self._ask("POST", "/admin/inference/resume", params=_of_run(run_id)))

    def pause_run(self, run_id: str, on: bool) -> RunState:
        return _run(self._ask("POST", f"/runs/{quote(run_id, safe='')}/{'pause' if on else 'resume'}"))

    def watch(self, task_id: str, timeout_s: float | None) -> Iterator[Update]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        picture = self.picture(task_id)
        yield Update(picture, [])
        last: str | None = None
        while not picture.state.terminal:
            wait_s = time_left(deadline, picture)
            for event in self._stream(task_id, last, wait_s):
                last = event.event_id
                if event.type != "ping":
                    # After the greeting too: what happened before the stream was there is in the record.
                    picture = self.picture(task_id)
                    yield Update(picture, [event] if event.data else [])
                if picture.state.terminal:
                    return
                time_left(deadline, picture)
            picture = self.picture(task_id)
            yield Update(picture, [])

    def events(self, task_id: str | None, after: str | None) -> Iterator[Event]:
        last = after or (None if task_id is None else f"{_created_ms(self.picture(task_id)) - 1}-0")
        while True:
            over = task_id is not None and self.picture(task_id).state.terminal
            for event in self._stream(task_id, last, 1.0 if over else QUIET_S):
                last = event.event_id
                if event.data:
                    yield event
            if over:
                return

    def _stream(self, task_id: str | None, after: str | None, quiet_s: float) -> Iterator[Event]:
        """Frames of one connection; ends after `quiet_s` without any, or when the shim closes it."""
        params = {} if task_id is None else {"task_id": task_id}
        headers = {} if after is None else {"Last-Event-ID": after}
        timeout = httpx.Timeout(quiet_s, connect=CONNECT_S)
        try:
            with self._http.stream("GET", "/events", params=params, headers=headers, timeout=timeout) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    self._refuse(answer, "/events")
                yield from _frames(answer.iter_lines())
        except httpx.ReadTimeout:
            return
        except httpx.ConnectError as exc:
            raise self._gone(exc) from None
        except httpx.TransportError:
            return  # a connection that was cut is opened again

    def _ask(self, method: str, path: str, **more: Any) -> Any:
        with self._translated():
            answer = self._http.request(method, path, **more)
        if answer.status_code >= httpx.codes.BAD_REQUEST:
            self._refuse(answer, path)
        try:
            return answer.json()
        except ValueError:
            raise Unreachable(f"{self.url}{path} answers no JSON; is this the address of a polarq shim?") from None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as exc:
            raise self._gone(exc) from None

    def _gone(self, exc: Exception) -> Unreachable:
        kind = type(exc).__name__
        return Unreachable(f"the shim at {self.url} does not answer ({kind}); start it with polarq serve, or see --url")

    def _refuse(self, answer: httpx.Response, path: str) -> NoReturn:
        """A refusal as the error that the other door would raise."""
        code, detail = answer.status_code, _detail(answer)
        text = "; ".join(detail)
        match code:
            case 401 | 403:
                raise Unusable(
                    f"the shim at {self.url} refuses us ({code}); set POLARQ_TOKEN to its token. It says: {text}"
                )
            case 404 if path.startswith("/nodes/"):
                raise NodeNotFound(f"no node '{unquote(path.split('/')[2])}' has announced itself")
            case 404 if path.startswith(("/rollout/task/", "/tasks/", "/sessions/")):
                wanted = unquote(path.removeprefix("/rollout").split("/")[2])
                raise TaskNotFound(f"no task or rollout '{wanted}' in the ledger (never submitted, or expired)")
            case 409 if path.endswith("/acknowledge"):
                raise NotEnded(text)
            case 409:
                raise TaskConflict(text)
            case 410:
                raise PayloadMissing(text)
            case 400 | 413 | 422:
                raise InvalidTask("task", detail)
            case 504 if path == "/admin/inference/pause":
                raise NotPaused(text)
            case 429:
                raise QueueFull(text, float(answer.headers.get("Retry-After", 1)))
            case _ if code in _BUSY:
                raise Unreachable(f"the shim at {self.url} answers {code}: {text}")
            case _:
                raise Unreachable(f"{self.url}{path} answers {code}: {text}; is this the address of a polarq shim?")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _detail(answer: httpx.Response) -> list[str]:
    """What a refusal says, one line per mistake."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, LookupError, TypeError):
        return [answer.reason_phrase or "no reason given"]
    if isinstance(detail, list):
        return [f"{'.'.join(str(p) for p in d.get('loc', [])[1:])}: {d.get('msg')}".removeprefix(": ") for d in detail]
    return [str(detail)]


def _frames(lines: Iterator[str]) -> Iterator[Event]:
    """Server-sent events out of their lines."""
    event_id = ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield event_of(event_id, json.loads("\n".join(data)))
            data = []
        elif line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))


def _node(info: Mapping[str, Any]) -> NodeRecord:
    if "node" not in info:
        raise Unreachable("this server lists nodes as Polar does; polarq needs a polarq shim")
    return NodeRecord.stored(info["node"])


def _run(row: Mapping[str, Any]) -> RunState:
    return RunState(
        run_id=str(row["run_id"]),
        paused=bool(row["paused"]),
        waiting=int(row["waiting"]),
        held=int(row["in_flight"]),
        policy_version=row.get("policy_version"),
    )


def _of_run(run_id: str | None) -> dict[str, str]:
    return {} if run_id is None else {"run_id": run_id}


def _created_ms(picture: Picture) -> int:
    return 1 if picture.created_at is None else int(picture.created_at.timestamp() * 1000)
