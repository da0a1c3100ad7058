"""Asks an engine, once when it is met, whether exact mode can be trusted with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from polarq_proxy.call import Answer, ModelCall
from polarq_proxy.exact.base import CannotContinue, Message, Renderer

Ask = Callable[[ModelCall, list[int] | None], Awaitable[Answer]]
"""Samples an answer: to the messages, or to a prompt of ids. May raise `CallFault`, which is passed on."""

_TOOL: Message = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


async def check(render: Renderer, ask: Ask) -> str | None:
    """Why exact mode must be off, in one line; None: it may be on. Samples two tokens.

    Rendered: a prompt that the engine is only asked to render has the ids that its chat conditions on (a start token
    that one of them doubles shows here). Token-in: it conditions on ids that are sent, even where its own rendering of
    the messages beside them would be another.
    """
    call = _call("Hello there.", "Where are we?")
    try:
        rendered = await render.ids(call)
        other = await render.ids(_call("Be quiet.", "Count to three."))
    except CannotContinue as exc:
        return f"exact mode is off: {exc}"
    echoed = (await ask(call, None)).prompt_ids
    if echoed is None:
        return "exact mode is off: the engine does not say which prompt ids it conditioned on"
    if echoed != rendered:
        return f"exact mode is off: {_difference(rendered, echoed)} between what it renders and what its chat uses"
    echoed = (await ask(call, list(other))).prompt_ids
    if echoed == rendered:
        return "exact mode is off: the engine takes no prompt as ids; it renders the messages beside them"
    if echoed != other:
        shown = "no ids" if echoed is None else _difference(other, echoed)
        return f"exact mode is off: {shown} between a prompt that was sent as ids and its echo"
    return None


def _call(system: str, user: str) -> ModelCall:
    messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return ModelCall(messages, [_TOOL], {"max_tokens": 1, "temperature": 1.0}, "")


def _difference(expected: Sequence[int], found: Sequence[int]) -> str:
    at = next(
        (place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(found)),
    )
    return f"the first difference is at token {at} ({_at(expected, at)} and {_at(found, at)})"


def _at(ids: Sequence[int], place: int) -> str:
    return str(ids[place]) if place < len(ids) else "the end"
