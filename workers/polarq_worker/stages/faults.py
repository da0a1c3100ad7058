"""Whose fault it was: what goes wrong in a stage, as the outcome of the rollout it ends.

Each is a context around one stage's work, and raises `StageFailed` for what may go wrong in there. `budget_s` is the
stage's, for its message; a `TimeoutError` that gets here is the budget's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from polarq.contracts.rollout import Boundary, ExecKind, RolloutState
from polarq.errors import (
    DiskFull,
    EvaluatorFault,
    HarnessFault,
    InvalidInput,
    OutOfMemory,
    PolarqError,
    RuntimeFault,
    SandboxLost,
    UnknownPlugin,
)
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.history import HistoryNotScrubbed
from polarq_worker.outcomes import HARNESS_COULD_NOT_START, OF_OTHERS, StageFailed, failed, timed_out, what
from polarq_worker.stages.prepare import PrepareFailed

log = logging.getLogger("polarq.worker.stages")


@contextmanager
def of_prepare(budget_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise timed_out(Boundary.PREPARE, "prepare", budget_s) from None
    except PrepareFailed as exc:
        last = exc.reports[-1] if exc.reports else None
        if last is not None and last.kind is ExecKind.SANDBOX_LOST:
            raise failed(Boundary.RUNTIME, SandboxLost.reason, str(exc)) from exc
        if last is not None and last.out_of_memory:
            raise failed(Boundary.RUNTIME, OutOfMemory.reason, f"the sandbox ran out of memory: {exc}") from exc
        if exc.disk_full:
            raise failed(Boundary.RUNTIME, DiskFull.reason, f"the disk of the sandbox is full: {exc}") from exc
        state = RolloutState.TIMED_OUT if exc.timed_out else RolloutState.FAILED
        reason = "prepare_timeout" if exc.timed_out else "prepare_failed"
        raise StageFailed(state, Boundary.PREPARE, reason, str(exc)) from exc
    except (UnknownPlugin, InvalidInput) as exc:
        raise failed(Boundary.TASK, "unusable_task", str(exc)) from exc
    except HistoryNotScrubbed as exc:
        raise failed(Boundary.PREPARE, exc.reason, str(exc)) from exc
    except RuntimeFault as exc:
        raise failed(Boundary.RUNTIME, exc.reason, str(exc)) from exc
    except EvaluatorFault as exc:
        raise failed(Boundary.EVALUATOR, "evaluator_failed", str(exc)) from exc


@contextmanager
def of_run() -> Iterator[None]:
    """Without a budget: how a harness ran out of time is in its report."""
    try:
        yield
    except HarnessFault as exc:
        raise failed(Boundary.RUNTIME, HARNESS_COULD_NOT_START, str(exc)) from exc
    except RuntimeFault as exc:
        raise failed(Boundary.RUNTIME, exc.reason, str(exc)) from exc
    except (StageFailed, PolarqError):
        raise
    except OF_OTHERS as exc:
        log.exception("an error in a harness")
        raise failed(Boundary.HARNESS, "harness_failed", what(exc)) from exc


@contextmanager
def of_build(budget_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise timed_out(Boundary.BUILDER, "build", budget_s) from None
    except (StageFailed, PolarqError):
        raise
    except ValueError as exc:
        raise failed(Boundary.BUILDER, "builder_failed", str(exc)) from exc
    except OF_OTHERS as exc:
        log.exception("an error in a builder")
        raise failed(Boundary.BUILDER, "builder_failed", what(exc)) from exc


@contextmanager
def of_evaluate(budget_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise timed_out(Boundary.EVALUATOR, "evaluate", budget_s) from None
    except EvaluationTimedOut as exc:
        raise StageFailed(RolloutState.TIMED_OUT, Boundary.EVALUATOR, "evaluate_timeout", str(exc)) from exc
    except EvaluatorFault as exc:
        raise failed(Boundary.EVALUATOR, "evaluator_failed", str(exc)) from exc
    except PrepareFailed as exc:
        if exc.disk_full:
            raise failed(Boundary.RUNTIME, DiskFull.reason, f"fresh sandbox: the disk is full: {exc}") from exc
        raise failed(Boundary.EVALUATOR, "evaluator_failed", f"fresh sandbox: {exc}") from exc
    except RuntimeFault as exc:
        raise failed(Boundary.RUNTIME, exc.reason, str(exc)) from exc
    except ValueError as exc:
        raise failed(Boundary.EVALUATOR, "evaluator_failed", str(exc)) from exc
    except (StageFailed, PolarqError):
        raise
    except OF_OTHERS as exc:
        log.exception("an error in an evaluator")
        raise failed(Boundary.EVALUATOR, "evaluator_failed", what(exc)) from exc
