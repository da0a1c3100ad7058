"""One place for how a rollout's end is judged: state, boundary, reason, and whether a trainer may use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polarq.contracts.endings import Ending, EndingRule, Use, rule_for
from polarq.contracts.require import Require
from polarq.contracts.rollout import (
    MISSES_FIDELITY,
    Boundary,
    ExecKind,
    HarnessReport,
    Outcome,
    Reward,
    RolloutState,
    StepReport,
)
from polarq.contracts.trajectory import Trajectory
from polarq.errors import DiskFull, OutOfMemory, SandboxLost
from polarq.ledger import Claim
from polarq.store.grants import GrantUse
from polarq_worker.harnesses.verdicts import Verdict

OF_OTHERS = (Exception, SystemExit, KeyboardInterrupt)
"""What code that is not ours may raise: a plug-in that exits must not end the worker. A cancellation is none of it."""

HARNESS_COULD_NOT_START = "harness_could_not_start"
"""`Outcome.reason` of a rollout whose program, or a folder or file of it, is not in the sandbox: no policy's doing."""

NO_ROOM_BYTES = 64 * 1024


class StageFailed(Exception):
    """A stage ended the rollout. Data, not a fault of the worker."""

    def __init__(self, state: RolloutState, boundary: Boundary, reason: str, message: str) -> None:
        self.outcome = Outcome(state=state, boundary=boundary, reason=reason, message=one_line(message))
        super().__init__(message)


def failed(boundary: Boundary, reason: str, message: str) -> StageFailed:
    return StageFailed(RolloutState.FAILED, boundary, reason, message)


def timed_out(boundary: Boundary, stage: str, budget_s: float) -> StageFailed:
    message = f"{stage} did not end within its budget of {budget_s:g} s"
    return StageFailed(RolloutState.TIMED_OUT, boundary, f"{stage}_timeout", message)


def one_line(text: str, limit: int = 500) -> str:
    """Cut to the limit, and such as can be written down: others' JSON may have halves of characters in it."""
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def what(exc: BaseException) -> str:
    """One line about an exception that nobody foresaw."""
    return one_line(f"{type(exc).__name__}: {exc}")


def harness_outcome(
    report: HarnessReport,
    use: GrantUse,
    trajectory: Trajectory,
    verdict: Verdict | None = None,
    *,
    failing: bool = False,
) -> Outcome:
    """How the agent stage ended, before scoring. `verdict` is the harness's own, with what the proxy saw; `failing`:
    the inference side did not answer the newest call, for which a program may go on asking until its time is over.

    A harness's exit code is not a verdict: a rollout whose harness ended badly is still scored when the model was
    sampled, because the work tree is what counts. It is not scored when the failure is not the policy's own doing: the
    harness could not start or never reached the model, or the model's answers failed.
    """
    if verdict is not None:
        return Outcome(
            state=RolloutState.FAILED,
            boundary=verdict.boundary,
            reason=verdict.reason,
            message=one_line(verdict.message),
        )
    if report.ok:
        return Outcome(state=RolloutState.COMPLETED)
    last = report.steps[-1] if report.steps else None
    why = step_line(last) if last is not None else "the harness did not start"
    ran_out = last is not None and last.kind is ExecKind.TIMED_OUT and trajectory.fidelity.trainable_tokens > 0
    if use.faults and (failing or not ran_out):
        message = f"{use.faults} model call(s) failed, the last one: {use.last_fault}"
        return Outcome(
            state=RolloutState.FAILED, boundary=Boundary.MODEL, reason="model_failed", message=one_line(message)
        )
    if last is not None and last.kind is ExecKind.TIMED_OUT:
        return Outcome(
            state=RolloutState.TIMED_OUT, boundary=Boundary.HARNESS, reason="agent_timeout", message=one_line(why)
        )
    if last is not None and last.kind is ExecKind.SANDBOX_LOST:
        return _of_the_sandbox(SandboxLost.reason, why)
    if last is not None and last.out_of_memory:
        return _of_the_sandbox(OutOfMemory.reason, f"the sandbox ran out of memory: {why}")
    if (last is None or last.kind is ExecKind.COULD_NOT_START) and not trajectory.fidelity.sampled_tokens:
        return _of_the_sandbox(HARNESS_COULD_NOT_START, why)
    reason = "harness_" + (last.kind.value if last is not None else "could_not_start")
    return Outcome(state=RolloutState.FAILED, boundary=Boundary.HARNESS, reason=reason, message=one_line(why))


