"""Which sampling parameters a task may set, and to what."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts import Task
from polarq.contracts.specs import SAMPLING_PARAMETERS
from polarq.errors import InvalidTask

NO_NUMBERS: list[Any] = [True, "1", None, math.nan, math.inf, -math.inf, [1]]
NO_WHOLE_NUMBERS: list[Any] = [*NO_NUMBERS, 1.0, 1.5]
NO_TOKENS: list[Any] = [5, "5", None, [-1], [1.0], [True], ["5"], {"5": 1}]
NO_SWITCHES: list[Any] = [0, 1, "true", None]

BAD: dict[str, list[Any]] = {
    "temperature": [*NO_NUMBERS, -0.1],
    "top_p": [*NO_NUMBERS, 0, 0.0, -0.5, 1.01, 2],
    "top_k": [*NO_WHOLE_NUMBERS, -2],
    "min_p": [*NO_NUMBERS, -0.1, 1.1],
    "seed": NO_WHOLE_NUMBERS,
    "stop": [5, None, True, ["a", 5], {"a": 1}],
    "stop_token_ids": NO_TOKENS,
    "min_tokens": [*NO_WHOLE_NUMBERS, -1],
    "bad_words": ["a", None, [1], {"a": 1}],
    "presence_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NO_NUMBERS, -2.1, 2.1],
    "repetition_penalty": [*NO_NUMBERS, 0, 0.0, -1],
    "logit_bias": [[1], 5, None, {"5": "1"}, {"5": True}, {"5": math.nan}],
    "allowed_token_ids": NO_TOKENS,
    "ignore_eos": NO_SWITCHES,
    "reasoning_effort": [5, None, True, ["high"]],
    "thinking_token_budget": [*NO_WHOLE_NUMBERS, -1],
    "chat_template_kwargs": ["a", None, [1], True],
    "skip_special_tokens": NO_SWITCHES,
}
GOOD: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 1, 0.7, 5.0],
    "top_p": [0.01, 1, 1.0],
    "top_k": [-1, 0, 50],
    "min_p": [0, 0.05, 1],
    "seed": [-3, 0, 2**40],
    "stop": ["\n\n", ["a", "b"], []],
    "stop_token_ids": [[], [0, 151645]],
    "min_tokens": [0, 10],
    "bad_words": [[], ["a"]],
    "presence_penalty": [-2, 0.5, 2],
    "frequency_penalty": [-2.0, 0, 2.0],
    "repetition_penalty": [0.1, 1, 1.05],
    "logit_bias": [{}, {"5": -100, "6": 0.5}],
    "allowed_token_ids": [[1, 2]],
    "ignore_eos": [True, False],
    "reasoning_effort": ["high"],
    "thinking_token_budget": [0, 1024],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "skip_special_tokens": [True, False],
}


def task(**sampling: Any) -> Task:
    agent = {"harness": "mini_swe_agent"}
    return Task.load(
        {"instruction": "x", "agent": agent, "runtime": {"backend": "local"}, "model": {"sampling": sampling}}
    )


def test_every_sampling_parameter_is_tried_here() -> None:
    assert set(BAD) == set(GOOD) == set(SAMPLING_PARAMETERS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_that_no_engine_can_use_is_refused_in_one_line_that_names_its_parameter(name: str, value: Any) -> None:
    with pytest.raises(InvalidTask) as refused:
        task(temperature=1.0, **{name: value}) if name != "temperature" else task(temperature=value)
    [problem] = refused.value.problems
    assert problem.startswith(f"model.sampling: '{name}' must be ")
    assert problem.endswith(f", not {value!r}")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_a_usable_value_is_taken_as_it_is(name: str, value: Any) -> None:
    assert task(**{name: value}).model.sampling == {name: value}


def test_a_long_wrong_value_still_makes_a_short_line() -> None:
    with pytest.raises(InvalidTask) as refused:
        task(temperature="hot\n" * 10_000)
    [problem] = refused.value.problems
    assert "\n" not in problem
    assert len(problem) < 200


@pytest.mark.parametrize("name", ["quickstart", "calculator"])
def test_the_examples_still_load(name: str) -> None:
    assert Task.load(Path(__file__).parents[2] / "examples" / name / "task.yaml").agent.harness
