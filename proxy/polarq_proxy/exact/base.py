"""What the parts of exact mode say to each other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from polarq_proxy.call import ModelCall

Message = dict[str, Any]


class Missed(StrEnum):
    """Why a conversation is not continued by its own ids, for counters and records."""

    HISTORY_DIFFERS = "history differs"
    """The request tells another past than any that was sampled: rewritten, dropped or re-ordered turns."""
    NOT_SAMPLED = "assistant turn not sampled"
    """Among the new messages is an assistant turn that the model did not sample here."""
    TOOLS_DIFFER = "tools differ"
    OPTIONS_DIFFER = "template options differ"
    """Sampled under other template options, or by another model, or with options that ids cannot carry."""
    IMAGES = "images"
    """Engines expand a picture's placeholder; plain ids would lose its pixels."""
    RENDERED_OTHERWISE = "engine renders otherwise"
    """The engine's chat conditioned on other ids than it renders when it is only asked to."""
    LOOKS_AHEAD = "template looks ahead"
    """What the template writes after a turn depends on the turns before it."""
    NOT_PROVEN = "suffix not proven"
    OTHER_END = "ended with another token"
    """The turn ended with a control token with which the template does not go on."""
    TOO_LONG = "too long"
    """The ids leave no room to sample, or the engine's own rendering may be shorter."""
    FORGED = "forged control tokens"
    NOT_RENDERED = "engine renders nothing"


class CannotContinue(Exception):
    """The suffix is not known. The call is rendered by the engine as a new branch, and counted under `cause`."""

    def __init__(self, cause: Missed, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else str(cause))
        self.cause = cause


class Renderer(Protocol):
    """Turns calls into ids as the engine's own template and tokenizer do."""

    @property
    def name(self) -> str:
        """Names what renders: renderers of one name give equal ids for equal calls."""

    async def ids(self, call: ModelCall, *, generation_prompt: bool = True) -> list[int]:
        """The ids of `call`'s prompt; of its `prompt`, if that is a text. Raises `CannotContinue`."""


class Ended:
    """A sampled turn, as ids."""

    __slots__ = ("_ids", "_prompt_tokens", "end_id")

    def __init__(self, ids: array[int], prompt_tokens: int, end_id: int | None) -> None:
        self._ids = ids
        self._prompt_tokens = prompt_tokens
        self.end_id = end_id
        """The control token with which the engine ended the turn by itself; None when it ended in the middle
        (length, stop string, or an id that the request named as a stop)."""

    @property
    def prompt_ids(self) -> list[int]:
        return self._ids[: self._prompt_tokens].tolist()

    @property
    def sampled_ids(self) -> list[int]:
        return self._ids[self._prompt_tokens :].tolist()

    def followed_by(self, suffix: Sequence[int]) -> array[int]:
        return self._ids + array("i", suffix)


@dataclass(frozen=True, slots=True)
class Extension:
    """A request that goes on from a sampled turn."""

    ended: Ended
    turn: Message
    """The turn as the request sends it back: its tool calls bear the ids that the results name."""
    new: Sequence[Message]
    """At least one message, none of them the assistant's."""
    call: ModelCall


class Bridge(Protocol):
    """A way from a sampled turn to the next prompt."""

    async def suffix(self, extension: Extension) -> list[int]:
        """The ids between the sampled ones and the end of the next prompt. Raises `CannotContinue`."""


RENDERED_BY = (
    "chat_template", "chat_template_kwargs", "mm_processor_kwargs", "reasoning_effort", "documents", "thinking",
    "enable_thinking",
)  # fmt: skip
"""The options of a call that change what the template writes."""


def rendering_options(call: ModelCall) -> dict[str, Any]:
    options = {key: call.options[key] for key in RENDERED_BY if call.options.get(key) is not None}
    if call.options.get("tool_choice") == "none":
        options["tool_choice"] = "none"  # some servers leave the tools out of such a prompt
    return options


def carries_ids(call: ModelCall) -> bool:
    """Whether a prompt of ids can stand for the call's messages at all."""
    options = call.options
    return (
        options.get("continue_final_message") is not True
        and options.get("add_generation_prompt") is not False
        and options.get("truncate_prompt_tokens") is None
        and options.get("echo") is not True
    )
