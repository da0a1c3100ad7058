"""The task's rules for model calls, retries and pauses, through a whole polarq."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from polarq.client import AsyncClient
from polarq.contracts import RolloutResult, RolloutState
from polarq.testing.stack import LocalStack
from tests.worker.conftest import ask, shell_task

RETRYING = """python3 - <<'PY'
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "[script: plain] hello"}]}).encode()
for count in range(3):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "x-stainless-retry-count": str(count)})
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
PY
"""


def run(stack: LocalStack, task: dict[str, Any]) -> RolloutResult:
    stack.client.submit(task)
    result = stack.client.wait(task["task_id"], 90).results[0]
    json.dumps(result.model_dump(mode="json"), allow_nan=False)
    return result


def test_a_task_limits_what_its_harness_may_ask_and_how(stack: LocalStack) -> None:
    rules = {"max_calls": 2, "max_tokens": 3, "sampling": {"temperature": 0.5}}
    result = run(stack, shell_task("rules-calls", ask(3), model=rules))
    assert result.trajectory is not None
    assert result.trajectory.fidelity.calls == 2
    assert [len(trace.response_ids) for trace in result.trajectory.traces] == [3, 3]
    assert result.harness is not None
    assert "404" in result.harness.steps[-1].stderr_tail  # the third call


def test_an_sdks_retries_are_one_sample_and_are_counted(stack: LocalStack) -> None:
    result = run(stack, shell_task("rules-retries", RETRYING))
    assert result.outcome.state is RolloutState.COMPLETED
    assert result.trajectory is not None
    assert (result.trajectory.fidelity.calls, result.trajectory.fidelity.replays) == (1, 2)
    assert result.harness is not None
    assert result.harness.steps[-1].stdout_tail.count("First answer.") == 3


def test_a_trainer_pauses_all_model_calls_and_nothing_is_lost(stack: LocalStack) -> None:
    async def pausing() -> list[RolloutResult]:
        async with AsyncClient(stack.topology, stack.settings) as client:
            state = await client.pause_inference(timeout_s=60)
            assert (state.paused, state.in_flight) == (True, 0)
            await client.submit(shell_task("rules-pause", ask(2), num_samples=3))
            async with asyncio.timeout(60):
                while sum(node.waiting for node in (await client.inference_state()).nodes) < 3:  # noqa: ASYNC110 - asked of Redis
                    await asyncio.sleep(0.05)
            assert await client.resume_inference()
            return list((await client.wait("rules-pause", 90)).results)

    results = asyncio.run(pausing())
    assert [result.outcome.state for result in results] == [RolloutState.COMPLETED] * 3
    assert all(result.trajectory is not None and result.trajectory.fidelity.calls == 2 for result in results)
