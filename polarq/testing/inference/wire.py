"""vLLM's JSON, field for field and in its order (captured from a real server, see tests/fixtures/vllm)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarq.testing.inference.generation import Generation
from polarq.testing.inference.parsing import Delta, Message
from polarq.testing.inference.sampling import expected_logprobs, top_logprobs
from polarq.testing.inference.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What is the same in every object of one answer, and what the client asked to see."""

    id: str
    model: str
    fingerprint: str
    prompt_ids: Sequence[int]
    tokenizer: Tokenizer
    prompt_text: str | None = None
    show_ids: bool = False
    show_versions: bool = False
    as_token_ids: bool = False
    logprobs: int | None = None
    """Number of top log-probabilities; None: no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for the ids of the prompt."""
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def token(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else text


def dumps(value: Any) -> bytes:
    """Compact JSON. NaN and infinities are written as such: a faulty server writes them."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def error_body(message: str, kind: str, param: str | None, code: int) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def prompt_logprobs(reply: Reply) -> list[Json | None] | None:
    """One entry per id of the prompt, by id: nothing comes before the first one, so that it has none."""
    count, ids = reply.prompt_logprobs, list(reply.prompt_ids)
    if count is None:
        return None
    if count == 0:
        found = [[pair] for pair in zip(ids[1:], expected_logprobs(ids[:1], ids[1:]), strict=True)]
    else:
        size = reply.tokenizer.vocabulary_size
        found = [top_logprobs(ids[:at], ids[at], count + 1, size) for at in range(1, len(ids))]
    return [None, *(_prompt_entry(reply, pairs) for pairs in found)]


def _prompt_entry(reply: Reply, pairs: Sequence[tuple[int, float]]) -> Json:
    return {
        str(token_id): {"logprob": value, "rank": rank, "decoded_token": "".join(reply.tokenizer.pieces([token_id]))}
        for rank, (token_id, value) in enumerate(pairs, start=1)
    }


# Chat completions


def chat_logprobs(reply: Reply, generation: Generation, indexes: Iterable[int]) -> Json | None:
    """One entry per sampled id, and no integer id in it."""
    if reply.logprobs is None:
        return None
    sample = generation.sample
    entries = []
    for at in indexes:
        token_id, text = sample.token_ids[at], sample.token_texts[at]
        before = [*reply.prompt_ids, *sample.token_ids[:at]] if reply.logprobs else []
        top = top_logprobs(before, token_id, reply.logprobs, reply.tokenizer.vocabulary_size)
        entries.append(
            {
                "token": reply.token(token_id, text),
                "logprob": sample.logprobs[at],
                "bytes": list(text.encode()),
                "top_logprobs": [_top_entry(reply, other, logprob) for other, logprob in top],
            }
        )
    return {"content": entries}


def generate_logprobs(reply: Reply, generation: Generation, indexes: Iterable[int]) -> Json | None:
    """As `/inference/v1/generate` writes them: by integer id, the sampled one always among the top ones."""
    if reply.logprobs is None:
        return None
    sample = generation.sample
    entries = []
    for at in indexes:
        before = [*reply.prompt_ids, *sample.token_ids[:at]] if reply.logprobs else []
        found = top_logprobs(before, sample.token_ids[at], reply.logprobs, reply.tokenizer.vocabulary_size)
        top = [{"token_id": token_id, "logprob": logprob, "rank": rank} for rank, (token_id, logprob) in
               enumerate(found or [(sample.token_ids[at], sample.logprobs[at])], start=1)]  # fmt: skip
        entries.append(
            {"token_id": sample.token_ids[at], "logprob": sample.logprobs[at], "rank": 1, "top_logprobs": top}
        )
    return {"content": entries}


def _top_entry(reply: Reply, token_id: int, logprob: float) -> Json:
    token = reply.token(token_id, "".join(reply.tokenizer.pieces([token_id])))
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def tool_call_id(reply: Reply, choice_index: int, call_index: int) -> str:
    """The same for the same answer to the same prompt, so that a retry sees no difference."""
    seed = dumps([list(reply.prompt_ids), choice_index, call_index])
    return "chatcmpl-tool-" + hashlib.sha256(seed).hexdigest()[:16]


def chat_message(reply: Reply, index: int, message: Message) -> Json:
    """The assistant's message of choice `index`."""
    said: Json = {
        "role": "assistant",
        "content": message.content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": tool_call_id(reply, index, at),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for at, (name, arguments) in enumerate(message.tool_calls)
        ]
    said["reasoning"] = message.reasoning
    return said


def chat_choice(reply: Reply, generation: Generation, message: Message, finish_reason: str | None) -> Json:
    index = generation.call.choice_index
    choice: Json = {
        "index": index,
        "message": chat_message(reply, index, message),
        "logprobs": chat_logprobs(reply, generation, range(len(generation.sample.token_ids))),
        "finish_reason": finish_reason,
        "stop_reason": generation.sample.stop_reason,
        "token_ids": list(generation.sample.token_ids) if reply.show_ids else None,
        "routed_experts": None,
    }
    if reply.show_versions:
        choice["weight_versions"] = generation.weight_version_spans
    return choice


def chat_completion(reply: Reply, choices: list[Json], usage: Json) -> Json:
    return {
        **reply.head("chat.completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": reply.fingerprint,
        "usage": usage,
        "prompt_logprobs": prompt_logprobs(reply),
        "prompt_token_ids": list(reply.prompt_ids) if reply.show_ids else None,
        "prompt_text": reply.prompt_text,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def chat_usage(reply: Reply, completion_tokens: int, reasoning_tokens: int, *, streamed: bool) -> Json:
    details: Json = {"cached_tokens": 0, "created_cache_tokens": 0}
    if not streamed:
        details["multimodal_tokens"] = None
    return {
        "prompt_tokens": len(reply.prompt_ids),
        "total_tokens": len(reply.prompt_ids) + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def chat_first_chunk(reply: Reply, choice_index: int) -> Json:
    choice = {
        "index": choice_index,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    return {
        **reply.head("chat.completion.chunk"),
        "choices": [choice],
        "prompt_token_ids": list(reply.prompt_ids) if reply.show_ids else None,
        "prompt_text": reply.prompt_text,
    }


def chat_delta(reply: Reply, choice_index: int, deltas: Sequence[Delta]) -> Json:
    """The `delta` object; empty when the parsers hold everything back."""
    said: Json = {}
    calls: list[Json] = []
    for delta in deltas:
        if delta.kind != "tool_call":
            said[delta.kind] = said.get(delta.kind, "") + delta.text
        elif delta.call_name is not None:
            call_id = tool_call_id(reply, choice_index, delta.call_index)
            opening = {"id": call_id, "type": "function", "index": delta.call_index}
            calls.append({**opening, "function": {"name": delta.call_name}})
        elif calls and calls[-1]["index"] == delta.call_index:
            function = calls[-1]["function"]
            function["arguments"] = function.get("arguments", "") + delta.text
        else:
            calls.append({"index": delta.call_index, "function": {"arguments": delta.text}})
    if calls:
        said.setdefault("content", None)
        said["tool_calls"] = calls
    return said


def chat_chunk(reply: Reply, generation: Generation, indexes: range, delta: Json, finish_reason: str | None) -> Json:
    """A later chunk: `token_ids` are those of `indexes` and say nothing about where the delta's text is from."""
    choice: Json = {
        "index": generation.call.choice_index,
        "delta": delta,
        "logprobs": chat_logprobs(reply, generation, indexes),
        "finish_reason": finish_reason,
    }
    if finish_reason is not None:
        choice["stop_reason"] = generation.sample.stop_reason
    choice["token_ids"] = [generation.sample.token_ids[at] for at in indexes] if reply.show_ids else None
    if finish_reason is not None and reply.show_versions:
        choice["weight_versions"] = generation.weight_version_spans
    return {**reply.head("chat.completion.chunk"), "choices": [choice]}


def usage_chunk(reply: Reply, kind: str, usage: Json) -> Json:
    return {**reply.head(kind), "choices": [], "usage": usage, "system_fingerprint": reply.fingerprint}


# Text completions


def completion_logprobs(reply: Reply, generation: Generation, indexes: Iterable[int], offset: int) -> Json | None:
    """`offset` is the length of the text before the first of `indexes`, counted in the tokens' own spelling."""
    if reply.logprobs is None:
        return None
    sample = generation.sample
    found: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for at in indexes:
        token_id = sample.token_ids[at]
        token = reply.token(token_id, sample.token_texts[at])
        before = [*reply.prompt_ids, *sample.token_ids[:at]]
        top = top_logprobs(before, token_id, reply.logprobs + 1, reply.tokenizer.vocabulary_size)
        found["text_offset"].append(offset)
        found["token_logprobs"].append(sample.logprobs[at])
        found["tokens"].append(token)
        found["top_logprobs"].append({_top_entry(reply, other, 0.0)["token"]: logprob for other, logprob in top})
        offset += len(token)
    return found


def completion_choice(reply: Reply, generation: Generation, index: int) -> Json:
    sample = generation.sample
    choice: Json = {
        "index": index,
        "text": sample.text,
        "logprobs": completion_logprobs(reply, generation, range(len(sample.token_ids)), 0),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "token_ids": list(sample.token_ids) if reply.show_ids else None,
        "prompt_logprobs": prompt_logprobs(reply),
        "prompt_token_ids": list(reply.prompt_ids) if reply.show_ids else None,
        "routed_experts": None,
    }
    if reply.show_versions:
        choice["weight_versions"] = generation.weight_version_spans
    return choice


def completion(reply: Reply, choices: list[Json], usage: Json) -> Json:
    return {
        **reply.head("text_completion"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": reply.fingerprint,
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_usage(prompt_tokens: int, completion_tokens: int, *, streamed: bool) -> Json:
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    if not streamed:
        usage["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
        usage["completion_tokens_details"] = None
    return usage


def completion_chunk(reply: Reply, generation: Generation, index: int, indexes: range) -> Json:
    sample = generation.sample
    ended = generation.call.finish_reason is not None
    offset = sum(len(reply.token(sample.token_ids[at], sample.token_texts[at])) for at in range(indexes.start))
    choice: Json = {
        "index": index,
        "text": "".join(sample.pieces[indexes.start : indexes.stop]),
        "logprobs": completion_logprobs(reply, generation, indexes, offset),
        "finish_reason": sample.finish_reason if ended else None,
        "stop_reason": sample.stop_reason if ended else None,
        "prompt_token_ids": list(reply.prompt_ids) if reply.show_ids and indexes.start == 0 else None,
        "token_ids": [sample.token_ids[at] for at in indexes] if reply.show_ids else None,
    }
    if ended and reply.show_versions:
        choice["weight_versions"] = generation.weight_version_spans
    return {**reply.head("text_completion"), "choices": [choice]}
