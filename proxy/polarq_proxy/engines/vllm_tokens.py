"""vLLM's routes for token ids (0.24 and later; from 0.30 on only with `--enable-scale-out`).

`/v1/chat/completions/render` tells how the server would sample a chat request: its own defaults filled in, names and
limits as its sampler has them. `/inference/v1/generate` samples on from ids, and `/v1/chat/completions/derender` runs
the server's parsers over them, so that the message is what one uncut call would have given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from polarq_proxy.call import Answer, Choice, ChoiceDelta, Piece
from polarq_proxy.engines.base import Engine, EngineRequest, TokensIn
from polarq_proxy.engines.wire import index_of, list_or_none, objects, spans_of, status_of, text, tree_of, usage_of
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode
from polarq_proxy.sse import SseEvent

RENDER, GENERATE, DERENDER = (
    "/v1/chat/completions/render",
    "/inference/v1/generate",
    "/v1/chat/completions/derender",
)
_OF_THE_WAY = frozenset({"stream", "stream_options", "kv_transfer_params", "logprobs", "top_logprobs"})
"""Members of a chat request that say how its answer travels."""
_LIMITS = frozenset({"max_tokens", "max_completion_tokens"})
_COUNTED = ("presence_penalty", "frequency_penalty", "thinking_token_budget")
"""Sampling that counts the ids of the answer: ids that were moved into the prompt it would not count any more."""


class VllmTokens(TokensIn):
    """`engine` reads what is like a chat answer."""

    routes: ClassVar[Sequence[str]] = (RENDER, GENERATE, DERENDER)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def settings(self, body: Mapping[str, Any]) -> EngineRequest:
        kept = _without(body, _OF_THE_WAY | _LIMITS)
        # Limits are counted from the prompt that was really sampled on, which may not be the one rendered here.
        kept.update(stream=True, stream_options={"include_usage": True}, logprobs=True, max_tokens=1)
        return EngineRequest(RENDER, kept)

    def going_on(
        self, settings: bytes, prompt_ids: Sequence[int], sampled_ids: Sequence[int], limit: int | None
    ) -> EngineRequest | None:
        body = tree_of(settings)
        params = body.get("sampling_params")
        if not isinstance(params, dict):
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server rendered no sampling parameters")
        if body.get("features") or body.get("content_parts"):
            return None  # ids alone lose the images
        if params.get("stop") or any(params.get(name) for name in _COUNTED):
            return None  # a stop that lies across the cut would not be seen
        done = len(sampled_ids)
        params = {**_without(params, _LIMITS), "logprobs": 0}
        if limit is not None:
            params["max_tokens"] = limit - done
        if _is_number(params.get("min_tokens")):
            params["min_tokens"] = max(0, params["min_tokens"] - done)
        if _is_number(params.get("seed")):
            params["seed"] += done  # the same one would draw the same random numbers again
        body = _without(body, frozenset({"request_id", "token_offsets"}))
        body.update(
            token_ids=[*prompt_ids, *sampled_ids],
            sampling_params=params,
            stream=True,
            stream_options={"include_usage": True},
            return_token_ids=True,
        )
        return EngineRequest(GENERATE, body)

    def read_event(self, event: SseEvent) -> Piece:
        if event.data == b"[DONE]":
            return Piece(done=True)
        tree = tree_of(event.data)
        if tree.get("error") is not None or event.event == b"error":
            raise self._engine.fault(status_of(tree.get("error")), {}, encode(tree))
        return Piece(
            choices=[_delta(item, place) for place, item in enumerate(objects(tree.get("choices")))],
            prompt_ids=list_or_none(tree.get("prompt_token_ids")),
            usage=usage_of(tree.get("usage")),
            model=text(tree.get("model")) or None,
        )

    def message(self, body: Mapping[str, Any], answer: Answer) -> EngineRequest:
        (choice,) = answer.choices
        prompt_ids = list(answer.prompt_ids or ())
        said = {
            "index": 0,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.ids,
            "logprobs": None,
        }
        generated = {"request_id": "continued", "model": answer.model, "choices": [said]}
        request = {
            "model": body.get("model"),
            "generate_response": generated,
            "prompt_tokens": len(prompt_ids),
            "prompt_token_ids": prompt_ids,
            "chat_request": _without(body, _OF_THE_WAY),
        }
        return EngineRequest(DERENDER, request)

    def read_message(self, data: bytes) -> Choice:
        answer = self._engine.read(data)
        if len(answer.choices) != 1:
            raise CallFault(FaultKind.ENGINE_FAULT, "the inference server made not one message of one sample")
        return answer.choices[0]


def _delta(item: Mapping[str, Any], place: int) -> ChoiceDelta:
    ids = list_or_none(item.get("token_ids"))
    logprobs = item.get("logprobs")
    entries = objects(logprobs.get("content")) if isinstance(logprobs, dict) else None
    stop = item.get("stop_reason")
    return ChoiceDelta(
        index=index_of(item, place),
        ids=ids,
        logprobs=None if entries is None else [_entry(entry) for entry in entries],
        finish_reason=text(item.get("finish_reason")) or None,
        stop_reason=stop if isinstance(stop, (str, int)) else None,
        weight_versions=spans_of(item.get("weight_versions")),
    )


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """By integer id here (by text in older releases); written as vLLM writes ids where a harness expects text."""
    token = entry.get("token")
    return {
        "token": token if isinstance(token, str) else f"token_id:{entry.get('token_id')}",
        "logprob": entry.get("logprob"),
        "bytes": None,
        "top_logprobs": [],
    }


def _without(tree: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
