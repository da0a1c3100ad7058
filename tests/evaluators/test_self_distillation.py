"""A teacher's log-probabilities belong to exactly the tokens that the student sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import httpx
import pytest

from polarq.client.limits import Judge
from polarq.contracts.evaluators import all_of, folders_of, grades_fresh, repository_of, servers_of
from polarq.contracts.rollout import Reward
from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.contracts.trajectory import Trace, Trajectory
from polarq.errors import EvaluatorFault, InvalidTask
from polarq.testing.inference import ScriptedInference
from polarq.testing.inference.rendering import render
from polarq.testing.inference.sampling import expected_logprobs
from polarq.testing.inference.tokenizer import load_tokenizer
from polarq.topology import Topology
from polarq.trajectory.base import rewarded
from polarq_worker.evaluators.asking import ServerFailed
from polarq_worker.evaluators.base import EngineAddress, EvaluationTimedOut
from tests.evaluators.conftest import FIX, QUICK, REPO, Bench
from tests.evaluators.traces import trace, trajectory

ASKED = [{"role": "user", "content": "Mend add."}]
ENGINES = pytest.mark.parametrize("engine", ["vllm", "sglang"])
Engine = Literal["vllm", "sglang"]


def distilled(inner: Mapping[str, Any] | None = None, *, fresh: bool = False, **config: Any) -> EvaluatorSpec:
    whole = {"evaluator": inner or {"strategy": "session_completed"}, **config}
    return EvaluatorSpec(strategy="self_distillation", config=whole, refresh_runtime=fresh)


def ids_of(*messages: Mapping[str, Any], opened: bool = True) -> list[int]:
    text = render(
        list(messages),
        tools=None,
        add_generation_prompt=opened,
        continue_final_message=False,
        keep_thinking=True,
        template_kwargs=None,
    )
    return load_tokenizer().encode(text)


def sampled(index: int = 0, prompt: list[int] | None = None) -> Trace:
    """Two answers, with what a tool said between them, as the scripted engine samples them."""
    prompt = ids_of(*ASKED) if prompt is None else prompt
    first, between, second = [40, 41, 42], [7, 8], [50, 51]
    scored = expected_logprobs(prompt, [*first, *between, *second])
    mask = [1, 1, 1, 0, 0, 1, 1]
    logprobs = [value if bit else 0.0 for value, bit in zip(scored, mask, strict=True)]
    said = {"role": "assistant", "content": "x"}
    return trace(
        index, said, prompt_ids=prompt, response_ids=[*first, *between, *second], loss_mask=mask, logprobs=logprobs
    )


def of(*traces: Trace) -> Trajectory:
    return Trajectory(builder="x", traces=list(traces))


@asynccontextmanager
async def teaching(bench: Bench, engine: Engine = "vllm", **options: Any) -> AsyncIterator[ScriptedInference]:
    """A scripted server as the node's own inference."""
    async with ScriptedInference(engine=engine, **options) as server:
        bench.rules = replace(bench.rules, engines=[EngineAddress(engine, server.base_url)])
        yield server


@ENGINES
async def test_without_feedback_a_teacher_that_is_the_student_agrees_with_it(engine: Engine, bench: Bench) -> None:
    async with teaching(bench, engine) as server:
        await bench.start(distilled(teacher_base_url=server.base_url, teacher_engine=engine))
        bench.trajectory = of(sampled())
        reward = await bench.verdict()
        assert list(server.ledger[-1].prompt_ids) == [*ids_of(*ASKED), *sampled().response_ids]
    assert reward.teacher_logprobs == [sampled().logprobs]
    assert (reward.outcome, reward.evaluator, reward.report["scored_by"]) == (
        1.0, "self_distillation", "session_completed",
    )  # fmt: skip
    assert reward.report["teacher"]["gap"] == [0.0]
    (taught,) = rewarded(bench.trajectory, reward).traces
    assert taught.teacher_logprobs == taught.logprobs


@ENGINES
async def test_the_hint_stands_before_the_first_answer_and_every_id_of_the_student_stays(
    engine: Engine, bench: Bench
) -> None:
    hint = {"role": "user", "content": "Hint: Use + not -."}
    async with teaching(bench, engine) as server:
        await bench.start(distilled(hint="Use + not -.", template="Hint: {feedback}"))
        bench.trajectory = of(sampled())
        reward = await bench.verdict()
        read = list(server.ledger[-1].prompt_ids)
    told = ids_of(*ASKED, hint)
    assert read == [*told, *sampled().response_ids]
    values = expected_logprobs(told, sampled().response_ids)
    assert reward.teacher_logprobs == [[v if bit else 0.0 for v, bit in zip(values, sampled().loss_mask, strict=True)]]
    assert reward.report["teacher"]["feedback"] == "Use + not -."
    gap = (sum(reward.teacher_logprobs[0] or []) - sum(sampled().logprobs)) / 5
    assert reward.report["teacher"]["gap"] == [pytest.approx(gap, abs=1e-5)]


