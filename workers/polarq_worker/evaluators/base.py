"""What an evaluator is to the worker: a verdict on an ended rollout, or a fault, but never a zero for want of one."""

from __future__ import annotations

import abc
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic_core import to_json

from polarq.contracts.rollout import HarnessReport, Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trajectory
from polarq.errors import EvaluatorFault, RuntimeFault
from polarq_worker.runtimes.base import SESSION_DIR, Runtime

log = logging.getLogger("polarq.worker.evaluators")

MAX_REPORT_BYTES = 64 * 1024
MAX_REPORT_DEPTH = 100
_TOO_DEEP = object()


class EvaluationTimedOut(EvaluatorFault):
    """The evaluation's budget ended before a verdict, through no doing of the policy."""

    timed_out = True


@dataclass(frozen=True)
class EngineAddress:
    """An inference server that scores tokens."""

    engine: Literal["vllm", "sglang"]
    base_url: str
    """Without /v1."""
    model: str = ""
    """Blank: the only one that is served."""
    key: str | None = None


@dataclass(frozen=True)
class NodeRules:
    """What a node lets evaluators do for tasks, and has for them. By default nothing is allowed."""

    upload_roots: Sequence[str] = ()
    """Host folders from which tests may be brought into a sandbox (`security.upload_roots`)."""
    judge_hosts: Sequence[str] = ()
    """`security.judge_hosts`."""
    judge_keys: Mapping[str, str] = field(default_factory=dict)
    """Values of the variables in `security.judge_key_envs` that are set."""
    judge_cache: Path | None = None
    """Folder for verdicts of judges; None: they are not kept."""
    engines: Sequence[EngineAddress] = ()
    """The node's own inference, which sampled the rollout."""


@dataclass(frozen=True)
class EvaluationContext:
    """An ended rollout as its evaluator sees it."""

    task: Task
    rollout_id: str
    trajectory: Trajectory
    harness: HarnessReport
    runtime: Runtime
    """The agent's own sandbox, with whatever it left running."""
    env: Mapping[str, str]
    """The environment for commands: no model, no secret."""
    timeout_s: float
    baseline: Mapping[str, Any]
    """What `Evaluator.baseline` returned before the agent ran."""
    fresh_runtime: Callable[[], Awaitable[Runtime]]
    """Starts and prepares a sandbox that the agent never saw; the caller of `evaluate` stops it."""
    rules: NodeRules = NodeRules()


def as_seen(runtime: Runtime, path: str) -> str:
    """A path of the contract as programs in the sandbox have to spell it: `local` may have the session elsewhere."""
    if path == SESSION_DIR or path.startswith(f"{SESSION_DIR}/"):
        return runtime.layout.session_dir + path.removeprefix(SESSION_DIR)
    return path


async def fresh_sandbox(context: EvaluationContext) -> Runtime:
    """`context.fresh_runtime`, asked once more where the sandbox could not be started. Raises `RuntimeFault`."""
    try:
        return await context.fresh_runtime()
    except RuntimeFault as exc:
        log.warning("rollout %s: a fresh sandbox could not be had, once more: %s", context.rollout_id, exc)
    return await context.fresh_runtime()


class Evaluator(abc.ABC):
    """One way to score. Made with a task's evaluator spec; raises `InvalidTask` for a config it cannot use."""

    name: ClassVar[str]

    def __init__(self, spec: EvaluatorSpec) -> None:
        self.spec = spec

    async def baseline(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
        """Looks at the prepared sandbox before the agent does: what `evaluate` needs to tell the agent's work, as small
        JSON. Raises `EvaluatorFault`, which ends the rollout before it has cost a model call."""
        return {}

    @abc.abstractmethod
    async def evaluate(self, context: EvaluationContext) -> Reward:
        """The verdict, within `context.timeout_s`.

        Raises `EvaluatorFault` where it can reach none: what the policy did is a reward (0 too), what the environment
        did is a fault.
        """

    def verdict(self, outcome: float, report: dict[str, Any]) -> Reward:
        """A `Reward`, its report cut to `MAX_REPORT_BYTES`. Raises `EvaluatorFault` for a value that is not finite."""
        if not math.isfinite(outcome):
            raise EvaluatorFault(f"evaluator '{self.name}' came to {outcome}, which is no reward")
        return Reward(outcome=float(outcome), evaluator=self.name, report=_cut(report))


def _cut(report: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what is nested too deep to be written down, then the largest entries until the rest is small, and
    says which."""
    report = {key: _writable(value) for key, value in report.items()}
    left_out = [key for key, value in report.items() if value is _TOO_DEEP]
    sizes = {key: len(json.dumps(value)) for key, value in report.items() if value is not _TOO_DEEP}
    while sum(sizes.values()) > MAX_REPORT_BYTES - 4096:
        largest = max(sizes, key=lambda key: sizes[key])
        left_out.append(largest)
        del sizes[largest]
    kept = {key: report[key] for key in report if key in sizes}
    return {**kept, "left_out_of_report": left_out} if left_out else kept


def _writable(value: Any) -> Any:
    """The value as a result can hold it: others' JSON may have halves of characters (`\\ud83d`), which become `?`."""
    if _depth(value) > MAX_REPORT_DEPTH:
        return _TOO_DEEP
    try:
        to_json(value)
    except ValueError:
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def _depth(value: Any) -> int:
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
        left += [(item, depth + 1) for item in inner]
        deepest = max(deepest, depth)
    return deepest
