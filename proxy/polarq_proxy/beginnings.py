"""What of a streamed answer was shown already, and what is left to show once the whole is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarq_proxy.flight import Flight


@dataclass(frozen=True, slots=True)
class Seen:
    """What listeners were shown."""

    message: Mapping[str, Any]
    ids: int
    """How many."""


def seen_of(flight: Flight) -> Seen | None:
    """None: that cannot be told for sure."""
    if not flight.shown:
        return Seen({}, 0)
    (choice,) = flight.gatherer.answer().choices
    message: dict[str, Any] = {**choice.message}
    calls = [{**call, "function": {**call["function"]}} for call in message.get("tool_calls") or []]
    ids = len(choice.ids or ())
    for piece in reversed(flight.held):  # gathered, and not shown: parsers let go at the end what they had held back
        for change in piece.choices:
            ids -= len(change.ids or ())
            for key, value in change.delta.items():
                if key == "tool_calls":
                    if not _calls_taken_back(calls, value):
                        return None
                elif isinstance(value, str) and key != "role":
                    message[key] = _taken_back(message.get(key) or "", value)
    message["tool_calls"] = calls
    return Seen(message, ids)


def _taken_back(text: str, end: str) -> str:
    return text.removesuffix(end) if end else text


def _calls_taken_back(calls: list[dict[str, Any]], parts: Any) -> bool:
    for part in reversed(parts if isinstance(parts, list) else []):
        index, function = part.get("index"), part.get("function") or {}
        if not isinstance(index, int) or not 0 <= index < len(calls):
            return False
        if function.get("name"):
            if index != len(calls) - 1:
                return False
            calls.pop()  # it began in what was held back
        else:
            shown = calls[index]["function"]
            shown["arguments"] = _taken_back(shown["arguments"], function.get("arguments") or "")
    return True


def rest_of(seen: Mapping[str, Any], whole: dict[str, Any]) -> dict[str, Any] | None:
    """What a stream that said `seen` has yet to say to have said `whole`; None: it has said something else. Calls
    that were shown keep the ids that they were shown with."""
    rest: dict[str, Any] = {}
    for key in {**seen, **whole}:
        if key in {"role", "tool_calls"}:
            continue
        before, value = seen.get(key), whole.get(key)
        if isinstance(before or "", str) and isinstance(value or "", str):
            if not (value or "").startswith(before or ""):
                return None
            if value and len(value) > len(before or ""):
                rest[key] = value[len(before or "") :]
        elif before != value:
            if before is not None:
                return None
            rest[key] = value
    calls = _rest_of_calls(seen.get("tool_calls") or [], whole.get("tool_calls") or [])
    if calls is None:
        return None
    return {**rest, "tool_calls": calls} if calls else rest


def _rest_of_calls(seen: Sequence[Any], whole: Sequence[Any]) -> list[dict[str, Any]] | None:
    if len(seen) > len(whole):
        return None
    rest: list[dict[str, Any]] = []
    for index, call in enumerate(whole):
        if index >= len(seen):
            rest.append({"index": index, **call})
            continue
        before, after = seen[index]["function"], call["function"]
        if before["name"] != after["name"] or not after["arguments"].startswith(before["arguments"]):
            return None
        call["id"] = seen[index]["id"]
        if len(after["arguments"]) > len(before["arguments"]):
            rest.append({"index": index, "function": {"arguments": after["arguments"][len(before["arguments"]) :]}})
    return rest