@pytest.mark.parametrize("end", ["0", "1", "\n", "."])
@pytest.mark.parametrize("tail", ["", "<think>\n\n</think>\n\n"])
async def test_whatever_a_hint_ends_with_it_stands_where_a_message_would(end: str, tail: str, bench: Bench) -> None:
    # Thinking is switched off by what follows the opening of the answer.
    rest = load_tokenizer().encode(tail)
    history = [*ASKED, {"role": "assistant", "content": "assistant\n"}, {"role": "user", "content": "go on"}]
    async with teaching(bench) as server:
        await bench.start(distilled(hint="x", template="{feedback} " + f"is it{end}?{end}"))
        bench.trajectory = of(sampled(prompt=[*ids_of(*history), *rest]))
        await bench.verdict()
        read = list(server.ledger[-1].prompt_ids)
    message = {"role": "user", "content": f"x is it{end}?{end}".strip()}
    assert read == [*ids_of(*history, message), *rest, *sampled().response_ids]


async def test_a_prompt_that_opens_no_answer_is_a_fault(bench: Bench) -> None:
    async with teaching(bench):
        await bench.start(distilled(hint="x"))
        bench.trajectory = of(sampled(prompt=[5, 6]))
        with pytest.raises(EvaluatorFault, match="is it the student's model"):
            await bench.verdict()


async def test_what_the_evaluator_found_is_the_feedback(bench: Bench) -> None:
    tests = {
        "strategy": "test_on_output",
        "config": {"repo_dir": REPO, "expected_output_json": {"tests/test_calc.py::test_add": "PASSED"}, **QUICK},
    }
    keys = ["otherwise", "nosuch", "resolved.nosuch"]
    async with teaching(bench):
        spec = distilled(tests, fresh=True, hint="Look at add.", report_keys=keys, log_chars=60)
        await bench.start(spec)
        await bench.agent("echo '# looked at' >> calc.py")
        bench.trajectory = of(sampled())
        reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"], reward.report["resolved"]) == (0.0, "fresh", False)
    hint, found, log = reward.report["teacher"]["feedback"].split("\n\n")
    assert (hint, json.loads(found)) == ("Look at add.", {"tests/test_calc.py::test_add": "FAILED"})
    assert log.endswith("tests/test_calc.py::test_p[two  blanks]")
    assert len(log) == 60


async def test_no_feedback_is_no_target_and_long_feedback_is_cut(bench: Bench) -> None:
    async with teaching(bench) as server:
        await bench.start(distilled({"strategy": "exact_match", "config": {"expected": "1"}}, report_keys=["why"]))
        bench.trajectory = of(sampled())
        reward = await bench.verdict()
        assert (reward.outcome, reward.teacher_logprobs) == (0.0, None)
        assert reward.report["teacher"] == {"why_not": "there was no feedback"}
        assert not len(server.ledger)
        await bench.start(distilled(hint="a" * 400 + "b" * 400, max_feedback_chars=100))
        cut = (await bench.verdict()).report["teacher"]["feedback"]
    assert cut == "a" * 50 + "\n[... 700 characters left out ...]\n" + "b" * 50


async def test_traces_without_tokens_to_train_on_and_those_too_long_have_no_target(bench: Bench) -> None:
    long = sampled(1, prompt=[9] * 64)
    nothing = sampled(2).model_copy(update={"loss_mask": [0] * 7, "logprobs": [0.0] * 7})
    async with teaching(bench, max_model_len=64) as server:
        await bench.start(distilled(teacher_base_url=server.base_url))
        bench.trajectory = of(sampled(), long, nothing)
        reward = await bench.verdict()
        assert len(server.ledger) == 1
    assert reward.teacher_logprobs == [sampled().logprobs, None, None]
    assert reward.report["teacher"]["left_out"] == {"1": "71 tokens; the teacher reads 64, and has to sample one more"}
    assert reward.report["teacher"]["gap"] == [0.0, None, None]
    assert [t.teacher_logprobs for t in rewarded(bench.trajectory, reward).traces] == reward.teacher_logprobs


async def test_a_tree_is_scored_with_what_its_branches_share(bench: Bench) -> None:
    parent = sampled()
    whole = [*parent.prompt_ids, *parent.response_ids]
    scored = expected_logprobs([*whole, 77], [60])
    branch = trace(
        1, {"role": "assistant", "content": "y"}, prompt_ids=[77], response_ids=[60], loss_mask=[1],
        logprobs=scored, parent=0, left_out=len(whole),
    )  # fmt: skip
    async with teaching(bench) as server:
        await bench.start(distilled(teacher_base_url=server.base_url))
        bench.trajectory = of(parent, branch)
        assert (await bench.verdict()).teacher_logprobs == [parent.logprobs, scored]


