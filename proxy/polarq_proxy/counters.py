"""What this proxy did since it started, for /health."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    calls: int = 0
    """Model calls that were recorded."""
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    untrainable: int = 0
    """Recorded calls that cannot be trained on."""
    untrainable_by: Counter[str] = field(default_factory=Counter)
    """The same, by reason."""
    side: Counter[str] = field(default_factory=Counter)
    """Recorded calls beside the task, by kind."""
    breaks: int = 0
    """Calls that go on from an earlier one by their messages, and do not start with its tokens."""
    replays: int = 0
    """Calls that were answered without sampling, because they repeated one."""
    aborted: int = 0
    """Calls that the harness or the engine ended early."""
    continued: int = 0
    """Recorded calls that were cut while they were sampled and went on from there, however often."""
    exact: Counter[str] = field(default_factory=Counter)
    """In exact mode: how prompts were made, or why a conversation was not continued by its ids."""
    forged: int = 0
    """Control tokens that messages' own text brought into prompts, in exact mode."""
    in_flight: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that were not answered, by kind."""

    def snapshot(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "sampled_tokens": self.sampled_tokens,
            "prompt_tokens": self.prompt_tokens,
            "untrainable": self.untrainable,
            "breaks": self.breaks,
            "side": dict(self.side),
            "replays": self.replays,
            "aborted": self.aborted,
            "continued": self.continued,
            "in_flight": self.in_flight,
            "exact": dict(self.exact),
            "forged": self.forged,
            "errors": dict(self.errors),
        }
