"""What becomes of a rollout that its group no longer needs: its tokens are kept, and none of them is trained on."""

from __future__ import annotations

from polarq.contracts.rollout import EARLY_STOP, Boundary, EarlyStop, RolloutResult, RolloutState
from polarq.contracts.trajectory import Trace, Trajectory


def was_told_to_stop(result: RolloutResult) -> bool:
    """Whether it ended because the ledger asked for it; why it did, the ledger knows."""
    return result.outcome.state is RolloutState.CANCELLED and result.outcome.boundary is Boundary.CONTROL


def stopped_early(result: RolloutResult, stop: EarlyStop) -> RolloutResult:
    """The result with Polar's keys, fully masked as they say."""
    return result.model_copy(
        update={
            "outcome": stop.outcome(),
            "trajectory": None if result.trajectory is None else _masked(result.trajectory, stop),
            "metadata": {**result.metadata, **stop.metadata()},
        }
    )


def _masked(trajectory: Trajectory, stop: EarlyStop) -> Trajectory:
    fidelity = trajectory.fidelity
    return trajectory.model_copy(
        update={
            "traces": [_masked_trace(trace) for trace in trajectory.traces],
            "fidelity": fidelity.model_copy(
                update={
                    "trainable_tokens": 0,
                    "masked_tokens": fidelity.masked_tokens + fidelity.trainable_tokens,
                    "untrainable": {
                        **{str(seq): EARLY_STOP for trace in trajectory.traces for seq in trace.completion_seqs},
                        **fidelity.untrainable,
                    },
                }
            ),
            "metadata": {**trajectory.metadata, **stop.metadata()},
        }
    )


def _masked_trace(trace: Trace) -> Trace:
    nothing = len(trace.response_ids)
    return trace.model_copy(
        update={
            "loss_mask": [0] * nothing,
            "logprobs": [0.0] * nothing,
            "turns": [turn.model_copy(update={"untrainable": turn.untrainable or EARLY_STOP}) for turn in trace.turns],
            "weight": 0.0,
            "untrainable": EARLY_STOP,
        }
    )
