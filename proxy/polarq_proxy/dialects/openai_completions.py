"""OpenAI's legacy completions: POST /v1/completions, one bare prompt as text or token ids.

The record has a text prompt as one user message, and of a prompt of ids nothing but the ids. Several prompts in one
request are refused: each would be a call of its own, and `n` gives several answers to one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polarq_proxy.call import Answer, Choice, ChoiceDelta, ModelCall, Piece
from polarq_proxy.dialects.base import (
    Dialect,
    NativeRequest,
    Operation,
    Reply,
    ReplyHead,
    Route,
    ServedModel,
    StreamWriter,
    retry_headers,
)
from polarq_proxy.dialects.openai_options import SAMPLING
from polarq_proxy.dialects.openai_shapes import (
    MAX_TOP_LOGPROBS,
    body_of,
    choices_of,
    error_body,
    model_of,
    model_shown,
    strict_value,
    usage_of,
    wants_usage,
)
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import encode

MAX_TOKEN_ID = 2**31 - 1
DEFAULT_MAX_TOKENS = 16
"""What the API samples when nothing is said; said to the engine, so that no other default takes its place."""


class OpenAICompletionsDialect(Dialect):
    name: ClassVar[str] = "openai_completions"
    routes: ClassVar[Sequence[Route]] = (Route("POST", r"(?:engines/[^/]+/)?completions", Operation.GENERATE),)

    def parse(self, request: NativeRequest, match: re.Match[str]) -> ModelCall:
        return _call(body_of(request))

    def render(self, call: ModelCall, answer: Answer, head: ReplyHead) -> Reply:
        body: dict[str, Any] = {
            **_head(head, call.model or answer.model),
            "choices": [_whole_choice(call, choice, answer) for choice in answer.choices],
            "usage": usage_of(answer.usage),
        }
        return Reply(encode(body))

    def writer(self, call: ModelCall, head: ReplyHead) -> StreamWriter:
        return _TextStream(call, head)

    def fault(self, fault: CallFault) -> Reply:
        return Reply(encode(error_body(fault, "prompt")), fault.status, retry_headers(fault))

    def models(self, models: Sequence[ServedModel]) -> Reply:
        return Reply(encode({"object": "list", "data": [model_shown(model) for model in models]}))

    def model(self, model: ServedModel) -> Reply:
        return Reply(encode(model_shown(model)))


@dataclass(slots=True)
class _Offset:
    """How many characters of an answer's tokens went by."""

    characters: int = 0


class _TextStream(StreamWriter):
    def __init__(self, call: ModelCall, head: ReplyHead) -> None:
        self._call = call
        self._head = head
        self._model = call.model
        self._offsets: dict[int, _Offset] = {}
        self._prompt_ids: Sequence[Any] | None = None

    def piece(self, piece: Piece) -> bytes:
        self._model = self._model or piece.model or ""
        if piece.prompt_ids is not None:
            self._prompt_ids = piece.prompt_ids
        shown = [choice for choice in (self._choice(change) for change in piece.choices) if choice is not None]
        return self._event(choices=shown) if shown else b""

    def end(self, held: Sequence[Piece], answer: Answer) -> bytes:
        self._model = self._model or answer.model
        out = b"".join(self.piece(piece) for piece in held)
        unended = [choice.index for choice in answer.choices if choice.finish_reason is None]
        if unended:
            out += self.piece(Piece([ChoiceDelta(index, finish_reason="stop") for index in unended]))
        if self._call.wants_usage:
            out += self._event(choices=[], usage=usage_of(answer.usage))
        return out + b"data: [DONE]\n\n"

    def fail(self, fault: CallFault) -> bytes:
        return b"data: " + encode(error_body(fault, "prompt")) + b"\n\n"

    def _choice(self, change: ChoiceDelta) -> dict[str, Any] | None:
        text = change.delta.get("content") or ""
        first = change.index not in self._offsets
        offset = self._offsets.setdefault(change.index, _Offset())
        shown = {"index": change.index, "text": text, "logprobs": None, "finish_reason": change.finish_reason}
        if self._call.wants_logprobs and change.logprobs is not None:
            shown["logprobs"] = _logprobs(change.logprobs, offset)
        if self._call.wants_ids:
            shown["token_ids"] = change.ids
            if first:
                shown["prompt_token_ids"] = self._prompt_ids
        if change.finish_reason is not None:
            shown["stop_reason"] = change.stop_reason
        # Half a character is a token without text: it says nothing to who did not ask for more.
        says = text or change.finish_reason is not None or self._call.wants_ids or shown["logprobs"] is not None
        return shown if says else None

    def _event(self, **fields: Any) -> bytes:
        return b"data: " + encode({**_head(self._head, self._model), **fields}) + b"\n\n"


