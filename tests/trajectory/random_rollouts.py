"""Random rollouts for tests: calls as a harness, its sub-agents and an engine bring them about, over few ids so that
much is alike by chance."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

from polarq.contracts import Completion, CompletionLabel, VersionSpan
from polarq.trajectory.images import images_of, placed
from tests.trajectory.calls import NOW, call
from tests.trajectory.pictures import PAD, shown

AGENTS = ("main", "sub")


def rollout(seed: int, most: int = 14) -> list[Completion]:
    """Calls that go on, fork, are asked again, drift at any place, begin anew (with the same agent or another one),
    overlap, are cut at their length, fail, break off, and see pictures, under one policy or several."""
    return _Rollout(random.Random(seed)).calls(most)


class _Rollout:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._pictures: dict[int, list[bytes]] = {}
        """seq -> those of its prompt, in order."""

    def calls(self, most: int) -> list[Completion]:
        made: list[Completion] = []
        for seq in range(self._chance.randint(1, most)):
            prompt, pictures, messages = self._asked(made, seq)
            self._pictures[seq] = pictures
            images = placed(images_of([shown(*pictures)]), prompt, PAD)
            sampled = self._ids(4)
            more = {"messages": messages, "images": images, **self._sampled(sampled), **self._trouble(seq, sampled)}
            made.append(call(seq, prompt, sampled, **more))
        return made

    def _asked(self, made: list[Completion], seq: int) -> tuple[list[int], list[bytes], list[dict[str, Any]]]:
        chance = self._chance
        anew = [{"role": "system", "content": chance.choice(AGENTS)}, {"role": "user", "content": str(chance.random())}]
        if not made or (way := chance.random()) > 0.85:
            return [chance.randrange(4), *self._ids(3)], [], anew
        before = made[-1] if chance.random() < 0.6 else chance.choice(made)
        pictures = list(self._pictures[before.seq])
        if way < 0.1:
            return before.prompt_ids, pictures, before.messages
        seen = [*before.prompt_ids, *before.sampled_ids]
        new = [{"role": "assistant", "content": "y"}, {"role": "user", "content": str(seq)}]
        if way < 0.25:
            place = chance.randrange(len(seen))
            seen[place] = (seen[place] + 1) % 4
        elif pictures and way < 0.35:
            pictures[chance.randrange(len(pictures))] = chance.choice((b"a", b"b"))
        suffix = self._ids(3)
        if chance.random() < 0.25:
            suffix = [chance.randrange(4), *[PAD] * chance.randint(1, 2), chance.randrange(4)]
            pictures.append(chance.choice((b"a", b"b")))
        return [*seen, *suffix], pictures, [*before.messages, *new]

    def _sampled(self, sampled: list[int]) -> dict[str, Any]:
        length, chance = len(sampled), self._chance
        cut = chance.randint(0, length)
        spans = [VersionSpan(version="1", start=0, end=cut), VersionSpan(version="2", start=cut, end=length)]
        return {
            "logprobs": [-chance.random() for _ in sampled],
            "finish_reason": chance.choice(("stop", "stop", "tool_calls", "length")),
            "weight_versions": chance.choice(([], [VersionSpan(version="1", start=0, end=length)], spans)),
        }

    def _trouble(self, seq: int, sampled: list[int]) -> dict[str, Any]:
        chance, more = self._chance, dict[str, Any]()
        if chance.random() < 0.2:
            more["requested_at"] = NOW + timedelta(seconds=max(0, seq - 1))
        kind = chance.random()
        if kind < 0.06 and sampled:
            place = chance.randrange(len(sampled))
            values = [None if at == place else -0.5 for at in range(len(sampled))]
            more |= {"untrainable": f"the log-probability at position {place} is missing", "logprobs": values}
        elif kind < 0.1:
            more |= {"incomplete": True, "finish_reason": None}
        elif kind < 0.14:
            more["label"] = CompletionLabel.SIDE
        elif kind < 0.18:
            more |= {"label": CompletionLabel.ABORTED, "finish_reason": "abort", "untrainable": "aborted"}
        return more

    def _ids(self, most: int) -> list[int]:
        return [self._chance.randrange(4) for _ in range(self._chance.randint(0, most))]
