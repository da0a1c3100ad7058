"""A client written for Polar, both of its lines: its requests are taken, its models read the answers.

The models below are what such a client has: Polar's keys alone, and no other key in the timing.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from polarq.contracts.rollout import RolloutState
from tests.http.rig import Rig


class PolarTiming(BaseModel):
    model_config = ConfigDict(extra="forbid")

    register_to_init_queue_ms: float | None = None
    init_ms: float | None = None
    run_ms: float | None = None
    postrun_ms: float | None = None


class PolarTrace(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    finish_reason: str | None
    response_logprobs: list[float] | None
    reward: float | None
    metadata: dict[str, Any]


class PolarTrajectory(BaseModel):
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    metadata: dict[str, Any]
    traces: list[PolarTrace]
    error: str | None


class PolarSessionResult(BaseModel):
    session_id: str
    task_id: str
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    trajectory: PolarTrajectory
    timing: PolarTiming
    node_id: str | None
    error: str | None
    metadata: dict[str, Any]


class PolarTaskStatus(BaseModel):
    task_id: str
    status: str
    total_sessions: int
    completed_sessions: int
    results: list[PolarSessionResult]
    result_paths: list[str]


RELEASED: dict[str, Any] = {
    "task_id": "calculator-0001",
    "instruction": "Fix the calculator so that its tests pass.",
    "num_samples": 2,
    "timeout_seconds": 900.0,
    "runtime": {
        "backend": "docker",
        "image": "python:3.12",
        "prepare": [
            {"type": "upload_dir", "source": "/srv/calculator", "target": "/workspace"},
            {"type": "exec", "command": "pip install pytest", "cwd": "/workspace", "env": {"PIP_NO_CACHE_DIR": "1"}},
        ],
        "eval_prepare": None,
        "env": {"A": "b"},
        "network": "host",
        "workdir": "/workspace",
        "cpus": 2,
        "memory_mb": 4096,
        "gpus": 0,
        "allow_internet": True,
    },
    "agent": {
        "harness": "claude_code",
        "model_name": "m",
        "settings": {"max_turns": 20},
        "env": {},
        "mcp_servers": [{"name": "files", "transport": "stdio", "command": "mcp-files", "args": ["/workspace"]}],
        "skills_path": None,
    },
    "builder": {"strategy": "per_request", "config": {}},
    "evaluator": {"strategy": "session_completed", "config": {}, "env": {}, "refresh_runtime": False},
    "callback_url": "http://127.0.0.1:43117/callback/task_result",
    "metadata": {"group_id": 7, "policy_version": 3, "rollout_step": 3},
}

EXTENDED: dict[str, Any] = {
    **RELEASED,
    "task_id": "calculator-0002",
    "dispatch_priority": 80,
    "early_stop_min_usable_sessions": 1,
    "runtime": {
        **RELEASED["runtime"],
        "direct_exec_init_command": "true",
        "internet_volumes": [],
        "prepare": [
            {"type": "exec", "command": "make", "max_attempts": 3, "retry_backoff_seconds": 2.0},
        ],
    },
    "metadata": {**RELEASED["metadata"], "agent_timeout": 300, "eval_sampling_seed_base": 11},
}

OLDER: dict[str, Any] = {
    "task_id": "calculator-0003",
    "instruction": "x",
    "num_rollouts": 2,
    "runtime": {"backend": "docker", "image": "python:3.12"},
    "agent": {"harness": "shell", "custom_shell": {"command": "true", "cwd": None, "env": {}}},
}


@pytest.mark.parametrize("request_body", [RELEASED, EXTENDED, OLDER], ids=["released", "extended", "older"])
async def test_a_polar_client_submits_polls_and_reads_its_results(shim: Rig, request_body: dict[str, Any]) -> None:
    task_id = request_body["task_id"]
    response = await shim.http.post("/rollout/task/submit", json=request_body)
    assert (response.status_code, response.json()) == (200, {"task_id": task_id, "status": "running"})
    early = PolarTaskStatus.model_validate((await shim.http.get(f"/rollout/task/{task_id}")).json())
    assert (early.status, early.total_sessions, early.completed_sessions, early.results) == ("running", 2, 0, [])
    await shim.end(f"{task_id}.0")
    await shim.end(f"{task_id}.1", state=RolloutState.TIMED_OUT, reward=None)
    late = PolarTaskStatus.model_validate((await shim.http.get(f"/rollout/task/{task_id}")).json())
    assert (late.status, late.completed_sessions) == ("completed", 2)
    assert [result.status for result in late.results] == ["COMPLETED", "TIMEOUT"]
    trace = late.results[0].trajectory.traces[-1]
    assert trace.reward == 1.0
    assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.response_logprobs or [])
    assert late.results[0].metadata == request_body.get("metadata", {})
    for key, value in request_body.get("metadata", {}).items():
        if key in {"group_id", "policy_version", "rollout_step"}:
            assert late.results[0].trajectory.metadata[key] == value


async def test_a_polar_bridge_cancels_ahead_and_is_told_cancelled(shim: Rig) -> None:
    response = await shim.http.delete("/rollout/task/group-9", params={"register_if_missing": "true"})
    status = PolarTaskStatus.model_validate(response.json())
    assert (status.status, status.total_sessions) == ("cancelled", 0)
    late = await shim.http.post("/rollout/task/submit", json={**RELEASED, "task_id": "group-9"})
    assert late.status_code == 409


async def test_a_task_of_a_polar_client_that_is_cancelled_has_all_its_sessions(shim: Rig) -> None:
    await shim.http.post("/rollout/task/submit", json=RELEASED)
    await shim.end("calculator-0001.1")
    response = await shim.http.delete("/rollout/task/calculator-0001")
    status = PolarTaskStatus.model_validate(response.json())
    assert status.status == "cancelled"
    assert [result.status for result in status.results] == ["ERROR", "COMPLETED"]
    assert status.results[0].error == "cancelled before it started"
