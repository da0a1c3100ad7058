"""SGLang's JSON, from its source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from polarq.testing.inference.generation import Generation
from polarq.testing.inference.options import ServerOptions
from polarq.testing.inference.parsing import Delta, Message
from polarq.testing.inference.sampling import expected_logprobs, top_logprobs
from polarq.testing.inference.wire import Json, Reply, dumps


def error(message: str, kind: str, param: str | None, status: int) -> Json:
    """The body of an error answer."""
    if status == 401:
        return {"error": message}
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def stream_error(message: str, kind: str, param: str | None, status: int) -> Json:
    """An error event in a stream that has begun."""
    return {"error": error(message, "INTERNAL_SERVER_ERROR" if status == 500 else kind, param, status)}


def logprobs(reply: Reply, generation: Generation, indexes: Iterable[int]) -> Json | None:
    """One entry per sampled id, without the id."""
    if reply.logprobs is None:
        return None
    sample = generation.sample
    entries = []
    for at in indexes:
        token = sample.token_texts[at]
        before = [*reply.prompt_ids, *sample.token_ids[:at]] if reply.logprobs else []
        top = top_logprobs(before, sample.token_ids[at], reply.logprobs, reply.tokenizer.vocabulary_size)
        shown = [("".join(reply.tokenizer.pieces([other])), value) for other, value in top]
        entries.append(
            {
                "token": token,
                "bytes": list(token.encode()),
                "logprob": sample.logprobs[at],
                "top_logprobs": [{"token": t, "bytes": list(t.encode()), "logprob": value} for t, value in shown],
            }
        )
    return {"content": entries}


def finish(generation: Generation) -> Json:
    """Why it ended, as the engine itself says it. An end-of-turn id is a matched stop as well."""
    sample = generation.sample
    match sample.finish_reason:
        case "length":
            return {"type": "length", "length": len(sample.token_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted by AbortReq."}
    matched = sample.stop_reason if sample.stop_reason is not None else sample.token_ids[-1]
    return {"type": "stop", "matched": matched}


def meta_info(options: ServerOptions, reply: Reply, generation: Generation, *, ended: bool, texts: bool = True) -> Json:
    """Beside every answer of the engine itself."""
    sample, count = generation.sample, generation.count
    found: Json = {
        "id": reply.id,
        "finish_reason": finish(generation) if ended else None,
        "prompt_tokens": len(reply.prompt_ids),
        "weight_version": generation.call.weight_versions[-1] if generation.call.weight_versions else "default",
        "num_retractions": 0,
    }
    if options.since(0, 5, 19) and ended:
        found["weight_versions"] = generation.weight_version_spans
    if reply.logprobs is not None:
        pairs: list[list[Any]] = [
            [sample.logprobs[at], sample.token_ids[at], sample.token_texts[at] if texts else None]
            for at in range(count)
        ]
        found |= {"input_token_logprobs": [], "output_token_logprobs": pairs, "output_token_logprobs_length": count}
    found |= {"completion_tokens": count, "cached_tokens": 0, "reasoning_tokens": 0, "e2e_latency": 0.01}
    return found


def input_logprobs(reply: Reply, start: int, *, texts: bool) -> list[list[Any]]:
    """Of the prompt's ids from `start` on; what the engine computes begins behind the first of them, which has none."""
    ids = list(reply.prompt_ids)
    values = [None, *expected_logprobs(ids[: start + 1], ids[start + 1 :])]
    shown = reply.tokenizer.pieces(ids[start:]) if texts else [None] * (len(ids) - start)
    return [[value, token_id, text] for value, token_id, text in zip(values, ids[start:], shown, strict=True)]


def metadata(options: ServerOptions, generation: Generation) -> Json:
    """Of a whole answer; with several choices it is the first one's."""
    versions = generation.call.weight_versions
    told: Json = {"weight_version": versions[-1] if versions else "default"}
    if options.since(0, 5, 19):
        told["weight_versions"] = generation.weight_version_spans
    return told


def usage(prompt_tokens: int, sampled: int, thought: int = 0) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + sampled,
        "completion_tokens": sampled,
        "prompt_tokens_details": None,
        "reasoning_tokens": thought,
    }


def call_id(reply: Reply, choice_index: int, call_index: int) -> str:
    """The same for the same answer to the same prompt."""
    seed = dumps([list(reply.prompt_ids), choice_index, call_index])
    return "call_" + hashlib.sha256(seed).hexdigest()[:24]


def message(reply: Reply, index: int, parsed: Message) -> Json:
    """`content` is never null here."""
    calls = [
        {
            "id": call_id(reply, index, at),
            "index": at,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for at, (name, arguments) in enumerate(parsed.tool_calls)
    ]
    return {
        "role": "assistant",
        "content": parsed.content or "",
        "reasoning_content": parsed.reasoning,
        "tool_calls": calls or None,
    }


def deltas(reply: Reply, choice_index: int, found: Sequence[Delta]) -> list[Json]:
    """The `delta` objects of one step: thinking, text and each part of a call in a chunk of its own."""
    said: list[Json] = []
    for kind, name in (("reasoning", "reasoning_content"), ("content", "content")):
        if text := "".join(delta.text for delta in found if delta.kind == kind):
            said.append({name: text})
    for delta in (delta for delta in found if delta.kind == "tool_call"):
        opening = delta.call_name is not None
        call = {
            "id": call_id(reply, choice_index, delta.call_index) if opening else None,
            "index": delta.call_index,
            "type": "function",
            "function": {"name": delta.call_name, "arguments": "" if opening else delta.text},
        }
        said.append({"tool_calls": [call]})
    return said


def chunk(reply: Reply, choices: list[Json], **more: Any) -> Json:
    return {**reply.head("chat.completion.chunk"), "choices": choices, "usage": None, **more}


def chunk_choice(index: int, delta: Json, **more: Any) -> Json:
    """What is not said is null, not missing."""
    empty: Json = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
    choice: Json = {"index": index, "delta": empty | delta, "logprobs": None}
    return choice | {"finish_reason": None, "matched_stop": None} | more


def completion_logprobs(reply: Reply, generation: Generation, indexes: Iterable[int]) -> Json | None:
    """In columns; text offsets are not counted."""
    if reply.logprobs is None:
        return None
    sample, found = generation.sample, list(indexes)
    return {
        "text_offset": [-1] * len(found),
        "token_logprobs": [sample.logprobs[at] for at in found],
        "tokens": [sample.token_texts[at] for at in found],
        "top_logprobs": [],
    }
