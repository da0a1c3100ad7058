"""Breaks: calls that go on with a conversation, by its messages, but not with its ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
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


@dataclass(slots=True)
class _Asked:
    """Calls of one conversation that ask the same as their last message, after as many others."""

    latest: Completion
    by_answer: dict[Hashable, Completion] = field(default_factory=dict)
    """The latest with this answer."""


def continued(completions: Sequence[Completion]) -> list[tuple[Completion, Completion]]:
    """Pairs of a call and the earlier one that its messages continue: the same opening (up to the first message of a
    user), the same last message, then an answer. Where several fit, the one with most messages, then the one that gave
    that very answer, else the latest.
    """
    pairs = []
    # By opening, number of messages and the last of them: found at once, however many calls and conversations.
    asked: dict[Hashable, _Asked] = {}
    lengths: defaultdict[Hashable, set[int]] = defaultdict(set)
    for completion in completions:
        messages = completion.messages
        if not messages:
            continue
        opening = _frozen(_opening(messages))
        if (earlier := _continued_by(messages, opening, asked, lengths[opening])) is not None:
            pairs.append((completion, earlier))
        if completion.sampled_ids:
            lengths[opening].add(len(messages))
            here = asked.setdefault((opening, len(messages), _frozen(messages[-1])), _Asked(completion))
            here.latest = here.by_answer[_answer(completion.reply)] = completion
    return pairs


def _continued_by(
    messages: Sequence[dict[str, Any]], opening: Hashable, asked: Mapping[Hashable, _Asked], lengths: set[int]
) -> Completion | None:
    for length in range(len(messages) - 1, 0, -1):
        if length in lengths and messages[length].get("role") == "assistant":
            fit = asked.get((opening, length, _frozen(messages[length - 1])))
            if fit is not None:
                return fit.by_answer.get(_answer(messages[length]), fit.latest)
    return None


def _answer(message: dict[str, Any]) -> Hashable:
    return _frozen([message.get("content"), message.get("tool_calls")])


def _frozen(value: Any) -> Hashable:
    """JSON as a key: equal for equal values."""
    if isinstance(value, dict):
        return frozenset((name, _frozen(item)) for name, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _opening(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    users = (place for place, message in enumerate(messages) if message.get("role") == "user")
    return messages[: next(users, len(messages)) + 1]
