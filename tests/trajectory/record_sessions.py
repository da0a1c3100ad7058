"""Records tests/fixtures/sessions anew: real agent programs repair the calculator example in 24 turns.

    python -m tests.trajectory.record_sessions                  all of them
    python -m tests.trajectory.record_sessions codex pi.exact   these

Each program runs unmodified in a local sandbox, through the real proxy, once in exact and once in observe mode, and a
few in observe mode once more with a model whose ids are not those that its texts encode to (NAME.drift). The model is
scripted (steps.yaml beside the recordings); what its shell tool is called stands in the program's scenario of the
conformance suite. HARNESS_CACHE: where installed programs are kept (else as `polarq harness check` keeps them). What
some programs tell the model of this machine (its kernel's release, where its Python is) becomes another one's, in the
text and in the ids. A recording is refused when a step is missing, the repair is not rewarded, or it tells more of this
machine.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml

from polarq.contracts.completion import Completion
from polarq.contracts.rollout import RolloutResult
from polarq.contracts.task import Task
from polarq.export.completions import Completions
from polarq.registry import plugin
from polarq.testing.conformance.bench import Bench, Ran, default_cache
from polarq.testing.conformance.scenario import ProgramScenario, load
from polarq.testing.inference.scenario import Scenario, ToolCall, Turn
from polarq.testing.inference.tokenizer import load_tokenizer

from .sessions import CONTEXTS, DRIFT, FOLDER, keep

RECORDED = ("claude_code", "codex", "gemini_cli", "mini_swe_agent", "opencode", "openhands_sdk", "pi", "qwen_code")
ONE_COMMAND = ("openhands_sdk",)
"""Their shell tool refuses several commands at once; a group of them is one."""
TASK = Path(__file__).parents[2] / "polarq" / "testing" / "calculator" / "task.yaml"
DRIFTED = ("mini_swe_agent", "pi")
DRIFT_SEED = 7
AGENT_S = 600.0
INSTEAD = {os.uname().release: "6.1.0", sys.executable: "/usr/bin/python3"}
"""What is said of another machine, in place of what is true of this one."""


class Drifting(ProgramScenario):
    """Its model samples other ids for its texts than a tokenizer would give."""

    def scenario(self) -> Scenario:
        return super().scenario().model_copy(update={"drift_seed": DRIFT_SEED})


def scenario_of(harness: str, context: str) -> ProgramScenario:
    """The program's own, with the steps in place of its first turn."""
    short = load(harness, plugin("harnesses", harness).conformance)
    (tool,) = short.turns[0].tool_calls
    steps = yaml.safe_load((FOLDER / "steps.yaml").read_text(encoding="utf-8"))
    if harness in ONE_COMMAND:
        steps = [{**step, "runs": _grouped(step["runs"])} for step in steps]
    turns = (*(_turn(tool, step, thinks=context == "exact") for step in steps), short.turns[-1])
    kind = ProgramScenario if context == "observe" else Drifting
    return kind(**{**dict(short), "turns": turns, "agent_s": AGENT_S})


def _turn(tool: ToolCall, step: dict[str, str], *, thinks: bool) -> Turn:
    given = {
        name: step["runs"] if name in {"command", "cmd"} else step["says"] if name == "description" else value
        for name, value in tool.arguments.items()
    }
    call = ToolCall(name=tool.name, arguments=given)
    return Turn(content=step["says"], reasoning=step["thinks"] if thinks else "", tool_calls=(call,))


def _grouped(commands: str) -> str:
    return f"{{\n{commands}\n}}" if "\n" in commands else commands


