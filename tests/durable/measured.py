"""Rollouts whose durations are measured beside polarq: by the harness itself, and by the server's clock."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from polarq.contracts import RolloutState
from polarq.contracts.event import Event
from polarq.contracts.rollout import RolloutResult
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task

S = RolloutState
BUDGET_S = 300
"""Of each harness."""


def slow_task(task_id: str, folder: Path, gates: int = 1, **more: Any) -> dict[str, Any]:
    """Its harness notes when it begins and ends, by a clock that nobody sets, and asks the model at each gate."""
    log = folder / "uptime.log"
    note = f'read up _ < /proc/uptime; echo "$SESSION_ID %s $up" >> {log}\n'
    waits = "".join(f"while [ ! -e {folder}/gate{n} ]; do sleep 0.05; done\n{ask(1)}" for n in range(gates))
    command = note % "began" + waits + note % "ended"
    return shell_task(task_id, command, **{"timeout_seconds": BUDGET_S, **more})


def noted(folder: Path, word: str) -> dict[str, float]:
    log = folder / "uptime.log"
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return {rollout_id: float(up) for rollout_id, said, up in lines if said == word}


def events_of(stack: LocalStack, task_id: str) -> list[Event]:
    events: list[Event] = []
    after = "0"
    while page := stack.client.ledger.do(stack.client.ledger.calls.events(after)):
        events += page
        after = page[-1].event_id
    return [event for event in events if event.data.get("task_id") in {task_id, None}]


def server_time(stack: LocalStack) -> datetime:
    seconds, micros = stack.client.ledger.redis.time()
    return datetime.fromtimestamp(seconds + micros / 1e6, UTC)


def times_in(text: str) -> list[str]:
    return re.findall(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[^\"]*", text)


def durations_hold(stack: LocalStack, result: RolloutResult, folder: Path) -> None:
    """Stage by stage, against the harness's own clock and the server's."""
    timing = result.timing
    spent = [value for value in timing.model_dump().values() if value is not None]
    assert all(value >= 0 for value in spent), timing
    at = {
        event.data["status"]: event.at
        for event in events_of(stack, result.task_id)
        if event.type == "session.state_changed" and event.data.get("session_id") == result.rollout_id
    }

    def between(first: RolloutState, second: RolloutState) -> float:
        return (at[second] - at[first]).total_seconds()

    assert timing.agent_s is not None
    assert timing.prepare_s is not None
    assert timing.total_s is not None
    harness_s = noted(folder, "ended")[result.rollout_id] - noted(folder, "began")[result.rollout_id]
    assert harness_s - 1 <= timing.agent_s <= between(S.RUNNING, S.BUILDING) + 1
    assert timing.prepare_s <= between(S.PREPARING, S.READY) + 1
    assert timing.agent_s + timing.prepare_s <= timing.total_s <= between(S.PREPARING, S.COMPLETED) + 1
    assert result.started_at is not None
    assert result.ended_at is not None
    # A state's event follows its claim or commit within the same step of the server.
    second = timedelta(seconds=1)
    assert at[S.PREPARING] - second <= result.started_at <= at[S.PREPARING] + second
    assert result.started_at <= result.ended_at <= at[S.COMPLETED] + second
