"""vLLM's `/v1/completions`: a bare prompt, as text or ids, and an answer that no parser touches.

The inner form is that of chat: the text is an assistant message's content, and a log-probability entry has a token and
its alternatives. Here the prompt's ids are in the choice, and log-probabilities are lists side by side. SGLang's route
of the same name answers in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarq_proxy.call import Answer, ModelCall, Piece
from polarq_proxy.engines.asking import alternatives, put_streaming
from polarq_proxy.engines.base import EngineRequest

KIND = "text_completion"
"""The `object` of every answer and of every event of one."""


def completion_request(
    call: ModelCall, model: str, *, stream: bool, prompt_ids: Sequence[int] | None = None
) -> EngineRequest:
    """The request for a call with a bare prompt. `prompt_ids` take the place of the prompt."""
    body = {key: value for key, value in call.options.items() if key != "top_logprobs"}
    body.update(
        model=model,
        prompt=call.prompt if prompt_ids is None else list(prompt_ids),
        logprobs=alternatives(call.options),
        return_token_ids=True,
        return_weight_versions=True,
    )
    put_streaming(body, stream)
    return EngineRequest("/v1/completions", body)


def is_completion(tree: Mapping[str, Any]) -> bool:
    return tree.get("object") == KIND


def with_choices(answer: Answer, items: Sequence[dict[str, Any]]) -> Answer:
    """`answer`, its choices of the common kind, with what completions say in their own way."""
    for choice, item in zip(answer.choices, items, strict=True):
        choice.message = {"role": "assistant", "content": _text(item)}
        choice.logprobs = _entries(item)
    answer.prompt_ids = _prompt_ids(items)
    return answer


def with_changes(piece: Piece, items: Sequence[dict[str, Any]]) -> Piece:
    """The same for an event of a stream."""
    for change, item in zip(piece.choices, items, strict=True):
        text = _text(item)
        change.delta = {"content": text} if text else {}
        change.logprobs = _entries(item)
    piece.prompt_ids = _prompt_ids(items)
    return piece


def _prompt_ids(items: Sequence[dict[str, Any]]) -> list[Any] | None:
    """All choices are answers to one prompt; each says its ids, or the first alone."""
    return next((item["prompt_token_ids"] for item in items if isinstance(item.get("prompt_token_ids"), list)), None)


def _text(item: dict[str, Any]) -> str:
    text = item.get("text")
    return text if isinstance(text, str) else ""


def _entries(item: dict[str, Any]) -> list[Any] | None:
    """One entry per log-probability. The lists beside it only say how tokens are spelt: they may be too short."""
    logprobs = item.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(logprobs, dict) or not isinstance(values, list):
        return None
    tokens, tops = _list(logprobs.get("tokens")), _list(logprobs.get("top_logprobs"))
    return [
        {
            "token": tokens[at] if at < len(tokens) else "",
            "logprob": value,
            "top_logprobs": _alternatives(tops[at]) if at < len(tops) else [],
        }
        for at, value in enumerate(values)
    ]


def _alternatives(top: Any) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": value} for token, value in top.items()] if isinstance(top, dict) else []


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
