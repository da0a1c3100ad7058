"""What a sandbox did is the runtime's boundary, with a code that stays the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from polarq.contracts.rollout import Boundary, ExecKind, HarnessReport, Outcome, RolloutState, StepReport
from polarq.contracts.trajectory import Fidelity, Trajectory
from polarq.errors import (
    BackendAway,
    DiskFull,
    EvaluatorFault,
    ImageDenied,
    ImageMissing,
    OutOfMemory,
    PolarqError,
    RuntimeFault,
    SandboxLost,
)
from polarq.store.grants import GrantUse
from polarq_worker.history import HistoryNotScrubbed
from polarq_worker.outcomes import StageFailed, harness_outcome, is_full, on_full_disk, worth_scoring
from polarq_worker.stages import faults
from polarq_worker.stages.prepare import PrepareFailed

B = Boundary
STAGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "prepare": lambda: faults.of_prepare(1),
    "run": faults.of_run,
    "evaluate": lambda: faults.of_evaluate(1),
}


def outcome_of(stage: str, fault: PolarqError) -> Outcome:
    with pytest.raises(StageFailed) as failed, STAGES[stage]():
        raise fault
    return failed.value.outcome


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (RuntimeFault("x"), "runtime_failed"),
        (SandboxLost("x"), "sandbox_lost"),
        (OutOfMemory("x"), "out_of_memory"),
        (DiskFull("x"), "disk_full"),
        (ImageMissing("x"), "image_missing"),
        (ImageDenied("x"), "image_denied"),
        (BackendAway("x"), "backend_away"),
    ],
)
def test_each_fault_of_a_sandbox_has_its_reason_in_every_stage(stage: str, fault: RuntimeFault, reason: str) -> None:
    outcome = outcome_of(stage, fault)
    assert (outcome.state, outcome.boundary, outcome.reason) == (RolloutState.FAILED, B.RUNTIME, reason)
    assert not outcome.trainable


def test_what_failed_in_a_recipe_is_told_apart_from_what_its_sandbox_did() -> None:
    def ended(report: StepReport, **found: bool) -> tuple[Boundary, str]:
        outcome = outcome_of("prepare", PrepareFailed("x", index=0, reports=[report], **found))
        return outcome.boundary, outcome.reason

    assert ended(StepReport(kind=ExecKind.EXITED, exit_code=1)) == (B.PREPARE, "prepare_failed")
    assert ended(StepReport(kind=ExecKind.SANDBOX_LOST)) == (B.RUNTIME, "sandbox_lost")
    assert ended(StepReport(kind=ExecKind.EXITED, exit_code=1), disk_full=True) == (B.RUNTIME, "disk_full")
    assert ended(StepReport(kind=ExecKind.SIGNALLED, signal=9, out_of_memory=True)) == (B.RUNTIME, "out_of_memory")
    outcome = outcome_of("prepare", HistoryNotScrubbed("x"))
    assert (outcome.boundary, outcome.reason) == (B.PREPARE, "history_not_scrubbed")
    assert outcome_of("evaluate", EvaluatorFault("x")).boundary is B.EVALUATOR


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (StepReport(kind=ExecKind.SANDBOX_LOST), "sandbox_lost"),
        (StepReport(kind=ExecKind.SIGNALLED, signal=9, out_of_memory=True), "out_of_memory"),
        (StepReport(kind=ExecKind.EXITED, exit_code=137, out_of_memory=True), "out_of_memory"),
    ],
)
def test_a_harness_that_its_sandbox_ended_is_not_scored(step: StepReport, reason: str) -> None:
    sampled = Trajectory(builder="b", fidelity=Fidelity(calls=1, sampled_tokens=5, trainable_tokens=5))
    outcome = harness_outcome(HarnessReport(name="h", ok=False, steps=[step]), GrantUse(1), sampled)
    assert (outcome.boundary, outcome.reason) == (B.RUNTIME, reason)
    assert not worth_scoring(outcome, sampled)


def test_a_disk_with_room_blames_nobody(tmp_path: Path) -> None:
    failed = Outcome(state=RolloutState.FAILED, boundary=B.HARNESS, reason="harness_exited")
    assert not is_full(tmp_path)
    assert not is_full(tmp_path / "gone")
    assert on_full_disk(failed, tmp_path) is failed
