"""Proves, for one model on its engine, which ids follow a sampled turn. Shared by all sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import (
    Bridge,
    CannotContinue,
    Ended,
    Extension,
    Message,
    Missed,
    Renderer,
    rendering_options,
)
from polarq_proxy.exact.control import ControlTokens
from polarq_proxy.exact.meaning import texts_of, tools_digest, tree_digest
from polarq_proxy.exact.template import TemplateBridge, remember, shape

log = logging.getLogger("polarq.proxy")

MAX_FAILURES = 3
"""Comparisons of a rendering with a chat's prompt. A template that writes the date may differ once and not again."""

_Shape = tuple[bytes, bytes, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Suffix:
    """The ids after a sampled turn, up to where the next answer begins."""

    ids: list[int]
    forged: int = 0
    """Control tokens that come out of the new messages' text."""


class Suffixes:
    """`known` knows the model's template by heart and is asked first; the generic way is the fallback."""

    def __init__(
        self,
        render: Renderer,
        known: Bridge | None = None,
        *,
        max_context: Callable[[], int | None] = lambda: None,
        refuse_forged: bool = False,
    ) -> None:
        self._render = render
        self._known = known
        self._generic = TemplateBridge(render)
        self._control = ControlTokens(render)
        self._max_context = max_context
        self._refuse_forged = refuse_forged
        self._doors: dict[bytes, int] = {}
        """How often the comparison failed; 0: it held."""
        self._proven: dict[_Shape, None] = {}
        self._distrusted: dict[_Shape, None] = {}

    @property
    def name(self) -> str:
        return self._render.name

    async def forged(self, messages: Sequence[Message]) -> int:
        """How many control tokens the text of these messages becomes. Raises `CannotContinue`."""
        return await self._control.count(text for message in messages for text in texts_of(message))

    async def after(self, extension: Extension, depth: int) -> Suffix:
        """`depth`: how many turns of this line were continued before. Raises `CannotContinue`."""
        forged = await self.forged(extension.new)
        if forged and self._refuse_forged:
            raise CannotContinue(Missed.FORGED, f"{forged} in the new messages")
        call = extension.call
        calls = "calls" if extension.turn.get("tool_calls") else ""
        cut = "cut" if extension.ended.end_id is None else ""
        roles = (*shape(extension.new), calls, cut)
        key = (tree_digest(rendering_options(call)), tools_digest(call.tools), roles)
        whole = await self._render.ids(call) if is_compared(depth) or key not in self._proven else None
        ids = await self._of_known(extension, key, whole)
        if ids is None:
            ids = await self._generic.suffix(extension)
            if whole is not None and not _ends_with(whole, ids):
                raise CannotContinue(Missed.NOT_PROVEN, "the whole conversation is rendered with another end")
        if not ids:
            raise CannotContinue(Missed.NOT_PROVEN, "nothing follows")
        remember(self._proven, key, None)
        return Suffix(ids, forged)

    async def _of_known(self, extension: Extension, key: _Shape, whole: Sequence[int] | None) -> list[int] | None:
        if self._known is None or key in self._distrusted:
            return None
        try:
            ids = await self._known.suffix(extension)
        except CannotContinue:
            return None
        if whole is None or _ends_with(whole, ids):
            return ids
        line = "%s: its known renderer writes %s otherwise than the engine does: the engine's template is used"
        log.warning(line, self.name, " ".join(filter(None, key[2])))
        remember(self._distrusted, key, None)
        return None

    async def prove_door(self, call: ModelCall, asked: ModelCall | None, ended: Callable[[], Ended]) -> None:
        """Whether the engine, only asked to render, gives the ids that its chat conditioned on: once for each set of
        template options. `asked` is an earlier call with those of `call`, `ended` what came of it. Raises
        `CannotContinue`."""
        key = tree_digest([rendering_options(call), bool(call.tools)])
        failures = self._doors.get(key)
        if failures == 0:
            return
        if asked is None or (failures is not None and failures >= MAX_FAILURES):
            raise CannotContinue(Missed.RENDERED_OTHERWISE, "with these template options, as far as was seen")
        same = await self._render.ids(asked) == ended().prompt_ids
        remember(self._doors, key, 0 if same else (failures or 0) + 1)
        if not same:
            raise CannotContinue(Missed.RENDERED_OTHERWISE, "with these template options")

    def check_room(self, call: ModelCall, tokens: int) -> None:
        """Raises `CannotContinue` when a prompt of so many tokens leaves no room for an answer."""
        limit = self._max_context()
        wanted = [call.options.get(key) for key in ("max_completion_tokens", "max_tokens")]
        room = next((value for value in wanted if isinstance(value, int)), 1)
        if limit is not None and tokens + room > limit:
            raise CannotContinue(Missed.TOO_LONG, f"{tokens} of {limit} tokens, {room} to be sampled")


def is_compared(depth: int) -> bool:
    """Whether this continuation of a line is compared with a rendering of its whole conversation: the first, and then
    ever more seldom (1, 2, 4, 8, ...), so that over all turns the comparisons cost about as much as the new messages
    do. Each new combination of template options, tools and roles is compared besides."""
    return depth & (depth - 1) == 0


def _ends_with(whole: Sequence[int], ids: Sequence[int]) -> bool:
    return bool(ids) and list(whole[-len(ids) :]) == list(ids)
