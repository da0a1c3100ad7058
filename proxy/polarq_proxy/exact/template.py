"""The generic way: what any chat template puts after an assistant's turn, found out by rendering.

The new messages are rendered twice, each time behind another small made-up conversation whose last turn makes the
same tool calls. What the two have in common at their end is what the template writes after a turn whatever came before
it: the turn's close, the new messages, and the opening of the answer. So nothing is assumed about roles, closes or
tokens, messages are always rendered together and never alone, and the cut is between ids, not between letters.
(After the dummy-prefix method of Miles and verl, with two prefixes instead of one: a template that treats the turn
before a user's message otherwise than the last one, as Qwen3's does, has no common prefix but still a common end.)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from polarq_proxy.call import ModelCall
from polarq_proxy.exact.base import CannotContinue, Extension, Message, Missed, Renderer, rendering_options
from polarq_proxy.exact.branches import packed, unpacked
from polarq_proxy.exact.meaning import tools_digest, tree_digest

MAX_REMEMBERED = 1024

_ITEM = len(packed((0,)))
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class _Past:
    """A made-up conversation. No two share a text, least of all its last token."""

    system: str
    user: str
    thinking: str
    answer: str


_PASTS = (
    _Past("Answer briefly.", "Name a colour.", "An easy one.", "red"),
    _Past("You count things", "How many days has a week", "Let me count them", "seven"),
)
_OTHER_ANSWER = _Past(_PASTS[0].system, _PASTS[0].user, _PASTS[1].thinking, _PASTS[1].answer)
"""The first past with the second's answer: what these two have in common at their ends begins where an answer ends."""
_STUB: tuple[Message, ...] = ({"role": "user", "content": "Go on."},)


@dataclass(frozen=True, slots=True)
class _Closing:
    """What stands after a turn that is plain text."""

    fixed: list[int]
    """Whatever is next. Empty where the template closes no turn and the next opener does."""
    last: list[int]
    """When an answer is next. Empty where the template refuses that."""


class TemplateBridge:
    """For one renderer; shared by all sessions."""

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self._closings: dict[bytes, _Closing] = {}
        self._call_ends: dict[tuple[bytes, int], list[int]] = {}
        self._needs_tools: dict[tuple[bytes, bytes, tuple[str, ...]], bool] = {}

    async def suffix(self, extension: Extension) -> list[int]:
        calls = _calls_of(extension.turn)
        common = await self._common(extension, calls)
        if calls:
            return await self._after_calls(extension, calls, common)
        return _joined(extension, common, (await self._closing(extension.call)).fixed)

    async def _common(self, extension: Extension, calls: Sequence[Message]) -> list[int]:
        """The common end of both renderings. Where the tools do not show in it, they are left out from then on."""
        call, new = extension.call, extension.new
        key = (tree_digest(rendering_options(call)), tools_digest(call.tools), (*shape(new), "calls" if calls else ""))
        with_tools = self._needs_tools.get(key)
        if with_tools is not None:
            return await self._after(call, calls, new, tools=with_tools, proven=True)
        common = await self._after(call, calls, new, tools=bool(call.tools))
        with_tools = False
        if call.tools:
            try:
                with_tools = await self._after(call, calls, new, tools=False) != common
            except CannotContinue:
                with_tools = True  # a template may refuse calls of tools that it was not told of
        remember(self._needs_tools, key, with_tools)
        return common

    async def _after(
        self, call: ModelCall, calls: Sequence[Message], new: Sequence[Message], *, tools: bool, proven: bool = False
    ) -> list[int]:
        """What renderings of different pasts have in common from their ends back. Raises `CannotContinue` when that
        does not begin at the end of the answer, which is looked at unless it is `proven`."""
        pasts = _PASTS if proven else (*_PASTS, _OTHER_ANSWER)
        first, *others = [
            packed(ids)
            for ids in await asyncio.gather(
                *(self._render.ids(_rendering(call, past, calls, new, tools=tools)) for past in pasts)
            )
        ]
        counts = [common_end(first, other) for other in others]
        if not counts[0]:
            raise CannotContinue(Missed.LOOKS_AHEAD, "no end in common behind different pasts")
        if counts[0] != counts[-1]:
            raise CannotContinue(Missed.LOOKS_AHEAD, "what came before a turn shows after it")
        if counts[0] * _ITEM == len(first):
            raise CannotContinue(Missed.NOT_PROVEN, "the template leaves the past out")
        return unpacked(first[-counts[0] * _ITEM :])

    async def _closing(self, call: ModelCall) -> _Closing:
        key = _look(call)
        closing = self._closings.get(key)
        if closing is None:
            stub = await self._after(call, (), _STUB, tools=False)
            try:
                last = await self._after(call, (), (), tools=False)
            except CannotContinue:
                last = []  # a template may refuse to open an answer after an answer
            closing = _Closing(stub[: _common_start(stub, last)], last)
            remember(self._closings, key, closing)
        return closing

    async def _after_calls(self, extension: Extension, calls: Sequence[Message], common: list[int]) -> list[int]:
        """`common` begins within the last call, with what of its end does not depend on its arguments. Where that ends
        shows when the same turn is the last one: what both begin with belongs to the calls and their turn's close."""
        call, key = extension.call, (_look(extension.call), len(calls))
        known = self._call_ends.get(key)
        if known is not None:
            try:
                return await self._joined_calls(extension, common, known)
            except CannotContinue:
                pass  # found out with calls of other names and ids, which may show at a call's end
        found = await self._after(call, calls, (), tools=bool(call.tools))
        joined = await self._joined_calls(extension, common, found)
        remember(self._call_ends, key, found)
        return joined

    async def _joined_calls(self, extension: Extension, common: list[int], last: list[int]) -> list[int]:
        """`last`: what stands after the beginning of the last call's end when the turn is the last one."""
        fixed = common[: _common_start(common, last)]
        if extension.ended.end_id in fixed:
            return _joined(extension, common, fixed)
        # A turn that has no close yet, or one that is the next opener: only a turn without calls shows where it begins.
        closing = await self._closing(extension.call)
        count = len(last) - len(closing.last)
        if not closing.last or last[count:] != closing.last:
            raise CannotContinue(Missed.NOT_PROVEN, "turns with tool calls are closed otherwise than others")
        if len(fixed) < count:
            raise CannotContinue(Missed.LOOKS_AHEAD, "the close of a turn with tool calls depends on what follows")
        return _joined(extension, common[count:], closing.fixed)


