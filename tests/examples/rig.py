"""A polarq with sandboxes that are kept apart, and a scripted model that works through a program's own tools."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from polarq import bubblewrap
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task
from polarq.testing.conformance.bench import alone_in, default_cache
from polarq.testing.conformance.scenario import ENOUGH_TOKENS, load
from polarq.testing.inference import Script, ToolCall, Turn
from polarq.testing.stack import LocalStack

from ..needs import not_here

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_S = 1500.0
_ITS_COMMAND = "printf hello > hello.txt"
"""What the conformance scenarios let each program's shell tool do."""


@contextmanager
def stack(home: Path, harness: str, *scripts: Script) -> Iterator[LocalStack]:
    """What a program's recipe installs stays, beside what the conformance suite installed."""
    if why := bubblewrap.why_not():
        not_here(why)
    scenario = home / "scenario.yaml"
    told = {"name": "examples", "scripts": [script.model_dump(mode="json", exclude_none=True) for script in scripts]}
    scenario.write_text(yaml.safe_dump(told, sort_keys=False), "utf-8")
    state = Path(os.environ.get("HARNESS_CACHE") or default_cache()) / f"examples-{harness}"
    local = LocalStack(
        home,
        scenario=str(scenario),
        nodes={"node0": {"proxy": {"context": "exact"}, "max_run_workers": 2}},
        env={"POLARQ_STATE_DIR": str(state)},
        isolation="bubblewrap",
        max_model_len=ENOUGH_TOKENS,
        bound=True,
    )
    with alone_in(state), local as made:
        yield made


def asking(file: str, script: str, **changes: Any) -> Task:
    """An example's task, which tells the scripted model what to do."""
    task = Task.load(EXAMPLES / file).model_dump(mode="json", exclude={"task_id"})
    return Task.load(
        {**task, "instruction": f"{task['instruction']} [script: {script}]", "timeout_seconds": 900, **changes}
    )


def results(stack: LocalStack, task: Task) -> list[RolloutResult]:
    stack.client.submit(task)
    return stack.client.wait(task.task_id, WAIT_S).results


def shell_turn(harness: str, command: str) -> Turn:
    """A turn in which the model runs a command with the program's own shell tool."""
    scenario = load(harness)
    (turn,) = [turn for turn in scenario.turns if _ITS_COMMAND in turn.model_dump_json()]
    calls = [ToolCall(name=call.name, arguments=_with(call.arguments, command)) for call in turn.tool_calls]
    return Turn(content=turn.content, tool_calls=tuple(calls))


def ends(harness: str) -> Turn:
    return load(harness).turns[-1]


def has_a_shell_tool(harness: str) -> bool:
    return any(_ITS_COMMAND in str(call.arguments) for turn in load(harness).turns for call in turn.tool_calls)


def images(stack: LocalStack, rollout_id: str) -> list[list[str]]:
    """SHA-256 sums of the pictures that came to the inference server with each call of a rollout."""
    url = f"{stack.inference_url}/scripted/ledger?session_id={rollout_id}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return [call["images"] for call in json.load(answer)["calls"]]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _with(arguments: Mapping[str, Any], command: str) -> dict[str, Any]:
    return {
        key: value.replace(_ITS_COMMAND, command) if isinstance(value, str) else value
        for key, value in arguments.items()
    }