def _of_the_sandbox(reason: str, message: str) -> Outcome:
    return Outcome(state=RolloutState.FAILED, boundary=Boundary.RUNTIME, reason=reason, message=one_line(message))


def on_full_disk(outcome: Outcome, folder: Path) -> Outcome:
    """What has failed with no room left on the disk under `folder` is not the policy's doing."""
    of_the_harness = outcome.boundary is Boundary.HARNESS or outcome.reason == HARNESS_COULD_NOT_START
    if outcome.state is RolloutState.COMPLETED or not of_the_harness or not is_full(folder):
        return outcome
    return _of_the_sandbox(DiskFull.reason, f"the disk of the sandbox is full: {outcome.message}")


def is_full(folder: Path) -> bool:
    """Whether the disk under a folder has no room worth the name; not where that cannot be told."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return found.f_blocks > 0 and blocks * found.f_frsize < NO_ROOM_BYTES


def step_line(step: StepReport) -> str:
    """One line: how the harness's command ended, and the last line it printed."""
    how = {
        ExecKind.EXITED: f"the harness ended with exit code {step.exit_code}",
        ExecKind.SIGNALLED: f"the harness was killed by signal {step.signal}",
        ExecKind.TIMED_OUT: f"the harness did not end within {step.duration_s:.0f} s",
        ExecKind.CANCELLED: "the harness was cancelled",
        ExecKind.COULD_NOT_START: "the harness could not start",
        ExecKind.SANDBOX_LOST: "the sandbox was lost",
    }[step.kind]
    printed = [line.strip() for line in (step.stderr_tail or step.stdout_tail).splitlines() if line.strip()]
    return ": ".join([how, *([step.message] if step.message else []), *printed[-1:]])


def worth_scoring(outcome: Outcome, trajectory: Trajectory) -> bool:
    """Whether an evaluator should judge this rollout (see `harness_outcome`)."""
    if outcome.state is RolloutState.COMPLETED:
        return True
    return outcome.boundary is Boundary.HARNESS and trajectory.fidelity.sampled_tokens > 0


def faithful(require: Require, outcome: Outcome, trajectory: Trajectory) -> None:
    """Raises `StageFailed` for a trajectory that misses what its task requires, unless the rollout has failed for what
    is not the policy's doing: that says more."""
    missed = require.missed(trajectory.fidelity)
    if missed and worth_scoring(outcome, trajectory):
        raise failed(
            Boundary.BUILDER, MISSES_FIDELITY, f"the trajectory misses what the task requires: {'; '.join(missed)}"
        )


def final_outcome(
    outcome: Outcome,
    trajectory: Trajectory,
    reward: Reward | None,
    rules: Mapping[Ending, EndingRule],
    *,
    scored: bool,
) -> tuple[Outcome, Reward | None]:
    """The outcome with its trainable flag (trainable tokens, an end whose rule is to train, and a reward where one was
    due), and the reward that counts: the rule's, where it has one."""
    tokens = trajectory.fidelity.trainable_tokens > 0
    reason = outcome.reason
    if outcome.state is RolloutState.COMPLETED and not tokens:
        reason = "no_model_calls" if trajectory.fidelity.calls == 0 else "no_trainable_tokens"
    rule = rule_for(outcome.ending, rules)
    trained = rule.use is Use.TRAIN and tokens
    if trained and rule.reward is not None:
        reward = _by_rule(rule.reward, outcome.ending, reward)
    trainable = trained and (reward is not None or not scored)
    return outcome.model_copy(update={"trainable": trainable, "reason": reason}), reward


def _by_rule(value: float, ending: Ending, verdict: Reward | None) -> Reward:
    """The evaluator's verdict stays in the report."""
    report: dict[str, Any] = {"ending": ending.value}
    if verdict is not None:
        report["verdict"] = verdict.model_dump(mode="json")
    return Reward(outcome=value, evaluator="endings", report=report)


def worth_replacing(claim: Claim, outcome: Outcome) -> bool:
    """Whether this attempt's end is one that its task wants run again, and may be."""
    task = claim.task
    replaced = claim.attempt - 1 - len(claim.losses)
    return rule_for(outcome.ending, task.endings).use is Use.REPLACE and replaced < task.max_replacements
