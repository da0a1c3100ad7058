"""Whole answers whose long lists are cut out before they are parsed: read like those that are parsed through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polarq_proxy.engines.vllm import VllmEngine

MARKS = '"logprobs":{"content":[ ]},"finish_reason": "prompt_token_ids":['


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}


def _choice(index: int = 0, text: str = "hi", token: str = "hi", **other: Any) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": [_entry(token, -0.5), _entry("!", -0.25)]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [7, 8],
        **other,
    }


def _answer(*choices: dict[str, Any], **other: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return {"model": "m", "choices": list(choices), "usage": usage, "prompt_token_ids": [1, 2, 3], **other}


ANSWERS = {
    "plain": _answer(_choice()),
    "the marks in its text": _answer(_choice(text=MARKS)),
    "the marks in a token": _answer(_choice(token=MARKS)),
    "the marks as keys of the message": _answer(
        _choice(
            message={"role": "assistant", "logprobs": {"content": [1]}, "finish_reason": 1, "prompt_token_ids": [9]}
        )
    ),
    "no log-probabilities": _answer(_choice(logprobs=None)),
    "no entries": _answer(_choice(logprobs={"content": []}, token_ids=[])),
    "several choices": _answer(_choice(0), _choice(1, text="ho")),
    "no prompt": {**_answer(_choice()), "prompt_token_ids": None},
    "the prompt first": {"prompt_token_ids": [1, 2, 3], **_answer(_choice())},
    "the prompt twice": _answer(_choice(prompt_token_ids=[5])),
    "an entry that is none": _answer(_choice(logprobs={"content": [None, _entry("!", -0.25)]})),
    "a value that is none": _answer(_choice(logprobs={"content": [_entry("a", 0) | {"logprob": None}]})),
    "alternatives": _answer(
        _choice(logprobs={"content": [_entry("a", -0.5) | {"top_logprobs": [_entry("b", -9.0)]}, _entry("!", -0.25)]})
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_cutting_out_the_long_lists_changes_nothing(name: str) -> None:
    engine, tree = VllmEngine(), ANSWERS[name]
    compact = json.dumps(tree, separators=(",", ":")).encode()
    spaced = json.dumps(tree, indent=1).encode()  # nothing of it is found by looking for bytes
    read, through = engine.read(compact), engine.read(spaced)
    assert _plain(read) == _plain(through)
    said = tree["choices"][0]["logprobs"]
    assert _plain(read)[0][3] == (None if said is None else said["content"])


def test_a_number_that_is_not_finite_is_not_taken_for_a_good_one() -> None:
    data = json.dumps(_answer(_choice()), separators=(",", ":")).replace("-0.25", "-1e999").encode()
    [choice] = VllmEngine().read(data).choices
    assert choice.logprobs is not None
    assert [entry["logprob"] for entry in choice.logprobs] == [-0.5, float("-inf")]


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_a_cut_answer_is_no_answer(cut: int) -> None:
    data = json.dumps(_answer(_choice()), separators=(",", ":")).encode()
    with pytest.raises(Exception, match="did not answer with JSON"):
        VllmEngine().read(data[: min(cut, len(data) - 1)])


def _plain(answer: Any) -> list[Any]:
    prompt = None if answer.prompt_ids is None else list(answer.prompt_ids)
    return [
        (choice.index, choice.message, choice.ids, _listed(choice.logprobs), choice.finish_reason, prompt, answer.usage)
        for choice in answer.choices
    ]


def _listed(entries: Any) -> Any:
    return None if entries is None else list(entries)
