"""What a task asks of the fidelity of its trajectories."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts import Break, Fidelity
from polarq.contracts.require import Require
from polarq.contracts.task import Task
from polarq.errors import InvalidTask


def test_nothing_required_is_never_missed() -> None:
    assert Require().missed(Fidelity(sampled_tokens=9, trainable_tokens=0)) == []


@pytest.mark.parametrize(
    ("required", "found", "missed"),
    [
        ({"trainable_fraction": 0.5}, {"sampled_tokens": 4, "trainable_tokens": 2}, []),
        (
            {"trainable_fraction": 0.51},
            {"sampled_tokens": 4, "trainable_tokens": 2},
            ["trainable_fraction is 0.5, at least 0.51 is required"],
        ),
        # Side calls are nobody's loss, and a share of nothing is none.
        ({"trainable_fraction": 1.0}, {"sampled_tokens": 9, "side_tokens": 5, "trainable_tokens": 4}, []),
        ({"trainable_fraction": 1.0}, {"sampled_tokens": 5, "side_tokens": 5}, []),
        ({"max_breaks": 0}, {"breaks": [Break(seq=1, position=3, cause="x")]}, ["breaks is 1, at most 0 allowed"]),
        ({"max_traces": 2}, {"traces": 2}, []),
        ({"max_traces": 1}, {"traces": 2}, ["traces is 2, at most 1 allowed"]),
        ({"max_missing_logprobs": 0}, {"missing_logprobs": 1}, ["missing_logprobs is 1, at most 0 allowed"]),
        (
            {"max_forged_control_tokens": 2, "max_empty_calls": 0},
            {"forged_control_tokens": 3, "empty_calls": 1},
            ["forged_control_tokens is 3, at most 2 allowed", "empty_calls is 1, at most 0 allowed"],
        ),
        ({"max_incomplete_calls": 0}, {"incomplete_calls": 1}, ["incomplete_calls is 1, at most 0 allowed"]),
        ({"max_unplaced_images": 0}, {"images": 2}, []),
        ({"max_unplaced_images": 0}, {"images": 2, "unplaced_images": 1}, ["unplaced_images is 1, at most 0 allowed"]),
        ({"max_versions": 1}, {"versions": ["1", "2"]}, ["versions is 2, at most 1 allowed"]),
    ],
)
def test_what_is_missed_is_named(required: dict[str, Any], found: dict[str, Any], missed: list[str]) -> None:
    assert Require(**required).missed(Fidelity(**found)) == missed


def test_a_requirement_that_is_none_is_refused_with_the_task() -> None:
    body = {"instruction": "x", "agent": {"harness": "shell", "custom_shell": {"command": "true"}}}
    with pytest.raises(InvalidTask, match=r"require: unknown key 'max_break', did you mean 'max_breaks'"):
        Task.parse({**body, "require": {"max_break": 0}})
    with pytest.raises(InvalidTask, match=r"require\.trainable_fraction: .*less than or equal to 1"):
        Task.parse({**body, "require": {"trainable_fraction": 90}})
