"""Sandboxes that wait for a rollout: which go first when there is no room for more."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from polarq.topology.runtimes import WarmPoolSection
from polarq_worker.warm.members import Member
from polarq_worker.warm.recipe import Recipe

_REMEMBERED = 1000
"""Recipes of which it is known when they were last asked for."""


class Idle:
    """One node's. `coming` answers the recipes of those that will wait, `end` gets what is given up."""

    def __init__(
        self, settings: WarmPoolSection, coming: Callable[[], Sequence[Recipe]], end: Callable[[Member], None]
    ) -> None:
        self._settings = settings
        self._coming = coming
        self._end = end
        self._members: dict[str, deque[Member]] = {}
        """By recipe, the longest waiting first."""
        self._used_at: dict[str, float] = {}
        """By recipe: when a rollout last asked for one."""

    def __len__(self) -> int:
        return sum(map(len, self._members.values()))

    def counts(self) -> Counter[str]:
        """By recipe."""
        return Counter({key: len(members) for key, members in self._members.items()})

    def note_use(self, recipe: Recipe) -> None:
        self._used_at.pop(recipe.key, None)
        self._used_at[recipe.key] = now()
        while len(self._used_at) > _REMEMBERED:
            del self._used_at[next(iter(self._used_at))]

    def put(self, member: Member) -> None:
        member.idle_since = now()
        self._members.setdefault(member.recipe.key, deque()).append(member)

    def pop(self, recipe: Recipe) -> Member | None:
        if (members := self._members.get(recipe.key)) is None:
            return None
        member = members.popleft()
        if not members:
            del self._members[recipe.key]
        return member

    def tidy(self, *, all_of_it: bool = False) -> None:
        """Gives up what has waited for too long, or everything."""
        oldest = now() - self._settings.idle_s
        for members in list(self._members.values()):
            for member in [one for one in members if all_of_it or one.idle_since < oldest]:
                self._give_up(member)

    def has_room(self, recipe: Recipe, needed: Mapping[str, int]) -> bool:
        """Whether one more may wait; gives up ones that are needed less, of the recipe that was unused longest."""
        settings = self._settings
        if settings.idle_memory_mb is not None and recipe.memory_mb > settings.idle_memory_mb:
            return False
        while not self._fits(recipe):
            spare = [key for key, members in self._members.items() if len(members) > needed.get(key, 0)]
            if not spare or not settings.max_idle:
                return False
            self._give_up(self._members[min(spare, key=lambda key: self._used_at.get(key, 0.0))][0])
        return True

    def _fits(self, recipe: Recipe) -> bool:
        settings = self._settings
        waiting = [member.recipe for members in self._members.values() for member in members]
        waiting += self._coming()
        if len(waiting) >= settings.max_idle:
            return False
        if settings.idle_memory_mb is None:
            return True
        return sum(one.memory_mb for one in waiting) + recipe.memory_mb <= settings.idle_memory_mb

    def _give_up(self, member: Member) -> None:
        members = self._members[member.recipe.key]
        members.remove(member)
        if not members:
            del self._members[member.recipe.key]
        self._end(member)


def now() -> float:
    """The loop's clock, in seconds."""
    return asyncio.get_running_loop().time()
