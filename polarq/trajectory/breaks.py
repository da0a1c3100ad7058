"""Breaks: calls that go on with a conversation, by its messages, but not with its ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarq.contracts.completion import Completion
from polarq.contracts.trajectory import Break
from polarq.trajectory.images import alike_until
from polarq.trajectory.tree import shared_length


def find_breaks(completions: Sequence[Completion]) -> list[Break]:
    """Calls (in request order) that visibly continue an earlier one and do not begin with what it saw and sampled."""
    breaks = []
    for completion, earlier in continued(completions):
        whole = [*earlier.prompt_ids, *earlier.sampled_ids]
        goes_on = completion.prompt_ids[: len(whole)] == whole
        same_ids = len(whole) if goes_on else shared_length(whole, completion.prompt_ids)
        shared = alike_until(earlier.images, completion.images, same_ids)
        if shared < len(whole):
            cause = _cause(shared, same_ids, earlier)
            breaks.append(Break(seq=completion.seq, position=shared, cause=cause, continues=earlier.seq))
    return breaks


def _cause(shared: int, same_ids: int, earlier: Completion) -> str:
    if shared < same_ids:
        return "another picture"
    return "sampled tokens re-encoded" if shared >= len(earlier.prompt_ids) else "prompt re-rendered"


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Calls whose messages begin alike: with the same ones up to the first of a user."""

    opening: Sequence[dict[str, Any]]
    by_length: defaultdict[int, list[Completion]] = field(default_factory=lambda: defaultdict(list))
    """The calls, by their number of messages."""


def continued(completions: Sequence[Completion]) -> list[tuple[Completion, Completion]]:
    """Pairs of a call and the earlier one that its messages continue: the same opening, the same last message, then
    an answer. Where several fit, the one with most messages, then the one that gave that very answer, else the latest.
    """
    pairs = []
    # By the text that ends the opening: there may be as many conversations as calls.
    conversations: defaultdict[str, list[_Conversation]] = defaultdict(list)
    for completion in completions:
        if not completion.messages:
            continue
        opening = _opening(completion.messages)
        begun = conversations[_text(opening[-1])]
        known = next((one for one in begun if one.opening == opening), None)
        if known is None:
            begun.append(known := _Conversation(opening))
        if (earlier := _continued_by(completion, known.by_length)) is not None:
            pairs.append((completion, earlier))
        if completion.sampled_ids:
            known.by_length[len(completion.messages)].append(completion)
    return pairs


def _continued_by(completion: Completion, by_length: Mapping[int, Sequence[Completion]]) -> Completion | None:
    messages = completion.messages
    for length in range(len(messages) - 1, 0, -1):
        if messages[length].get("role") == "assistant":
            fit = [one for one in by_length.get(length, ()) if one.messages[-1] == messages[length - 1]]
            if fit:
                return max(fit, key=lambda earlier: (_answered(earlier.reply, messages[length]), earlier.seq))
    return None


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)


def _answered(reply: dict[str, Any], message: dict[str, Any]) -> bool:
    return all(message.get(key) == reply.get(key) for key in ("content", "tool_calls"))


def _opening(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    users = (place for place, message in enumerate(messages) if message.get("role") == "user")
    return messages[: next(users, len(messages)) + 1]
