"""A final answer is judged where it stands, and what is no answer gets nothing."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import BranchCause, Trajectory
from polarq.errors import EvaluatorFault, InvalidTask, SandboxLost
from polarq_worker.evaluators import math_verify
from tests.evaluators.conftest import REPO, Bench
from tests.evaluators.traces import trace, trajectory


def exact(**config: Any) -> EvaluatorSpec:
    return EvaluatorSpec(strategy="exact_match", config={"expected": "42", **config})


@pytest.mark.parametrize(
    ("config", "said", "outcome"),
    [
        ({}, "42", 1.0),
        ({}, " 42\n", 1.0),
        ({}, "The answer is 42", 0.0),
        ({}, "420", 0.0),
        ({}, "", 0.0),
        ({"answer_after": "####"}, "#### 41, no\n#### 42", 1.0),
        ({"answer_after": "####"}, "42", 0.0),
        ({"answer_after": "<a>", "answer_before": "</a>"}, "<a>1</a> <a> 42 </a> done", 1.0),
        ({"answer_after": "<a>", "answer_before": "</a>"}, "<a> 42", 0.0),
        ({"expected": ["7", "New York"], "ignore_case": True, "ignore_blanks": True}, "new\n  YORK", 1.0),
        ({"expected": "New York"}, "new york", 0.0),
    ],
)
async def test_the_last_message_is_compared(config: dict[str, Any], said: str, outcome: float, bench: Bench) -> None:
    await bench.start(exact(**config))
    bench.trajectory = trajectory("42 42", said)
    assert (await bench.verdict()).outcome == outcome


async def test_parts_without_text_and_what_is_said_aside_are_no_answer(bench: Bench) -> None:
    await bench.start(exact())
    parts = [{"type": "text", "text": "42"}, {"type": "image_url", "image_url": {"url": "x"}}]
    side = trace(1, {"role": "assistant", "content": "A title"}, metadata={"label": "side"})
    sub = trace(2, {"role": "assistant", "content": "41"}, cause=BranchCause.SUB_AGENT)
    own = trace(0, {"role": "assistant", "content": "40"}, {"role": "assistant", "content": parts})
    bench.trajectory = Trajectory(builder="x", traces=[own, side, sub])
    assert (await bench.verdict()).outcome == 1.0


async def test_a_policy_that_said_nothing_has_zero_and_the_reason(bench: Bench) -> None:
    await bench.start(exact())
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["why"]) == (0.0, "the assistant said nothing")


@pytest.mark.parametrize(
    ("command", "outcome", "why"),
    [
        ("printf ' 42\\n' > answer.txt", 1.0, None),
        ("true", 0.0, "there is no file"),
        ("mkdir answer.txt", 0.0, "is no regular file"),
        ("mkfifo answer.txt", 0.0, "is no regular file"),
        ("printf '\\xff' > answer.txt", 0.0, "not UTF-8"),
        ("printf '\\n' > answer.txt", 0.0, "blank"),
        ("head -c 2000000 /dev/zero > answer.txt", 0.0, "more than"),
        ("ln -s /etc/hostname answer.txt", 0.0, None),
    ],
)
async def test_an_answer_file_is_read(command: str, outcome: float, why: str | None, bench: Bench) -> None:
    await bench.start(exact(answer_file=f"{REPO}/answer.txt"))
    await bench.agent(command)
    reward = await bench.verdict()
    assert reward.outcome == outcome
    assert (why or "") in reward.report.get("why", "")


async def test_a_sandbox_that_is_gone_is_no_wrong_answer(bench: Bench) -> None:
    await bench.start(exact(answer_file="answer.txt"))
    await bench.runtime.stop()
    with pytest.raises(SandboxLost):
        await bench.verdict()


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "word": {"pattern": "^(a+)+$"}},
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("said", "fenced", "outcome"),
    [
        ('{"n": 1}', False, 1.0),
        ('{"n": "1"}', False, 0.0),
        ('{"n": NaN}', False, 0.0),
        ('{"n": 1, "n": "x"}', False, 0.0),
        ("{}", False, 0.0),
        ("no JSON", False, 0.0),
        ('```json\n{"n": 1}\n```', False, 0.0),
        ('Here:\n```json\n{"n": 1}\n```\nDone.', True, 1.0),
        ('```\n{"n": 1}\n```\n```\n{"n": 2}\n```', True, 0.0),
    ],
)
async def test_json_is_held_to_the_schema(said: str, fenced: bool, outcome: float, bench: Bench) -> None:
    await bench.start(EvaluatorSpec(strategy="json_schema", config={"schema": SCHEMA, "fenced": fenced}))
    bench.trajectory = trajectory(said)
    assert (await bench.verdict()).outcome == outcome


async def test_a_schema_that_refers_elsewhere_is_no_wrong_answer(bench: Bench) -> None:
    await bench.start(EvaluatorSpec(strategy="json_schema", config={"schema": {"$ref": "http://127.0.0.1:1/x.json"}}))
    bench.trajectory = trajectory("{}")
    with pytest.raises(EvaluatorFault, match="Unresolvable"):
        await bench.verdict()


MATH = [
    (r"so it is $\frac{2}{4}$", "1/2", 1.0),
    (r"\boxed{0.5}", r"\frac12", 1.0),
    (r"\frac{1}{2}", "0.5", 1.0),
    (r"$x^2+2x+1$", "$(x+1)^2$", 1.0),
    (r"\boxed{3}", "4", 0.0),
    ("I do not know", "4", 0.0),
    (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
]


@pytest.mark.parametrize(("said", "expected", "outcome"), MATH)
async def test_mathematics_is_compared_by_what_it_means(said: str, expected: str, outcome: float, bench: Bench) -> None:
    await bench.start(EvaluatorSpec(strategy="math_verify", config={"expected": expected}))
    bench.trajectory = trajectory(said)
    reward = await bench.verdict()
    assert reward.outcome == outcome, reward


async def test_what_would_never_be_worked_out_is_zero(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify, "CPU_S", 3)
    await bench.start(EvaluatorSpec(strategy="math_verify", config={"expected": "$9^{8}$"}))
    bench.trajectory = trajectory("$9^{9^{9^{9}}}$")
    reward = await bench.verdict()
    assert (reward.outcome, "could not be worked out" in reward.report["why"]) == (0.0, True), reward


@pytest.mark.parametrize(
    ("strategy", "config", "says"),
    [
        ("exact_match", {}, "config.expected: Field required"),
        ("exact_match", {"expected": []}, "config.expected"),
        ("exact_match", {"expected": "  "}, "config.expected"),
        ("exact_match", {"expected": "1", "answer_fil": "x"}, "did you mean 'answer_file'"),
        ("json_schema", {"schema": {}}, "is empty"),
        ("json_schema", {"schema": {"type": "integr"}}, "is no JSON schema at type"),
        ("math_verify", {"expected": "$$"}, "no number, letter or command"),
    ],
)
def test_settings_are_refused_at_submit(strategy: str, config: dict[str, Any], says: str) -> None:
    task = {
        "instruction": "x",
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
        "evaluator": {"strategy": strategy, "config": config},
    }
    with pytest.raises(InvalidTask, match=says):
        Task.parse(task)
