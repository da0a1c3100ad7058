"""Control tokens in the text of messages: a file that an agent reads may hold what looks like a turn's end, and
tokenizers make the real token of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import Renderer

MAX_PROBES = 8
"""Spellings that one call may ask the engine about."""
MAX_REMEMBERED = 1024

_SPELLINGS = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,48}[|\uff5c]>"  # as most models write them
    r"|</?[A-Za-z_][A-Za-z0-9_]{0,23}>"
    r"|\[/?[A-Z][A-Z_]{1,23}\]"
    r"|\]~!?b\[|\]~b\]|\[e~\["
)


class ControlTokens:
    """Knows, for one model, which spellings are tokens of their own."""

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self._known: dict[str, bool] = {}

    async def count(self, texts: Iterable[str]) -> int:
        """How many control tokens these texts become. Raises `CannotContinue`."""
        found: dict[str, int] = {}
        for text in texts:
            for match in _SPELLINGS.finditer(text):
                found[match[0]] = found.get(match[0], 0) + 1
        unknown = [spelling for spelling in found if spelling not in self._known]
        for spelling in unknown[:MAX_PROBES]:
            self._known[spelling] = await self._is_token(spelling)
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        return sum(times for spelling, times in found.items() if self._known.get(spelling))

    async def _is_token(self, spelling: str) -> bool:
        """A control token is one id wherever it stands; words of the vocabulary merge with what is around them."""
        s = spelling
        ids = await self._render.ids(ModelCall([], None, {}, "", prompt=f"{s}{s}a{s} {s} {s}<{s}"))
        return any(
            ids.count(one) == 6 for one, other in pairwise(ids[:3]) if one == other
        )  # a start token may be first
