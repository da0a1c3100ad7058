"""Results and sources for tests of exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from polarq.contracts import Boundary, Completion, Outcome, Reward, RolloutResult, RolloutState, VersionSpan
from polarq.export.base import Format, Group, Rollout, Verdict
from polarq.export.parts import Parts
from polarq.export.run import Report, export
from polarq.trajectory.base import rewarded
from polarq.trajectory.prefix_merging import PrefixMergingBuilder
from tests.trajectory.calls import call
from tests.trajectory.pictures import PAD, image, shown

TASK_METADATA = {"question": 7}
FAILED = Outcome(state=RolloutState.FAILED, boundary=Boundary.RUNTIME, reason="sandbox_lost")


def said(*words: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": word} for i, word in enumerate(words)]


def answer(word: str) -> dict[str, Any]:
    return {"role": "assistant", "content": word}


def session(first: int = 0) -> list[Completion]:
    """Three calls: two that go on, under two policies, and a fork whose log-probability is missing."""
    at = first * 100
    begun, more = [at + 1, at + 2], [at + 1, at + 2, at + 3, at + 9, at + 4]
    spans = [VersionSpan(version="step-7", start=0, end=1), VersionSpan(version="step-8", start=1, end=2)]
    return [
        call(0, begun, [at + 3, at + 9], messages=said("a"), reply=answer("b"), logprobs=[-0.5, -1.25]),
        call(1, more, [at + 6, at + 7], messages=said("a", "b", "c"), reply=answer("d"), weight_versions=spans,
             finish_reason="stop"),
        call(2, [at + 1, at + 5], [at + 8], messages=said("a", "x", "y"), reply=answer("z"), logprobs=[None],
             untrainable="log-probability 0 is missing"),
    ]  # fmt: skip


def result(
    index: int = 0,
    calls: Iterable[Completion] | None = None,
    *,
    reward: float | None = 1.0,
    outcome: Outcome | None = None,
    task_id: str = "t",
    config: dict[str, Any] | None = None,
) -> RolloutResult:
    captured = list(session(index) if calls is None else calls)
    trajectory = PrefixMergingBuilder(config or {}).build(captured, {"task_metadata": TASK_METADATA})
    verdict = None if reward is None else Reward(outcome=reward, evaluator="e")
    trainable = trajectory.fidelity.trainable_tokens > 0
    return RolloutResult(
        rollout_id=f"{task_id}.{index}",
        task_id=task_id,
        run_id="run",
        index=index,
        attempt=1,
        outcome=outcome or Outcome(state=RolloutState.COMPLETED, trainable=trainable),
        reward=verdict,
        trajectory=trajectory if verdict is None else rewarded(trajectory, verdict),
        metadata=TASK_METADATA,
    )


def looking_calls(picture: bytes = b"p") -> list[Completion]:
    """Two turns: the second has seen a picture, of which ids 3 and 4 of the sequence are."""
    asked, told = [*said("a", "b"), shown(picture)], [image(picture, 3, 5)]
    return [
        call(0, [1], [2, 9], messages=said("a"), reply=answer("b"), finish_reason="tool_calls"),
        call(1, [1, 2, 9, PAD, PAD, 3], [4], messages=asked, reply=answer("c"), images=told, grammar="tool_choice"),
    ]


def looking(index: int = 0, *, picture: bytes = b"p") -> RolloutResult:
    """The result of these calls, with a reward for each turn."""
    made = result(index, looking_calls(picture))
    verdict = Reward(outcome=1.0, turn_rewards=[[0.25, 1.0]], evaluator="e")
    assert made.trajectory is not None
    return made.model_copy(update={"reward": verdict, "trajectory": rewarded(made.trajectory, verdict)})


def taught(one: RolloutResult) -> RolloutResult:
    """The same with a teacher's log-probabilities."""
    assert one.trajectory is not None
    lengths = [len(trace.response_ids) for trace in one.trajectory.traces]
    verdict = Reward(outcome=1.0, evaluator="e", teacher_logprobs=[[-0.25] * length for length in lengths])
    return one.model_copy(update={"trajectory": rewarded(one.trajectory, verdict)})


def source(results: Sequence[RolloutResult], waiting: int = 0) -> Callable[[], Group]:
    """One task's results."""
    found = []
    for one in results:
        verdict = Verdict(one.outcome, None if one.reward is None else one.reward.outcome)
        found.append(Rollout(one.rollout_id, lambda v=verdict: v, lambda r=one: r))  # type: ignore[misc]
    return lambda: Group(results[0].task_id, found, waiting)


def written(form: Format, target: Path, *results: RolloutResult) -> Report:
    with Parts(target, form, {"targets": "t"}) as parts:
        return export([source(results)], form, parts, lambda _: None)
