"""A polarq with sandboxes that are kept apart, and a scripted model that works through a program's own tools."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import urllib.request
from collections.abc import Iterator
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
_ITS_EDIT = "{}\n```\n{}```"
"""A file in an answer of Aider's."""


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


def asking(file: str, script: str, harness: str = "", **changes: Any) -> Task:
    """An example's task, which tells the scripted model what to do; over `harness` in place of its own."""
    task = Task.load(EXAMPLES / file).model_dump(mode="json", exclude={"task_id"})
    if harness:
        own = load(harness)
        task["agent"] = {**own.agent, "harness": harness}
        task["runtime"]["prepare"] += own.runtime.get("prepare", [])
    return Task.load(
        {**task, "instruction": f"{task['instruction']} [script: {script}]", "timeout_seconds": 900, **changes}
    )


def results(stack: LocalStack, task: Task) -> list[RolloutResult]:
    stack.client.submit(task)
    return stack.client.wait(task.task_id, WAIT_S).results


def shell_turn(harness: str, command: str) -> Turn:
    """A turn in which the model runs a command (in one line, without quotes) as this program lets it."""
    (turn,) = [turn for turn in load(harness).turns if _ITS_COMMAND in turn.model_dump_json()]
    return _other(turn, _ITS_COMMAND, command)


def writes(harness: str, file: str, text: str) -> Turn:
    """A turn in which the model writes a file: by a command, or by an edit where the program has no tools."""
    first = load(harness).turns[0]
    if _ITS_EDIT.format("hello.txt", "hello\n") in (first.content or ""):
        return _other(first, _ITS_EDIT.format("hello.txt", "hello\n"), _ITS_EDIT.format(file, text))
    return shell_turn(harness, f"echo {base64.b64encode(text.encode()).decode()} | base64 -d > {file}")


def script(harness: str, name: str, *turns: Turn) -> Script:
    """The turns, the program's own last one, and before them what it makes up itself."""
    known = load(harness)
    made_up = (Turn(content="Never asked for."),) * known.before
    # One that makes up answers makes up one more where a file that the instruction names is there.
    told = turns * 2 if made_up else turns
    return Script(name=name, turns=(*made_up, *told, known.turns[-1]))


def images(stack: LocalStack, rollout_id: str) -> list[list[str]]:
    """SHA-256 sums of the pictures that came to the inference server with each call of a rollout."""
    url = f"{stack.inference_url}/scripted/ledger?session_id={rollout_id}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return [call["images"] for call in json.load(answer)["calls"]]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _other(turn: Turn, old: str, new: str) -> Turn:
    """The turn with another text in what is said and called."""

    def put(value: Any) -> Any:
        return value.replace(old, new) if isinstance(value, str) else value

    calls = [
        ToolCall(name=call.name, arguments={key: put(value) for key, value in call.arguments.items()})
        for call in turn.tool_calls
    ]
    return Turn(content=put(turn.content), tool_calls=tuple(calls))