def _look(call: ModelCall) -> bytes:
    """What a template's own text depends on, beside the messages."""
    return tree_digest([rendering_options(call), _has_system(call)])


def _joined(extension: Extension, common: list[int], fixed: list[int]) -> list[int]:
    """`common`, which begins at a turn's close, without what of it was sampled."""
    end_id = extension.ended.end_id
    if common[: len(fixed)] != fixed:
        raise CannotContinue(Missed.LOOKS_AHEAD, "a turn's close depends on what follows")
    if end_id is None:
        return common  # cut off in the middle: the template's close is added
    if end_id in extension.ended.sampled_ids[:-1]:
        raise CannotContinue(Missed.NOT_PROVEN, "the model went on after its turn's end")
    if end_id in fixed:
        return common[fixed.index(end_id) + 1 :]
    if not fixed:
        # What opens the next turn is what ends this one: it has to be the opener that does follow.
        if common[0] == end_id:
            return common[1:]
        raise CannotContinue(Missed.OTHER_END, "and the template's next turn opens with another one")
    # Another end-of-text token of the same model stands in for the close.
    return common[1:]


def shape(new: Sequence[Message]) -> tuple[str, ...]:
    """The roles of messages, one for each run of equal ones."""
    roles: list[str] = []
    for message in new:
        role = str(message.get("role"))
        if not roles or roles[-1].rstrip("+") != role:
            roles.append(role)
        else:
            roles[-1] = role + "+"
    return tuple(roles)


def common_end(one: bytes, other: bytes) -> int:
    """How many ids two packed sequences have in common at their ends."""
    low, high = 0, min(len(one), len(other)) // _ITEM
    while low < high:
        middle = (low + high + 1) // 2
        if one[len(one) - middle * _ITEM :] == other[len(other) - middle * _ITEM :]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _rendering(
    call: ModelCall, past: _Past, calls: Sequence[Message], new: Sequence[Message], *, tools: bool
) -> ModelCall:
    turn: Message = {"role": "assistant", "content": past.answer, "reasoning_content": past.thinking}
    if calls:
        arguments = json.dumps({"of": past.answer})
        turn["tool_calls"] = [{**known, "function": {**known["function"], "arguments": arguments}} for known in calls]
    messages: list[Message] = [{"role": "user", "content": past.user}, turn, *new]
    if _has_system(call):
        messages.insert(0, {"role": "system", "content": past.system})
    return ModelCall(messages, call.tools if tools else None, rendering_options(call), call.model)


def _calls_of(turn: Message) -> list[Message]:
    """Ids and names of its tool calls."""
    found = []
    calls: Any = turn.get("tool_calls") or ()
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise CannotContinue(Missed.NOT_PROVEN, "a tool call without a name")
        found.append({"type": "function", "function": {"name": function["name"]}, **_id_of(call)})
    return found


def _id_of(call: Message) -> Message:
    return {"id": call["id"]} if isinstance(call.get("id"), str) else {}


def _has_system(call: ModelCall) -> bool:
    return bool(call.messages) and call.messages[0].get("role") in {"system", "developer"}


def remember(known: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Keeps what was found out, and forgets the oldest beyond `MAX_REMEMBERED`."""
    known[key] = value
    while len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
