"""Reading JSON of inference servers: every value may be missing or of another type than agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polarq.contracts.completion import Usage, VersionSpan
from polarq_proxy.faults import CallFault, FaultKind
from polarq_proxy.jsons import NotJson, decode


def tree_of(data: bytes) -> dict[str, Any]:
    """The JSON object of an answer or an event. Raises `CallFault`."""
    try:
        tree = decode(data)
    except NotJson as exc:
        raise CallFault(FaultKind.ENGINE_FAULT, f"the inference server did not answer with JSON: {exc}") from None
    if not isinstance(tree, dict):
        raise CallFault(FaultKind.ENGINE_FAULT, "the inference server's answer is not a JSON object")
    return tree


def error_tree(data: bytes) -> Mapping[str, Any]:
    """The JSON object of an error answer; of anything else its first characters as a message."""
    try:
        tree = decode(data)
    except NotJson:
        return {"message": data[:300].decode("utf-8", "replace")}
    return tree if isinstance(tree, dict) else {}


def ids_of_rendering(data: bytes) -> list[int]:
    """The ids in an answer of /tokenize. Raises `CallFault`."""
    ids = tree_of(data).get("tokens")
    if not isinstance(ids, list) or not all(isinstance(token_id, int) for token_id in ids):
        raise CallFault(FaultKind.ENGINE_FAULT, "the inference server rendered no token ids")
    return ids


def objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def list_or_none(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def index_of(item: Mapping[str, Any], place: int) -> int:
    """A choice's own index, else its place in the list."""
    index = count(item.get("index"))
    return place if index is None else index


def spans_of(value: Any) -> list[VersionSpan] | None:
    """Policy versions over the sampled ids: [{version, start, end}], half-open."""
    if not isinstance(value, list) or not all(isinstance(span, dict) for span in value):
        return None
    try:
        return [VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"]) for span in value]
    except (KeyError, ValueError):
        return None


def usage_of(value: Any) -> Usage | None:
    """SGLang counts thinking beside the other numbers, vLLM (with a reasoning parser) in their details."""
    if not isinstance(value, dict):
        return None
    prompt, sampled = value.get("prompt_tokens_details"), value.get("completion_tokens_details")
    thought = sampled if isinstance(sampled, dict) else value
    return Usage.model_construct(
        prompt_tokens=count(value.get("prompt_tokens")),
        completion_tokens=count(value.get("completion_tokens")),
        cached_tokens=count(prompt.get("cached_tokens")) if isinstance(prompt, dict) else None,
        reasoning_tokens=count(thought.get("reasoning_tokens")),
    )


def status_of(error: Any) -> int:
    """The HTTP status that an error event means; 500 when it does not say."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None
