"""SGLang's own words about tokens, read without any of polarq's code: unary answers and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .chat import Answer, read_stream, read_unary

ASK_UNARY: Mapping[str, Any] = {
    "logprobs": True,
    "return_meta_info": True,
    "return_input_ids_in_sglext": True,
    "return_output_ids_in_sglext": True,
}
ASK_STREAM: Mapping[str, Any] = {name: value for name, value in ASK_UNARY.items() if name != "return_meta_info"}


def read_sglang_unary(body: dict[str, Any]) -> Answer:
    """The ids wherever the release put them; log-probabilities beside their ids if they are there."""
    choice, extra = body["choices"][0], body.get("sglext") or {}
    answer = read_unary(body)
    pairs = (choice.get("meta_info") or {}).get("output_token_logprobs")
    answer.prompt_ids = extra.get("input_ids") or choice.get("prompt_token_ids") or []
    listed = extra.get("output_ids") or [choice.get("response_token_ids") or choice.get("token_ids") or []]
    answer.sampled_ids = listed[0] or [pair[1] for pair in pairs or []]
    if pairs is not None:
        assert [pair[1] for pair in pairs] == answer.sampled_ids
        answer.logprobs = [pair[0] for pair in pairs]
    answer.stop_reason = choice.get("matched_stop")
    return answer


def read_sglang_stream(lines: Sequence[str]) -> Answer:
    answer = read_stream(lines)
    for frame in answer.frames:
        extra = frame.get("sglext") or {}
        answer.prompt_ids = extra.get("input_ids") or answer.prompt_ids
        answer.sampled_ids = (extra.get("output_ids") or [answer.sampled_ids])[0]
        for choice in frame["choices"]:
            if choice.get("matched_stop") is not None:
                answer.stop_reason = choice["matched_stop"]
    return answer
