"""`completions`: what the proxy captured, for `polarq rebuild` (`polarq.completions/1`).

A line with a rollout's result (`result`, without its trajectory; `turn_rewards`: seq of a call -> its reward, of those
that have one), then a line per call. A call's prompt is the first
`prompt_shared` ids of what the call `prompt_from` saw and sampled, then `prompt_ids`; its messages are the first
`messages_shared` of those of the same call, then `messages`: a session takes space for its tokens, not for the square
of its turns. `prompt_from` is null where nothing is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from polarq.contracts.completion import Completion
from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import NOTHING_SAMPLED, Record, Skip, problem_of
from polarq.export.jsonl import Lines
from polarq.trajectory.base import turn_rewards
from polarq.trajectory.tree import shared_length

SCHEMA = "polarq.completions/1"
NO_CALLS = "captured calls not in the store"
_SPLIT = {"prompt_ids", "messages"}


class Completions(Lines):
    """See the module. `read` gives the captured calls of a result's attempt."""

    name = "completions"

    def __init__(self, read: Callable[[RolloutResult], Sequence[Completion]]) -> None:
        self._read = read

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": SCHEMA}

    def records(self, result: RolloutResult) -> list[Record]:
        calls = self._read(result)
        if not calls:
            sampled = result.trajectory is not None and result.trajectory.fidelity.calls
            raise Skip(NO_CALLS if sampled else NOTHING_SAMPLED)
        head = result.model_dump(mode="json", exclude={"trajectory", "payload"})
        turns = {} if result.trajectory is None else turn_rewards(result.trajectory)
        told = {str(seq): reward for seq, reward in turns.items()}
        return [{"schema": SCHEMA, "calls": len(calls), "result": head, "turn_rewards": told}, *_packed(calls)]


def _packed(calls: Sequence[Completion]) -> Iterator[Record]:
    earlier: dict[int, Completion] = {}
    last: Completion | None = None
    for call in calls:
        base = earlier.get(call.parent, last) if call.parent is not None else last
        ids, messages = 0, 0
        if base is not None:
            ids = shared_length([*base.prompt_ids, *base.sampled_ids], call.prompt_ids)
            pairs = zip(base.messages, call.messages, strict=False)
            messages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        yield {
            **call.model_dump(mode="json", exclude=_SPLIT),
            "prompt_from": base.seq if base is not None and ids + messages else None,
            "prompt_shared": ids,
            "prompt_ids": call.prompt_ids[ids:],
            "messages_shared": messages,
            "messages": call.messages[messages:],
        }
        earlier[call.seq] = last = call


class Captured(NamedTuple):
    """What `polarq rebuild` builds of."""

    result: RolloutResult
    calls: list[Completion]
    """In order of arrival."""
    turn_rewards: Mapping[int, float] = {}
    """seq of a call -> its reward, of those that have one."""


def read_completions_file(records: Iterable[Record]) -> Iterator[Captured]:
    """Each rollout's, its result without a trajectory. Raises `InvalidInput`."""
    lines = iter(records)
    for head in lines:
        if head.get("schema") != SCHEMA:
            raise InvalidInput("rebuild", [f"this is no file of {SCHEMA} (export --format completions)"])
        try:
            result = RolloutResult.stored(head["result"])
            # Files of before have none.
            turns = {int(seq): _finite(reward) for seq, reward in head.get("turn_rewards", {}).items()}
            calls: dict[int, Completion] = {}
            for _ in range(head["calls"]):
                call = _unpacked(dict(next(lines)), calls)
                if call.seq in calls:
                    raise ValueError(f"seq {call.seq} is there twice")
                calls[call.seq] = call
        except StopIteration:
            raise InvalidInput("rebuild", ["the file ends in the middle of a rollout"]) from None
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
            raise InvalidInput("rebuild", [f"a captured call of the file is not valid: {problem_of(exc)}"]) from None
        yield Captured(result, list(calls.values()), turns)


def _finite(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ValueError(f"turn_rewards: {str(reward)[:40]!r} is not a finite number")
    return float(reward)


def _unpacked(record: Record, earlier: Mapping[int, Completion]) -> Completion:
    base, ids, messages = (record.pop(key) for key in ("prompt_from", "prompt_shared", "messages_shared"))
    if base is not None:
        before = earlier[base]
        if min(ids, messages) < 0:
            raise ValueError("it shares less than nothing with an earlier one")
        record["prompt_ids"] = (before.prompt_ids + before.sampled_ids)[:ids] + record["prompt_ids"]
        record["messages"] = before.messages[:messages] + record["messages"]
    call = Completion.stored(record)
    for name, found in (("prompt_ids", call.prompt_ids), ("sampled_ids", call.sampled_ids)):
        if found and not 0 <= min(found) <= max(found) < 2**31:
            raise ValueError(f"{name} holds something other than token ids")
    return call
