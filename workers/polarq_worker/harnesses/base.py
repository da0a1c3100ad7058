"""What a harness (an agent program) is to the worker: steps to run, with something to do before and after.

A harness runs unmodified. A preset writes its configuration and its command line; what it installs is part of the
sandbox's recipe (`Harness.recipe`), so that a node does it once.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from polarq.contracts.artifacts import ArtifactSpec
from polarq.contracts.rollout import ExecKind, HarnessReport, StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import AgentSpec, PrepareAction
from polarq.contracts.task import Task
from polarq.errors import PolarqError
from polarq_worker.harnesses.environment import harness_env, prepare_env, sandbox_env
from polarq_worker.harnesses.verdicts import CallsSeen, Verdict
from polarq_worker.network.way_out import OPEN, WayOut
from polarq_worker.runtimes.base import Runtime, SandboxLayout

__all__ = ["Harness", "HarnessContext", "HarnessStep", "harness_env", "prepare_env", "run_harness", "sandbox_env"]

log = logging.getLogger("polarq.worker.harness")

SMALL_INSTRUCTION_BYTES = 64 * 1024
"""Up to this size an instruction is also in the environment: one variable may have 128 KiB at most on Linux."""
POSTPROCESS_S = 60.0
"""What reading a harness's own results may take, after its budget."""


@dataclass(frozen=True)
class HarnessContext:
    """One rollout as its harness sees it. `env` is complete (`harness_env`)."""

    task: Task
    rollout_id: str
    instruction_path: str
    """The instruction as a file, inside the sandbox."""
    base_url: str
    """`http://host:port/s/<grant>`, without `/v1`."""
    api_key: str
    layout: SandboxLayout
    env: Mapping[str, str]
    way_out: WayOut = OPEN


@dataclass(frozen=True)
class HarnessStep:
    """One command. `env` comes on top of the context's; `cwd` None is the runtime's workdir."""

    command: str | Sequence[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | None = None


class Harness(abc.ABC):
    """One preset. Made with a task's agent spec; raises `InvalidTask` in the constructor for settings it cannot use."""

    name: ClassVar[str]

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec

    def recipe(self) -> Sequence[PrepareAction]:
        """What of the program itself a sandbox needs, carried out before the task's own `prepare` and kept with it: the
        same for every rollout with this agent spec."""
        return ()

    async def setup(self, runtime: Runtime, context: HarnessContext) -> None:  # noqa: B027  (nothing to set up)
        """Writes configuration and looks whether the program is there. Raises `HarnessFault` or `RuntimeFault`."""

    @abc.abstractmethod
    def steps(self, context: HarnessContext) -> list[HarnessStep]:
        """The commands, in order; the first that does not exit with 0 is the last."""

    def artifacts(self, layout: SandboxLayout) -> Sequence[ArtifactSpec]:
        """What of the program's own files is collected at the rollout's end, beside what the task declares."""
        return ()

    def judge(self, report: HarnessReport, seen: CallsSeen) -> Verdict | None:
        """Why its end is none of a task that was done, whatever its exit code; None: nothing beyond that."""
        return None

    async def postprocess(self, runtime: Runtime, context: HarnessContext, steps: list[StepReport]) -> dict[str, Any]:
        """What is worth keeping of the harness's own results: small JSON. Runs however the steps ended."""
        return {}


async def run_harness(
    harness: Harness,
    runtime: Runtime,
    context: HarnessContext,
    *,
    timeout_s: float,
    timing: MutableMapping[str, float] | None = None,
) -> HarnessReport:
    """Runs the harness to its end, at most `timeout_s` seconds; what it printed is logged as `agent/step.NN`.

    `timing` gets what its parts took, by their names in `Timing`.

    However it ends, that is a report. Raises `HarnessFault` when it cannot be started as it stands, and `RuntimeFault`.
    """
    began = time.monotonic()
    deadline = began + timeout_s
    timing = {} if timing is None else timing
    context = replace(context, env={**context.env, **_instruction_env(context)})
    reports: list[StepReport] = []
    try:
        async with asyncio.timeout(timeout_s):
            await runtime.put_bytes(context.task.instruction.encode(), context.instruction_path, 0o644)
            await harness.setup(runtime, context)
    except TimeoutError:
        message = f"the set-up of harness '{harness.name}' did not end within {timeout_s:.1f} s"
        reports.append(StepReport(kind=ExecKind.TIMED_OUT, duration_s=timeout_s, message=message))
    finally:
        timing["agent_setup_s"] = time.monotonic() - began
    for number, step in enumerate(harness.steps(context) if not reports else []):
        stem = f"agent/step.{number:02d}"
        result = await runtime.exec(
            step.command,
            cwd=step.cwd,
            env={**context.env, **step.env},
            stdin=step.stdin,
            timeout_s=max(deadline - time.monotonic(), 0.0),
            log=stem,
            category=ExecCategory.AGENT,
        )
        timing["agent_exec_s"] = timing.get("agent_exec_s", 0.0) + result.duration_s
        reports.append(result.report(stem))
        if not result.ok:
            break
    ended = time.monotonic()
    metadata = await _postprocess(harness, runtime, context, reports)
    timing["agent_postprocess_s"] = time.monotonic() - ended
    ok = all(report.kind is ExecKind.EXITED and report.exit_code == 0 for report in reports)
    return HarnessReport(name=harness.name, ok=ok, steps=reports, metadata=metadata)


def _instruction_env(context: HarnessContext) -> dict[str, str]:
    env = {"POLARQ_INSTRUCTION_FILE": context.instruction_path}
    if len(context.task.instruction.encode()) <= SMALL_INSTRUCTION_BYTES:
        env["POLARQ_INSTRUCTION"] = context.task.instruction
    return env


async def _postprocess(
    harness: Harness, runtime: Runtime, context: HarnessContext, reports: list[StepReport]
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(POSTPROCESS_S):
            return await harness.postprocess(runtime, context, reports)
    except (PolarqError, TimeoutError, OSError, LookupError, TypeError, ValueError) as exc:
        # The rollout has ended and is worth scoring; what the harness says of itself is only beside it.
        problem = " ".join(f"{type(exc).__name__}: {exc}".split())
        log.warning("rollout %s: %s", context.rollout_id, problem)
        return {"postprocess_error": problem}