async def test_an_engine_that_is_paused_is_asked_again_and_one_that_is_away_is_a_fault(bench: Bench) -> None:
    async with teaching(bench) as server:
        await bench.start(distilled(hint="x", teacher_max_retries=20))
        bench.trajectory = of(sampled())
        async with httpx.AsyncClient(base_url=server.base_url, trust_env=False) as trainer:
            await trainer.post("/pause?mode=abort")
            with pytest.raises(EvaluationTimedOut, match="503"):
                await bench.verdict(1.0)
            await trainer.post("/resume")
        assert (await bench.verdict()).teacher_logprobs is not None
    await bench.start(distilled(hint="x", teacher_max_retries=1))
    with pytest.raises(ServerFailed, match="the teacher's server did not answer: ConnectError"):
        await bench.verdict()
    await bench.start(distilled(hint="x", teacher_max_retries=0, on_teacher_failure="outcome_only"))
    reward = await bench.verdict()
    assert (reward.outcome, reward.teacher_logprobs) == (1.0, None)
    assert "ConnectError" in reward.report["teacher"]["failed"]


async def test_a_model_that_is_not_served_and_a_node_without_inference_are_faults(bench: Bench) -> None:
    async with teaching(bench) as server:
        await bench.start(distilled(teacher_base_url=f"{server.base_url}/v1/", teacher_model="other"))
        bench.trajectory = of(sampled())
        with pytest.raises(EvaluatorFault, match="serves scripted, not 'other'"):
            await bench.verdict()
        bench.rules = replace(bench.rules, judge_hosts=["elsewhere"], engines=[])
        with pytest.raises(EvaluatorFault, match=r"teacher_base_url: .*security\.judge_hosts"):
            await bench.verdict()
    await bench.start(distilled(hint="x"))
    with pytest.raises(EvaluatorFault, match="no inference of its own"):
        await bench.verdict()


@pytest.mark.parametrize("given", [[], [[0.0]], [[0.0] * 3], [None, None]])
def test_targets_that_are_not_one_per_token_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="teacher_logprobs"):
        rewarded(trajectory("42"), Reward(outcome=1, evaluator="x", teacher_logprobs=given))
    with pytest.raises(ValueError, match="teacher_logprobs"):
        trace(0, {"role": "assistant", "content": "x"}, teacher_logprobs=[0.0, float("inf")])


TEST = {"strategy": "script", "config": {"command": "true", "repo_dir": REPO}, "refresh_runtime": True}
OTHER = "http://10.0.0.1:8000"


def task(**config: Any) -> Task:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    return Task.parse({"instruction": "x", "agent": agent, "evaluator": distilled(TEST, **config).model_dump()})


def test_what_is_within_it_is_known_to_the_task() -> None:
    harbor = {"name": "h", "strategy": "harbor", "config": {"task_dir": "/tasks/one"}}
    parts = {"strategy": "composite", "config": {"parts": [harbor, {"name": "t", **TEST}]}}
    spec = distilled(parts, teacher_base_url=OTHER)
    assert [one.strategy for one in all_of(spec)] == ["self_distillation", "composite", "harbor", "script"]
    assert (repository_of(spec), folders_of(spec), grades_fresh(spec)) == (REPO, ["/tasks/one"], True)
    assert servers_of(spec) == [("teacher_base_url", OTHER)]
    (problem,) = Judge(task(teacher_base_url=OTHER), Topology(), {}).problems("node0")
    assert problem.startswith("evaluator.config.teacher_base_url: ")
    assert Judge(task(hint="x"), Topology(), {}).problems("node0") == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "the teacher would be the student itself"),
        ({"hint": "x", "template": "no place"}, "must have {feedback} in it"),
        ({"hint": "x", "teacher_model": "m"}, "'teacher_model' goes with 'teacher_base_url'"),
        ({"teacher_base_url": "ftp://x"}, "http or https"),
        ({"hint": "x", "log_chars": -1}, "log_chars"),
        ({"hint": "x", "evaluator": {"strategy": "self_distillation"}}, "is a self_distillation itself"),
        ({"hint": "x", "evaluator": {"strategy": "my.module:Class"}}, "import path"),
        ({"hint": "x", "evaluator": {"strategy": "script"}}, "config.evaluator: config.command"),
    ],
)
def test_settings_are_refused_at_submit(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidTask, match=says):
        task(**config)


async def test_the_work_is_graded_as_without_it(bench: Bench) -> None:
    async with teaching(bench):
        config = {"command": "grep -q + calc.py", "repo_dir": REPO}
        await bench.start(distilled({"strategy": "script", "config": config, "refresh_runtime": True}, hint="x"))
        await bench.agent(FIX)
        bench.trajectory = of(sampled())
        reward = await bench.verdict()
    assert (reward.outcome, reward.report["graded_in"]) == (1.0, "fresh")
