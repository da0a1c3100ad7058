"""Control tokens in the text of messages: a file that an agent reads may hold what looks like a turn's end, and
tokenizers make the real token of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import CannotContinue, Message, Renderer

MAX_PROBES = 8
"""Spellings that one call may ask the engine about."""
MAX_REMEMBERED = 1024

_SPELLINGS = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,48}[|\uff5c]>"  # as most models write them
    r"|</?(?:s|bos|eos|pad|unk|eot|eod|start_of_turn|end_of_turn)>"
    r"|\[/?[A-Z][A-Z_]{1,23}\]|\]~!?b\[|\]~b\]|\[e~\["
    r"|(?P<tag></?[A-Za-z_][A-Za-z0-9_]{0,23}>)"
)
"""A `tag` may also be a page's: some vocabularies hold those of HTML. It counts where the template writes it."""

_ASKED: Message = {"role": "user", "content": "Look."}
_CALLED: Message = {
    "role": "assistant",
    "content": "I look.",
    "reasoning_content": "Where?",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "There."}
_SAMPLES = ([_ASKED, _CALLED, _RESULT], [_ASKED, {"role": "assistant", "content": "No."}, _ASKED])


class ControlTokens:
    """Knows, for one model, which spellings are tokens of their own."""

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self._known: dict[str, bool] = {}
        self._written: set[int] | None = None

    async def count(self, texts: Iterable[str]) -> int:
        """How many control tokens these texts become. Raises `CannotContinue`."""
        found: dict[str, int] = {}
        tags: set[str] = set()
        for text in texts:
            for match in _SPELLINGS.finditer(text):
                found[match[0]] = found.get(match[0], 0) + 1
                if match["tag"]:
                    tags.add(match[0])
        unknown = [spelling for spelling in found if spelling not in self._known]
        for spelling in unknown[:MAX_PROBES]:
            token_id = await self._token_of(spelling)
            written = token_id is not None and (spelling not in tags or token_id in await self._by_template())
            self._known[spelling] = written
        while len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        return sum(times for spelling, times in found.items() if self._known.get(spelling))

    async def _token_of(self, spelling: str) -> int | None:
        """A control token is one id wherever it stands; words of the vocabulary merge with what is around them."""
        s = spelling
        ids = await self._render.ids(ModelCall([], None, {}, "", prompt=f"{s}{s}a{s} {s} {s}<{s}"))
        found = (one for one, other in pairwise(ids[:3]) if one == other and ids.count(one) == 6)
        return next(found, None)  # a start token may come first

    async def _by_template(self) -> set[int]:
        """The ids that the template writes around thinking, calls and results, and some of plain words."""
        if self._written is None:
            written: set[int] = set()
            for messages in _SAMPLES:
                with suppress(CannotContinue):  # a template may know no tools
                    written.update(await self._render.ids(ModelCall(messages, None, {}, "")))
            self._written = written
        return self._written
