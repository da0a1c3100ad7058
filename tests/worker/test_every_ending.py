"""Each kind of end on a real worker: how it comes about, what becomes of it by default and as a task says, and that no
end but the policy's own has a reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from polarq.contracts import Boundary, RolloutResult, RolloutState
from polarq.contracts.endings import DEFAULT_RULES, NOT_REPLACED, OWN_DOING, Ending, Use
from polarq.contracts.task import Task
from polarq.testing.ports import free_port
from polarq.testing.stack import LocalStack
from polarq.trainers.advantages import rewards_of
from polarq.trainers.rows import rows
from tests.worker.conftest import ask, shell_task, wait_until

B = Boundary
SLEEP = "exec sleep 120"
LONG = ask(2).replace('"go on"', '"go on " * 40000')
"""Its second prompt is longer than the model's context."""
NOBODY = f"http://127.0.0.1:{free_port()}"
AWAY: dict[str, Any] = {"judge_base_url": NOBODY, "judge_model": "m", "rubric": "r", "judge_max_retries": 0}


class Way(NamedTuple):
    """How a rollout comes to an end of a kind."""

    command: str
    boundary: Boundary
    fields: dict[str, Any] = {}


WAYS = {
    Ending.COMPLETED: Way(ask(2), B.NONE),
    Ending.AGENT_FAILED: Way(f"{ask()}\nexit 3", B.HARNESS),
    Ending.AGENT_TIMED_OUT: Way(f"{ask()}\n{SLEEP}", B.HARNESS, {"timeouts": {"agent_s": 5}}),
    Ending.AGENT_LIMIT: Way(ask(2), B.HARNESS, {"model": {"max_calls": 1}}),
    Ending.TRUNCATED: Way(ask(), B.HARNESS, {"model": {"max_tokens": 1}}),
    Ending.OVERFLOW: Way(LONG, B.HARNESS),
    Ending.PARSER_INVALID_CALL: Way(ask(), B.HARNESS, {"instruction": "[script: unreadable_call] Look."}),
    Ending.MODEL_ERROR: Way(ask(), B.MODEL, {"instruction": "[script: broken] Say something."}),
    Ending.RUNTIME: Way(
        ask(), B.PREPARE, {"runtime": {"backend": "local", "prepare": [{"type": "exec", "command": "exit 1"}]}}
    ),
    Ending.EVALUATOR: Way(ask(), B.EVALUATOR, {"evaluator": {"strategy": "llm_judge", "config": AWAY}}),
    Ending.NODE: Way(ask(), B.QUEUE, {"timeouts": {"queue_s": 1e-6}}),
    Ending.FIDELITY: Way(ask(2), B.BUILDER, {"require": {"max_traces": 1}}),
    Ending.TASK: Way(ask(), B.TASK, {"builder": {"strategy": "no_such"}}),
    Ending.CANCELLED: Way(f"{ask()}\n{SLEEP}", B.CONTROL),
    Ending.EARLY_STOPPED: Way(
        f'case "$SESSION_ID" in *.1) {SLEEP};; esac\n{ask()}',
        B.CONTROL,
        {"num_samples": 2, "early_stop_min_usable_sessions": 1},
    ),
}
INFRASTRUCTURE = {Ending.MODEL_ERROR, Ending.RUNTIME, Ending.EVALUATOR, Ending.NODE}
RULES: dict[Ending, list[Any]] = {
    # None: the default.
    **{ending: [None, "mask", -0.25] for ending in Ending if ending in OWN_DOING},
    **{ending: [None, "mask"] for ending in Ending if ending in INFRASTRUCTURE},
    Ending.FIDELITY: [None, "replace"],
    Ending.TASK: [None, "mask"],
    Ending.CANCELLED: [None, "mask"],
    Ending.EARLY_STOPPED: [None, "mask"],
}
CASES = [(ending, rule) for ending, some in RULES.items() for rule in some]


def task_id(ending: Ending, rule: Any) -> str:
    return f"ending-{ending.value}-{rule}".replace(".", "")


@pytest.fixture(scope="module")
def begun(stack: LocalStack) -> Iterator[LocalStack]:
    """All of them at once; what has to be cancelled is, as soon as it runs."""
    for ending, rule in CASES:
        way = WAYS[ending]
        endings = {} if rule is None else {ending.value: rule}
        fields = {"endings": endings, "max_replacements": 1, **way.fields}
        task = Task.load(shell_task(task_id(ending, rule), way.command, **fields))
        # Past the client's own checks: what a node cannot do is found there too.
        ledger = stack.client.ledger
        ledger.do(ledger.calls.submit(task, task.task_id))
        for index in range(task.num_samples):
            stack.client.ring_again(task, index)
    for _, rule in [case for case in CASES if case[0] is Ending.CANCELLED]:
        name = task_id(Ending.CANCELLED, rule)
        wait_until(lambda name=name: _runs(stack, name), 120)  # type: ignore[misc]
        stack.client.cancel(name)
    yield stack


def _runs(stack: LocalStack, name: str) -> bool:
    return stack.client.record(name).rollouts[0].state is RolloutState.RUNNING


def ended(stack: LocalStack, ending: Ending, rule: Any) -> RolloutResult:
    found = stack.client.wait(task_id(ending, rule), 240).results
    (result,) = [one for one in found if one.outcome.ending is ending] or found
    return result


@pytest.mark.parametrize(("ending", "rule"), CASES, ids=[f"{ending.value}-{rule}" for ending, rule in CASES])
def test_an_end_is_told_and_dealt_with(begun: LocalStack, ending: Ending, rule: Any) -> None:
    result = ended(begun, ending, rule)
    outcome, reward = result.outcome, result.reward
    assert (outcome.ending, outcome.boundary) == (ending, WAYS[ending].boundary), outcome
    use = DEFAULT_RULES[ending].use if rule is None else Use(rule) if isinstance(rule, str) else Use.TRAIN
    assert outcome.trainable is (use is Use.TRAIN)
    assert result.attempt == (2 if use is Use.REPLACE else 1) or ending in NOT_REPLACED
    if ending not in OWN_DOING:
        assert (reward, rows(result), rewards_of([result])) == (None, [], {})
        return
    assert reward is not None
    if isinstance(rule, float):
        assert (reward.outcome, reward.evaluator) == (rule, "endings")
    made = rows(result)
    assert {row.reward for row in made} == ({reward.outcome} if use is Use.TRAIN else set())
    assert rewards_of([result]) == ({result.rollout_id: reward.outcome} if use is Use.TRAIN else {})


def test_every_kind_of_end_is_tried_with_its_default_and_otherwise() -> None:
    assert set(WAYS) == set(RULES) == set(Ending)
    assert {ending for ending, rule in DEFAULT_RULES.items() if rule.use is Use.TRAIN} == OWN_DOING
    assert {ending for ending, rule in DEFAULT_RULES.items() if rule.use is Use.REPLACE} == INFRASTRUCTURE


def test_rollouts_that_others_made_needless_have_ended_usably(begun: LocalStack) -> None:
    for rule in RULES[Ending.EARLY_STOPPED]:
        results = begun.client.wait(task_id(Ending.EARLY_STOPPED, rule), 240).results
        states = {one.index: (one.outcome.state, one.outcome.trainable) for one in results}
        assert states == {0: (RolloutState.COMPLETED, True), 1: (RolloutState.CANCELLED, False)}
