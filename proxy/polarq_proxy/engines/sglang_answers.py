"""SGLang's answers, whole and in events, into the inner form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polarq.contracts.completion import VersionSpan
from polarq_proxy.call import Answer, Choice, ChoiceDelta, Piece
from polarq_proxy.engines.wire import index_of, list_or_none, objects, spans_of, text, usage_of


def answer_of(tree: Mapping[str, Any]) -> Answer:
    """A whole answer of any release."""
    items = objects(tree.get("choices"))
    extra, told = _object(tree.get("sglext")), _object(tree.get("metadata"))
    choices = [_choice(item, place, extra) for place, item in enumerate(items)]
    if len(choices) == 1 and choices[0].weight_versions is None:
        choices[0].weight_versions = spans_of(told.get("weight_versions"))  # with several choices, only the first's
    prompt_ids = list_or_none(extra.get("input_ids"))
    if prompt_ids is None and items:
        prompt_ids = list_or_none(items[0].get("prompt_token_ids"))
    return Answer(choices, prompt_ids, usage_of(tree.get("usage")), text(tree.get("model")))


def piece_of(tree: Mapping[str, Any]) -> Piece:
    """One event of a stream. The event without choices that brings the ids becomes one change per choice."""
    items = objects(tree.get("choices"))
    changes = [_delta(item, place) for place, item in enumerate(items)]
    prompt_ids = next((ids for item in items if (ids := list_or_none(item.get("prompt_token_ids")))), None)
    extra = _object(tree.get("sglext"))
    for index, ids in enumerate(list_or_none(extra.get("output_ids")) or ()):
        changes.append(ChoiceDelta(index, ids=list_or_none(ids)))
    prompt_ids = list_or_none(extra.get("input_ids")) or prompt_ids
    return Piece(changes, prompt_ids, usage_of(tree.get("usage")), text(tree.get("model")) or None)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _choice(item: dict[str, Any], place: int, extra: Mapping[str, Any]) -> Choice:
    index = index_of(item, place)
    meta = _object(item.get("meta_info"))
    pairs = list_or_none(meta.get("output_token_logprobs"))
    ids = _given_ids(item, place, extra)
    if ids is None and pairs is not None:
        ids = [pair[1] if isinstance(pair, list) and len(pair) > 1 else None for pair in pairs]
    entries = _entries(item)
    return Choice(
        index=index,
        message=_message(item),
        ids=ids,
        logprobs=entries if pairs is None else _paired(pairs, ids or [], entries),
        finish_reason=_finish_reason(item, meta),
        stop_reason=_stop(item),
        weight_versions=_meta_spans(meta),
    )


def _given_ids(item: Mapping[str, Any], place: int, extra: Mapping[str, Any]) -> list[Any] | None:
    """The sampled ids outside of `meta_info`, where this release writes them."""
    for name in ("response_token_ids", "token_ids"):
        if isinstance(item.get(name), list):
            return list_or_none(item[name])
    lists = list_or_none(extra.get("output_ids")) or []
    return list_or_none(lists[place]) if place < len(lists) else None


def _paired(pairs: list[Any], ids: Sequence[Any], entries: list[Any] | None) -> list[dict[str, Any]]:
    """`meta_info`'s pairs as entries. A pair for another id than the one sampled there is no log-probability of it."""
    shown = entries if entries is not None and len(entries) == len(pairs) else [{}] * len(pairs)
    found = []
    for position, (pair, entry) in enumerate(zip(pairs, shown, strict=True)):
        logprob, token_id, *rest = pair if isinstance(pair, list) and len(pair) > 1 else (None, None)
        same = position >= len(ids) or ids[position] == token_id
        token = text(rest[0]) if rest else ""
        known = entry if isinstance(entry, dict) and entry else {"token": token, "bytes": None, "top_logprobs": []}
        found.append({**known, "logprob": logprob if same else None})
    return found


def _entries(item: Mapping[str, Any]) -> list[Any] | None:
    """Log-probabilities as chat answers write them; those of bare completions come in columns."""
    logprobs = item.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list):
        return list_or_none(logprobs.get("content"))
    tokens = list_or_none(logprobs.get("tokens")) or []
    return [
        {"token": tokens[at] if at < len(tokens) else "", "logprob": value, "bytes": None, "top_logprobs": []}
        for at, value in enumerate(values)
    ]


def _meta_spans(meta: Mapping[str, Any]) -> list[VersionSpan] | None:
    """A lone `weight_version` is only the last one: whether it holds for the whole answer is asked around the call."""
    return spans_of(meta.get("weight_versions"))


def _finish_reason(item: Mapping[str, Any], meta: Mapping[str, Any]) -> str | None:
    """A text in chat answers, an object in `meta_info`; some releases wrote the object in both."""
    for given in (item.get("finish_reason"), meta.get("finish_reason")):
        reason = given.get("type") if isinstance(given, dict) else given
        if isinstance(reason, str) and reason:
            return reason
    return None


def _stop(item: Mapping[str, Any]) -> str | int | None:
    stop = item.get("matched_stop")
    return stop if isinstance(stop, (str, int)) else None


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant message in the inner form: nothing null but content, and that only beside something else."""
    given = item.get("message")
    if not isinstance(given, dict):
        return {"role": "assistant", "content": text(item.get("text"))}
    said = {key: value for key, value in given.items() if value is not None and value != []}
    calls = objects(said.get("tool_calls"))
    if calls:
        said["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    if not said.get("content"):
        said["content"] = None if calls or said.get("reasoning_content") else ""
    return {**said, "role": "assistant"}


def _delta(item: dict[str, Any], place: int) -> ChoiceDelta:
    given = item.get("delta")
    said = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    bare = isinstance(item.get("text"), str)
    if bare:
        said = {"content": item["text"]}
    return ChoiceDelta(
        index=index_of(item, place),
        delta=said,
        ids=list_or_none(item.get("token_ids")) if bare else None,  # a chat's come whole at its end
        logprobs=_entries(item),
        finish_reason=_finish_reason(item, {}),
        stop_reason=_stop(item),
    )