def recorded(harness: str, context: str, cache: Path) -> tuple[RolloutResult, list[dict[str, Any]]]:
    """The result and the lines of the recording. Raises ValueError when it is not what it should be."""
    scenario = scenario_of(harness, context)
    dialect = plugin("harnesses", harness).dialects[0]
    node = {"proxy": {"context": "exact" if context == "exact" else "observe"}}
    with Bench(scenario, dialect, {"backend": "local"}, cache=cache, node=node) as bench:
        bench.submit(_task(bench))
        ran = bench.ended("repair")
    calls = [_redacted(call) for call in ran.recorded]
    _as_it_should_be(ran, calls, len(scenario.turns))
    # Of the result what tells about the session; the rest is about the machine.
    result = RolloutResult(
        **{name: getattr(ran.result, name) for name in ("rollout_id", "task_id", "run_id", "index", "outcome")},
        reward=ran.result.reward,
        metadata=_program(ran),
    )
    return result, list(Completions(lambda _: calls).records(result))


def _task(bench: Bench) -> Task:
    """The calculator example, as this program's."""
    example = Task.load(TASK).model_dump(mode="json", exclude_defaults=True)
    short = bench.task("repair", "works").model_dump(mode="json", exclude_defaults=True)
    runtime = {**short["runtime"], **example["runtime"], "network_policy": short["runtime"]["network_policy"]}
    return Task.parse(
        {
            **short,
            "instruction": f"{example['instruction']} [script: works]",
            "runtime": runtime,
            "evaluator": example["evaluator"],
        }
    )


def _program(ran: Ran) -> dict[str, Any]:
    program = {} if ran.result.harness is None else ran.result.harness.metadata.get("program") or {}
    return {name: program[name] for name in ("version",) if name in program}


def _redacted(call: Completion) -> Completion:
    """Of another machine."""
    messages, ids = json.dumps(call.messages), call.prompt_ids
    for found, instead in INSTEAD.items():
        messages, ids = messages.replace(found, instead), _replaced(ids, found, instead)
    return call.model_copy(update={"messages": json.loads(messages), "prompt_ids": ids})


def _replaced(ids: list[int], found: str, instead: str) -> list[int]:
    """The ids with one text in place of another: whatever tokens it lies in are encoded anew, and no others."""
    tokenizer = load_tokenizer()
    pieces = tokenizer.pieces(ids)
    text = "".join(pieces)
    spans = list(pairwise(accumulate(map(len, pieces), initial=0)))
    kept = list[int]()
    done = 0
    for match in re.finditer(re.escape(found), text):
        inside = [at for at, (start, end) in enumerate(spans) if start < match.end() and match.start() < end]
        first, last = inside[0], inside[-1]
        left, right = text[spans[first][0] : match.start()], text[match.end() : spans[last][1]]
        kept += [*ids[done:first], *tokenizer.encode(left + instead + right)]
        done = last + 1
    return [*kept, *ids[done:]]


def _as_it_should_be(ran: Ran, calls: Sequence[Completion], turns: int) -> None:
    reward = ran.result.reward
    if len(ran.whole) != turns or reward is None or reward.outcome != 1.0:
        raise ValueError(f"{len(ran.whole)} steps of {turns}, reward {reward}, {ran.result.outcome}")
    tokenizer = load_tokenizer()
    seen = [tokenizer.decode(call.prompt_ids) for call in calls]
    text = json.dumps([seen, *([call.messages, call.tools, call.reply] for call in calls)])
    for found in _of_this_machine():
        if match := re.search(rf".{{0,60}}(?<![\w<]){re.escape(found)}\b.{{0,60}}", text):
            raise ValueError(f"the recording tells of this machine: {match[0]}")


def _of_this_machine() -> Iterator[str]:
    yield from {socket.gethostname(), str(Path.home()), str(Path.cwd()), sys.prefix, *INSTEAD}
    if (user := getpass.getuser()) != "root":  # a word of every other prompt
        yield user


def main(wanted: list[str]) -> None:
    cache = Path(os.environ.get("HARNESS_CACHE") or default_cache())
    for one in wanted or RECORDED:
        harness, _, only = one.partition(".")
        for context in [only] if only else [*CONTEXTS, *([DRIFT] if harness in DRIFTED else [])]:
            result, lines = recorded(harness, context, cache)
            size = keep(harness, context, lines)
            print(f"{harness} {result.metadata}, {context}: {len(lines) - 1} calls, {size:,} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
