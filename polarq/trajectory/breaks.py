"""Breaks: calls that go on with a conversation, by its messages, but not with its ids."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
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
        same_ids = shared_length(whole, completion.prompt_ids)
        shared = alike_until(earlier.images, completion.images, same_ids)
        if shared < len(whole):
            cause = _cause(shared, same_ids, earlier)
            breaks.append(Break(seq=completion.seq, position=shared, cause=cause, continues=earlier.seq))
    return breaks


def _cause(shared: int, same_ids: int, earlier: Completion) -> str:
    if shared < same_ids:
        return "another picture"
    return "sampled tokens re-encoded" if shared >= len(earlier.prompt_ids) else "prompt re-rendered"


def continued(completions: Sequence[Completion]) -> list[tuple[Completion, Completion]]:
    """Pairs of a call and the earlier one that its messages continue: the same opening, the same last message, then
    an answer. Where several fit, the one that gave that very answer, else the latest."""
    pairs = []
    conversations: defaultdict[str, list[Completion]] = defaultdict(list)
    for completion in completions:
        if not completion.messages:
            continue
        so_far = conversations[_opening(completion.messages)]
        if (earlier := _continued_by(completion, so_far)) is not None:
            pairs.append((completion, earlier))
        if completion.sampled_ids:
            so_far.append(completion)
    return pairs


def _continued_by(completion: Completion, so_far: Sequence[Completion]) -> Completion | None:
    messages = completion.messages

    def continues(earlier: Completion) -> bool:
        length = len(earlier.messages)
        return (
            length < len(messages)
            and messages[length].get("role") == "assistant"
            and messages[length - 1] == earlier.messages[-1]
        )

    def how_well(earlier: Completion) -> tuple[int, bool, int]:
        length = len(earlier.messages)
        return length, _answered(earlier.reply, messages[length]), earlier.seq

    return max(filter(continues, so_far), key=how_well, default=None)


def _answered(reply: dict[str, Any], message: dict[str, Any]) -> bool:
    return all(message.get(key) == reply.get(key) for key in ("content", "tool_calls"))


def _opening(messages: Sequence[dict[str, Any]]) -> str:
    """All up to the first message of a user: what tells one conversation from another."""
    opening = []
    for message in messages:
        opening.append(message)
        if message.get("role") == "user":
            break
    return json.dumps(opening, sort_keys=True)
