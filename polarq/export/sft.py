"""`sft`: conversations for supervised training, filtered by rejection sampling (`polarq.sft/1`).

One record per trace: `messages` and `tools` as chat APIs take them, and `reward`, `rollout_id`, `group`, `trace`. An
assistant's message that the policy did not sample in this trace, or that must not be trained on, has `weight` 0 (as in
OpenAI's fine-tuning files). With `ids` also `prompt_ids`, `response_ids` and `loss_mask`: exactly what the engine saw.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from polarq.contracts.rollout import RolloutResult, RolloutState
from polarq.contracts.trajectory import Trace
from polarq.errors import PayloadCorrupt, PayloadMissing
from polarq.export.base import NOTHING_SAMPLED, Group, Record, Skip, needed, why_not
from polarq.export.jsonl import Lines
from polarq.export.replies import sampled_by
from polarq.trainers.rows import written_out

SCHEMA = "polarq.sft/1"
NO_REWARD = "no reward"
BELOW = "reward below the least wanted"
NOT_BEST = "not the best of its group"
TOO_LONG = "too many tokens"
DUPLICATE = "the same conversation as another"
UNCLEAR = "answers of the policy cannot be told from others"


@dataclass(frozen=True, slots=True)
class SftFilters:
    """What makes a rollout good enough to be learned from."""

    min_reward: float | None = None
    best_of_group: int | None = None
    """As many of each group as this, the best by reward and the first of equals. A group is a task's rollouts; where
    some of them are named, these."""
    max_tokens: int | None = None
    """Of prompt and response together, per trace."""
    dedup: bool = True
    ids: bool = False


class Sft(Lines):
    """See the module. Only completed rollouts that a trainer may use are in it."""

    name = "sft"

    def __init__(self, filters: SftFilters) -> None:
        self._filters = filters
        self._known: set[str] = set()
        self._fresh: list[str] = []
        self._left_out: Counter[str] = Counter()
        self._fresh_left_out: Counter[str] = Counter()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": SCHEMA, **asdict(self._filters)}

    def passed_over(self, group: Group) -> Mapping[str, str]:
        if self._filters.best_of_group is None:
            return {}
        usable = []
        for rollout in group.rollouts:
            try:
                verdict = rollout.verdict()
            except (PayloadMissing, PayloadCorrupt):
                continue  # counted when it is read
            if verdict.outcome.trainable and verdict.outcome.state is RolloutState.COMPLETED:
                usable.append((rollout.rollout_id, verdict.reward))
        scored = [(rollout_id, reward) for rollout_id, reward in usable if reward is not None]
        best = sorted(scored, key=lambda pair: -pair[1])[: self._filters.best_of_group]
        return {rollout_id: NOT_BEST for rollout_id, _ in scored if rollout_id not in {one for one, _ in best}}

    def records(self, result: RolloutResult) -> list[Record]:
        least, reward = self._filters.min_reward, None if result.reward is None else result.reward.outcome
        if not result.outcome.trainable or result.outcome.state is not RolloutState.COMPLETED:
            raise Skip(why_not(result.outcome))
        if reward is None and (least is not None or self._filters.best_of_group is not None):
            raise Skip(NO_REWARD)
        if least is not None and reward is not None and reward < least:
            raise Skip(BELOW)
        traces = [trace for trace in written_out(needed(result)).traces if trace.trainable_tokens]
        made, reasons = [], [NOTHING_SAMPLED]
        for trace in traces:
            try:
                made.append(self._record(result, trace))
            except Skip as exc:
                reasons.append(exc.reason)
        if not made:
            raise Skip(reasons[-1])
        self._left_out.update(reasons[1:])
        self._fresh_left_out.update(reasons[1:])
        return made

    def traces_left_out(self) -> Mapping[str, int]:
        return self._left_out

    def _record(self, result: RolloutResult, trace: Trace) -> Record:
        most = self._filters.max_tokens
        if most is not None and len(trace.prompt_ids) + len(trace.response_ids) > most:
            raise Skip(TOO_LONG)
        sampled = sampled_by(trace)
        if sampled is None:
            raise Skip(UNCLEAR)
        learned = [turn is not None and turn.untrainable is None for turn in sampled]
        messages = [_weighed(message, learned=False) for message in trace.prompt_messages]
        messages += [_weighed(m, learned=yes) for m, yes in zip(trace.response_messages, learned, strict=True)]
        record: Record = {"messages": messages, **({"tools": trace.tools} if trace.tools else {})}
        if self._filters.dedup:
            self._once(record)
        if self._filters.ids:
            record |= {
                "prompt_ids": trace.prompt_ids,
                "response_ids": trace.response_ids,
                "loss_mask": trace.loss_mask,
            }
        return record | {
            "reward": trace.reward,
            "group": result.task_id,
            "rollout_id": result.rollout_id,
            "trace": trace.index,
            "schema": SCHEMA,
        }

    def _once(self, record: Record) -> None:
        digest = hashlib.blake2b(msgspec.json.encode(record, order="deterministic"), digest_size=16).hexdigest()
        if digest in self._known:
            raise Skip(DUPLICATE)
        self._known.add(digest)
        self._fresh.append(digest)

    def memory(self) -> dict[str, Any]:
        fresh = {"known": self._fresh, "left_out": self._fresh_left_out}
        self._fresh, self._fresh_left_out = [], Counter()
        return fresh

    def remember(self, memory: Any) -> None:
        self._known.update(memory["known"])
        self._left_out.update(memory["left_out"])


def _weighed(message: dict[str, Any], *, learned: bool) -> dict[str, Any]:
    return message if message.get("role") != "assistant" or learned else {**message, "weight": 0}
