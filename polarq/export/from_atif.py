"""Results out of ATIF documents that hold token ids.

A document of polarq's own gives its traces back, but for their messages, which are its steps. Of any other, each step
with the ids of its prompt and of its completion is a call, and `prefix_merging` makes traces of them, as it does of
captured ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from polarq.contracts.completion import Completion, VersionSpan
from polarq.contracts.rollout import Outcome, RolloutResult, RolloutState
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory, Turn
from polarq.errors import InvalidInput
from polarq.export.atif import atif_models, embedded, sampled_steps
from polarq.export.base import problem_of
from polarq.trajectory.prefix_merging import PrefixMergingBuilder

_NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)


def result_of_document(document: Mapping[str, Any], name: str) -> RolloutResult:
    """`name`: what a rollout is called that has no id of polarq's. Raises `InvalidInput`."""
    try:
        atif_models().Trajectory.model_validate(document)
        own = (document.get("extra") or {}).get("polarq")
        return _foreign(document, name) if own is None else _own(document, own)
    except (KeyError, TypeError, ValueError) as exc:
        raise InvalidInput(name, [f"cannot be read as an ATIF document: {problem_of(exc)}"]) from None


def _own(document: Mapping[str, Any], own: Mapping[str, Any]) -> RolloutResult:
    traces = [_trace(one) for one in embedded(document)]
    trajectory = Trajectory(
        builder=str(own["builder"]),
        traces=traces,
        fidelity=Fidelity.stored(own["fidelity"]),
        metadata=own.get("metadata") or {},  # documents of before have none
    )
    return RolloutResult.stored({**own["result"], "trajectory": trajectory.model_dump()})


def _trace(document: Mapping[str, Any]) -> Trace:
    kept = {**document["extra"]["polarq"]["trace"], "tools": document["agent"].get("tool_definitions")}
    if "response_ids" in kept:
        return Trace.stored(kept)
    prompt, response, mask, logprobs = list[int](), list[int](), list[int](), list[float]()
    turns, versions = list[Turn](), list[VersionSpan]()
    for number, step in enumerate(sampled_steps(document)):
        metrics = step["metrics"]
        extra, ids = metrics["extra"], metrics["completion_token_ids"]
        between = [] if number == 0 else extra.get("new_prompt_token_ids") or []
        prompt = metrics["prompt_token_ids"] if number == 0 else prompt
        start = len(response) + len(between)
        known = metrics.get("logprobs")
        response += [*between, *ids]
        mask += [0] * len(between) + [0 if known is None else 1] * len(ids)
        logprobs += [0.0] * len(between) + ([0.0] * len(ids) if known is None else known)
        turns.append(Turn.stored({**extra["turn"], "start": start, "end": start + len(ids)}))
        versions += [
            VersionSpan(version=span["version"], start=start + span["start"], end=start + span["end"])
            for span in extra.get("weight_versions") or []
        ]
    if not turns:
        raise ValueError(f"{document.get('trajectory_id')} holds no token ids")
    return Trace.stored(
        {
            **kept,
            "prompt_ids": prompt,
            "response_ids": response,
            "loss_mask": mask,
            "logprobs": logprobs,
            "turns": [turn.model_dump() for turn in turns],
            "weight_versions": [span.model_dump() for span in versions],
        }
    )


def _foreign(document: Mapping[str, Any], name: str) -> RolloutResult:
    calls = list(_calls(document))
    if not calls:
        raise ValueError("it holds no token ids of prompts and completions")
    trajectory = PrefixMergingBuilder({}).build(calls)
    trainable = trajectory.fidelity.trainable_tokens > 0
    return RolloutResult(
        rollout_id=f"{name}.0",
        task_id=name,
        run_id="default",
        index=0,
        outcome=Outcome(state=RolloutState.COMPLETED, trainable=trainable),
        trajectory=trajectory,
        metadata={key: document[key] for key in ("session_id", "trajectory_id") if document.get(key)},
    )


def _calls(document: Mapping[str, Any]) -> Iterator[Completion]:
    steps = [step for one in embedded(document) for step in sampled_steps(one)]
    for seq, step in enumerate(steps):
        metrics = step["metrics"]
        if not metrics.get("prompt_token_ids"):
            raise ValueError(f"step {step['step_id']} has no prompt_token_ids")
        sampled = metrics["completion_token_ids"]
        yield Completion(
            rollout_id="atif",
            attempt=1,
            seq=seq,
            completion_id=f"step-{seq}",
            requested_at=_NO_TIME,
            answered_at=_NO_TIME,
            latency_s=0,
            dialect="",
            path="",
            request_digest="",
            prompt_ids=metrics["prompt_token_ids"],
            sampled_ids=sampled,
            logprobs=metrics.get("logprobs") or [],
            untrainable=_untrainable(sampled, metrics.get("logprobs")),
        )


def _untrainable(sampled: Sequence[int], logprobs: Sequence[float] | None) -> str | None:
    if logprobs is None or len(logprobs) != len(sampled) or not all(map(math.isfinite, logprobs)):
        return "no log-probability for each sampled token"
    return None
