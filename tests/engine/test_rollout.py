"""Whole rollouts against the real server: real worker, real proxy, real Redis, real harness programs.

The model is random, so nothing gets solved; what is tested is everything between the engine and the committed
trajectory. The task is the calculator example, and its tests give the reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarq.contracts import Task, TaskResult
from polarq.contracts.endings import OWN_DOING
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.trajectory import Trace, Trajectory
from polarq.testing.stack import LocalStack

from .conftest import ROOT, Note
from .reference import Forward
from .server import Server

RESULT_DEADLINE_S = 300.0
CALLS = 4
HARNESS = """python3 - <<'PY'
import json, os, sys, urllib.request

def ask(messages, **more):
    body = json.dumps({"model": "calculator-agent", "messages": messages, "max_tokens": 48, "temperature": 1.0, **more})
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    said = urllib.request.urlopen(request).read().decode()
    if "token_ids" in said or '"logprob"' in said:
        sys.exit("the harness was shown tokens that it did not ask for")
    if not more.get("stream"):
        return json.loads(said)["choices"][0]["message"]
    events = [line[6:] for line in said.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        sys.exit("the stream broke off")
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")}
    return {"role": "assistant", **text}

tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
messages = [{"role": "user", "content": open(os.environ["POLARQ_INSTRUCTION_FILE"]).read()}]
for turn in range(4):
    reply = ask(messages, stream=turn % 2 == 1, **({"tools": [tool]} if turn > 1 else {}))
    messages += [reply, {"role": "user", "content": "Go on."}]
PY
"""
"""Four turns of one conversation by the standard library: unary and streamed in turn, the last two with a tool."""


class EngineStack(LocalStack):
    """A whole polarq whose node infers on the real server instead of the scripted one."""

    def __init__(self, home: Path, engine: Server) -> None:
        node = {
            "model_served": engine.model,
            "max_run_workers": 2,
            "inference": {"engine": engine.engine, "base_url": engine.base_url},
        }
        super().__init__(home, nodes={"node0": node})
        self._engine = engine

    def start_inference(self, port: int = 0, *, wait: bool = True) -> None:
        self.inference_url = self._engine.base_url

    def wait_for_inference(self) -> None:
        """It answers already."""


@pytest.fixture(scope="module")
def stack(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStack]:
    with EngineStack(tmp_path_factory.mktemp("stack"), engine) as running:
        yield running


def calculator_task(task_id: str, agent: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = Task.load(ROOT / "examples" / "calculator" / "task.yaml").model_dump(mode="json", exclude_defaults=True)
    return {**task, "task_id": task_id, "agent": agent, **more}


def run(stack: EngineStack, task: dict[str, Any]) -> TaskResult:
    stack.client.submit(task)
    return stack.client.wait(task["task_id"], RESULT_DEADLINE_S)


def trajectory_of(rollout: RolloutResult) -> Trajectory:
    """Of a rollout that ended by its own doing (a random model's last answer may be empty, or cut at its limit) and was
    scored by its tests, which such a model cannot make pass."""
    assert rollout.outcome.ending in OWN_DOING, rollout.outcome
    assert rollout.outcome.trainable, rollout.outcome
    assert rollout.reward is not None
    assert (rollout.reward.outcome, rollout.reward.evaluator) == (0.0, "test_on_output")
    assert rollout.trajectory is not None
    return rollout.trajectory


def check_traces(forward: Forward, traces: list[Trace]) -> float:
    """The largest difference of any trained token's log-probability from the forward pass over the trace's own ids."""
    differences = []
    for trace in traces:
        assert trace.untrainable is None
        assert trace.loss_mask == [1] * len(trace.response_ids)
        differences.append(forward.difference(trace.prompt_ids, trace.response_ids, trace.logprobs))
    return max(differences)


def rendered_by(engine: Server, trace: Trace) -> list[int]:
    """What the server itself makes of the messages that the trace says were sent (thinking under the server's name)."""
    named = {"reasoning_content": "reasoning"} if engine.engine == "vllm" else {}
    body: dict[str, Any] = {
        "model": engine.model,
        "messages": [{named.get(key, key): value for key, value in m.items()} for m in trace.prompt_messages],
        "tools": trace.tools,
    }
    if engine.started_here:
        body["chat_template_kwargs"] = {"keep_thinking": True}
    ids: list[int] = (
        httpx.post(f"{engine.base_url}/tokenize", json=body, timeout=120).raise_for_status().json()["tokens"]
    )
    return ids


def test_a_committed_trajectory_passes_the_forward_check_token_by_token(
    engine: Server, stack: EngineStack, forward: Forward, note: Note
) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": HARNESS}}
    result = run(stack, calculator_task("engine-shell", agent, num_samples=2))
    trajectories = [trajectory_of(rollout) for rollout in result.results]
    assert len(trajectories) == 2
    for trajectory in trajectories:
        fidelity = trajectory.fidelity
        assert fidelity.calls == fidelity.traces == len(trajectory.traces) == CALLS
        assert (
            fidelity.trainable_tokens == fidelity.sampled_tokens == sum(len(t.response_ids) for t in trajectory.traces)
        )
        assert fidelity.missing_logprobs == fidelity.incomplete_calls == fidelity.masked_tokens == 0
        assert fidelity.versions == [engine.weight_version()]
        for trace in trajectory.traces:
            assert rendered_by(engine, trace) == trace.prompt_ids
    traces = [trace for trajectory in trajectories for trace in trajectory.traces]
    assert traces[0].response_ids != traces[CALLS].response_ids
    difference = check_traces(forward, traces)
    note(
        f"rollouts of a shell harness: {len(traces)} traces, {sum(t.trainable_tokens for t in traces)} trained of "
        f"{sum(t.fidelity.sampled_tokens for t in trajectories)} sampled tokens, largest difference {difference:.1e}"
    )
    assert difference < forward.tolerance


def test_the_trajectories_hold_every_token_that_the_server_sampled_and_no_other(
    engine: Server, stack: EngineStack, note: Note
) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": HARNESS}}
    run(stack, calculator_task("engine-before", agent, num_samples=1))  # the proxy's own probe is over by its end
    before, answered = engine.sampled_tokens(), engine.answered_requests()
    result = run(stack, calculator_task("engine-count", agent, num_samples=3))
    trajectories = [trajectory_of(rollout) for rollout in result.results]
    kept = sum(len(trace.response_ids) for trajectory in trajectories for trace in trajectory.traces)
    sampled, requests = engine.sampled_tokens() - before, engine.answered_requests() - answered
    note(f"three rollouts: {kept} tokens in trajectories, {sampled:.0f} sampled by the server in {requests:.0f} calls")
    assert kept == sampled
    assert requests == 3 * CALLS


def test_the_unmodified_mini_swe_agent_runs_on_the_real_server(
    stack: EngineStack, forward: Forward, note: Note
) -> None:
    """It gets nonsense for answers, says so to the model, and goes on until it reaches a limit of its own."""
    settings = {"step_limit": 4, "model_kwargs": {"max_tokens": 96, "temperature": 1.0}}
    agent = {"harness": "mini_swe_agent", "settings": settings}
    result = run(stack, calculator_task("engine-mini", agent, num_samples=1))
    [rollout] = result.results
    trajectory = trajectory_of(rollout)
    assert trajectory.fidelity.calls >= 2
    difference = check_traces(forward, trajectory.traces)
    note(
        f"mini-swe-agent: {trajectory.fidelity.calls} calls, {trajectory.fidelity.trainable_tokens} trained tokens, "
        f"longest prompt {max(len(t.prompt_ids) for t in trajectory.traces)} ids, "
        f"{len(trajectory.fidelity.breaks)} breaks, largest difference {difference:.1e}"
    )
    assert difference < forward.tolerance