def _call(body: dict[str, Any]) -> ModelCall:
    prompt = _prompt(body.get("prompt"))
    for name, why in (("echo", "the prompt is not sampled"), ("suffix", "the model cannot fill in a middle")):
        if body.get(name):
            raise CallFault(FaultKind.BAD_REQUEST, f"'{name}' is not supported: {why}", param=name)
    options = {key: value for key, value in body.items() if key in SAMPLING and value is not None}
    options.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if isinstance(body.get("add_special_tokens"), bool):
        options["add_special_tokens"] = body["add_special_tokens"]
    top = body.get("logprobs")
    if isinstance(top, int) and top > 0:  # true is one
        options["top_logprobs"] = min(int(top), MAX_TOP_LOGPROBS)
    return ModelCall(
        messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else [],
        tools=None,
        options=options,
        model=model_of(body),
        stream=body.get("stream") is True,
        choices=choices_of(body.get("n")),
        wants_usage=wants_usage(body),
        wants_ids=body.get("return_token_ids") is True,
        wants_logprobs=isinstance(top, int) and top is not False,
        prompt=prompt,
    )


def _prompt(prompt: Any) -> str | list[int]:
    """One prompt, out of any of the four forms. Raises `CallFault`."""
    if isinstance(prompt, list) and prompt and all(isinstance(item, (str, list)) for item in prompt):
        if len(prompt) > 1:
            text = f"'prompt' holds {len(prompt)} prompts: send one a request ('n' gives several answers to it)"
            raise CallFault(FaultKind.BAD_REQUEST, text, param="prompt")
        [prompt] = prompt
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_token_id(item) for item in prompt):
        return prompt
    text = "'prompt' must be a text or a list of token ids, and not empty"
    raise CallFault(FaultKind.BAD_REQUEST, text, param="prompt")


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _head(head: ReplyHead, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{head.completion_id}", "object": "text_completion", "created": head.created, "model": model}


def _whole_choice(call: ModelCall, choice: Choice, answer: Answer) -> dict[str, Any]:
    logged = call.wants_logprobs and choice.logprobs is not None
    shown = {
        "index": choice.index,
        "text": choice.message.get("content") or "",
        "logprobs": _logprobs(choice.logprobs or [], _Offset()) if logged else None,
        "finish_reason": choice.finish_reason or "stop",
        "stop_reason": choice.stop_reason,
    }
    if call.wants_ids:
        shown |= {"token_ids": choice.ids, "prompt_token_ids": answer.prompt_ids}
    return shown


def _logprobs(entries: Sequence[Any], offset: _Offset) -> dict[str, Any]:
    """Entries as four lists side by side; offsets count the tokens' own spelling."""
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for item in entries:
        entry = item if isinstance(item, dict) else {}
        token = entry["token"] if isinstance(entry.get("token"), str) else ""
        others = [other for other in entry.get("top_logprobs") or () if isinstance(other, dict)]
        lists["tokens"].append(token)
        lists["token_logprobs"].append(strict_value(entry.get("logprob")))
        lists["top_logprobs"].append({str(other.get("token")): strict_value(other.get("logprob")) for other in others})
        lists["text_offset"].append(offset.characters)
        offset.characters += len(token)
    return lists
