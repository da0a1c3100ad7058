"""What was refused: who was asked for and how often, of a bounded size whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

MOST_TARGETS = 100
MOST_CHARS = 300


class Denials:
    """Counts by target, `host:port` as it was asked for; `more` counts refusals of targets beyond the first hundred."""

    def __init__(self, counts: Mapping[str, int] | None = None, more: int = 0) -> None:
        self.counts: dict[str, int] = dict(counts or {})
        self.more = more
        self.on_change: Callable[[], None] | None = None
        self._changed: set[str] = set()

    def note(self, target: str, times: int = 1) -> None:
        target = "".join(char if char.isprintable() else "?" for char in target[:MOST_CHARS])
        if target in self.counts or len(self.counts) < MOST_TARGETS:
            self.counts[target] = self.counts.get(target, 0) + times
            self._changed.add(target)
        else:
            self.more += times
        if self.on_change is not None:
            self.on_change()

    def add(self, other: Denials) -> None:
        for target, count in other.counts.items():
            self.note(target, count)
        self.more += other.more

    def news(self) -> dict[str, int]:
        """The counts that have changed since this was last asked."""
        changed, self._changed = self._changed, set()
        return {target: self.counts[target] for target in changed}
