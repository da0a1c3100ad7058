"""From Polar's SessionResult back to the contract: one that polarq wrote, or one of Polar itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarq.contracts.rollout import Boundary, Outcome, Reward, RolloutResult, RolloutState
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory

Json = Mapping[str, Any]

_ENDS = {"COMPLETED": RolloutState.COMPLETED, "ERROR": RolloutState.FAILED, "TIMEOUT": RolloutState.TIMED_OUT}
NO_LOGPROBS = "no log-probabilities"


def result_of(session: Json) -> RolloutResult:
    """An ended session of polarq, with its trajectory. Raises KeyError and pydantic's `ValidationError`."""
    own = {key: value for key, value in session["rollout"].items() if key != "payload_problem"}
    names = own.pop("trajectory_metadata", [])  # sessions of before do not tell which of the keys were its own
    return RolloutResult.stored(
        {
            **own,
            "task_id": session["task_id"],
            "outcome": session["outcome"],
            "metadata": session.get("metadata", {}),
            "trajectory": _trajectory(session["trajectory"], names),
        }
    )


def result_of_polar(session: Json, index: int) -> RolloutResult:
    """An ended session of Polar itself, as rollout `index` of its task; its session id is kept in the metadata.

    A trace without log-probabilities is not trainable. What is missing in polarq's sense (turns, policy versions, the
    reason of a failure) stays unknown. Raises KeyError and pydantic's `ValidationError`.
    """
    task_id, status = str(session["task_id"]), session["status"]
    told = session["trajectory"]
    verdict = told.get("metadata", {}).get("evaluation") or {}
    reward = None
    if verdict.get("outcome_reward") is not None:
        reward = Reward(
            outcome=verdict["outcome_reward"],
            trace_rewards=verdict.get("trace_rewards"),
            evaluator=str(verdict.get("strategy", "")),
        )
    traces = [_foreign_trace(number, trace, reward) for number, trace in enumerate(told.get("traces") or [])]
    trainable = sum(trace.trainable_tokens for trace in traces)
    completed = status == "COMPLETED"
    return RolloutResult(
        rollout_id=f"{task_id}.{index}",
        task_id=task_id,
        run_id="default",
        index=index,
        node_id=session.get("node_id"),
        outcome=Outcome(
            state=_ENDS[status],
            boundary=Boundary.NONE if completed else Boundary.NODE,
            reason="ok" if completed else f"polar_{status.lower()}",
            message=str(session.get("error") or ""),
            trainable=completed and trainable > 0,
        ),
        reward=reward,
        trajectory=Trajectory(
            builder=str(told.get("metadata", {}).get("builder", "")),
            traces=traces,
            fidelity=Fidelity(
                calls=int(told.get("metadata", {}).get("record_count") or 0),
                traces=len(traces),
                sampled_tokens=trainable,
                trainable_tokens=trainable,
            ),
        ),
        metadata={**session.get("metadata", {}), "polar_session_id": session["session_id"]},
    )


def _foreign_trace(number: int, trace: Json, reward: Reward | None) -> Trace:
    length = len(trace["response_ids"])
    logprobs = trace.get("response_logprobs") or []
    usable = len(logprobs) == length
    mask = trace.get("loss_mask") or [1] * length
    own = trace.get("reward")
    if own is None and reward is not None:
        own = reward.trace_rewards[number] if reward.trace_rewards is not None else reward.outcome
    return Trace(
        index=number,
        prompt_ids=trace["prompt_ids"],
        response_ids=trace["response_ids"],
        loss_mask=mask if usable else [0] * length,
        logprobs=[v if bit else 0.0 for v, bit in zip(logprobs, mask, strict=True)] if usable else [0.0] * length,
        prompt_messages=trace.get("prompt_messages") or [],
        response_messages=trace.get("response_messages") or [],
        tools=trace.get("tools"),
        finish_reason=trace.get("finish_reason"),
        reward=own,
        untrainable=None if usable else NO_LOGPROBS,
        metadata=trace.get("metadata") or {},
    )


def _trajectory(trajectory: Json, names: Sequence[str]) -> Trajectory | None:
    metadata = trajectory.get("metadata", {})
    if "fidelity" not in metadata:
        return None
    return Trajectory(
        builder=str(metadata.get("builder", "")),
        traces=[_trace(index, trace) for index, trace in enumerate(trajectory["traces"])],
        fidelity=Fidelity.stored(metadata["fidelity"]),
        metadata={name: metadata[name] for name in names},
    )


def _trace(index: int, trace: Json) -> Trace:
    metadata = dict(trace.get("metadata", {}))
    own = metadata.pop("polarq", {})
    body = {key: value for key, value in trace.items() if key not in {"metadata", "response_logprobs"}}
    return Trace.stored(
        {"index": index, **body, **own, "logprobs": trace.get("response_logprobs") or [], "metadata": metadata}
    )
