"""What many sessions begin with, held once.

Rollouts of one harness begin with the same system prompt, those of one task with the same question too: tens of
kilobytes for each session that is remembered, if each held its own. The first call of a conversation looks here for the
longest beginning that an earlier one had, and goes on with those very objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from polarq.store.prefixes import Message, plain
from polarq.store.token_text import Line

REMEMBERED = 8
"""First calls that later ones are compared with: those of a few tasks that run side by side."""
LEAST_BYTES = 4096
"""Less is not worth an object of its own."""


class Beginnings:
    """The first calls of the sessions that came last."""

    def __init__(self) -> None:
        self._lines: deque[Line] = deque(maxlen=REMEMBERED)
        self._messages: deque[Sequence[Message]] = deque(maxlen=REMEMBERED)

    def line(self, line: Line) -> Line:
        """The same ids, with what an earlier session had of them in its own parts."""
        text = line.text
        found = [(known, known.common(text, 0, len(text))) for known in self._lines]
        known, border = max(found, key=lambda entry: entry[1].length, default=(None, None))
        if known is None or border is None or border.length < LEAST_BYTES:
            self._lines.append(line)
            return line
        begun = known.before(border)
        if begun.length < known.length:
            # From now on it is this common beginning that later sessions find, as one object.
            self._lines.remove(known)
            self._lines.append(begun)
        rest = text[begun.length + 1 :]
        return begun.with_part(rest, line.count - begun.count) if rest else begun

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages; those at the beginning that an earlier session had too are that session's own."""
        best: Sequence[Message] = ()
        unmixed = all(map(plain, messages))
        for known in self._messages if unmixed else ():
            length = 0
            for mine, other in zip(known, messages, strict=False):
                if mine != other:
                    break
                length += 1
            if length > len(best):
                best = known[:length]
            if len(best) == len(messages):
                break
        if len(best) < len(messages) and unmixed:
            self._messages.append(list(messages))
        return [*best, *messages[len(best) :]]
