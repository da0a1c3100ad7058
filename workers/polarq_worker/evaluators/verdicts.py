"""Finds a judge's verdict in what it wrote: one JSON object, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from polarq_worker.evaluators.numbers import unambiguous

PairsHook = Callable[[list[tuple[str, Any]]], dict[str, Any]]
_FENCE = re.compile(r"\s*```[A-Za-z]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
MAX_CHARS = 200_000
MAX_WORK, PER_TRY = 1_000_000, 1000
"""Characters that may be read of what begins as an object and is none; each try counts as `PER_TRY` more. Without a
bound the time would grow with the square of the braces, and all rollouts of the node would wait."""


class NoVerdict(Exception):
    """What a judge wrote is no verdict; the text says why."""


def one_object(text: str, quoted: Sequence[str] = ()) -> dict[str, Any]:
    """The object that a text consists of (in a Markdown fence or not), or else the only one in its prose, unless that
    stands in one of the `quoted` texts. Raises `NoVerdict`."""
    if not text.strip():
        raise NoVerdict("it is empty")
    if len(text) > MAX_CHARS:
        raise NoVerdict(f"it has more than {MAX_CHARS} characters")
    fence = _FENCE.fullmatch(text)
    bare = (fence.group(1) if fence else text).strip()
    found = list(_objects(bare, _unambiguous))
    if len(found) != 1:
        raise NoVerdict("it holds no JSON object" if not found else f"it holds {len(found)} JSON objects")
    value, spelt = found[0]
    if spelt != bare and any(_stands_in(value, spelt, one) for one in quoted):
        raise NoVerdict("its only JSON object stands in what it was to judge")
    return value


def _stands_in(value: dict[str, Any], spelt: str, text: str) -> bool:
    """As it is spelt, whatever its blanks; spelt otherwise where the text is not too hard to read."""
    if _dense(spelt) in _dense(text):
        return True
    with suppress(NoVerdict):
        return any(value == other for other, _ in _objects(text[:MAX_CHARS]))
    return False


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return unambiguous(pairs)
    except ValueError as exc:
        raise NoVerdict(f"it holds a JSON object in which {exc}") from None


def _dense(text: str) -> str:
    return "".join(text.split())


def _objects(text: str, hook: PairsHook | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, how it is spelt), the outermost ones. Raises `NoVerdict` where they are too hard to find."""
    decoder = json.JSONDecoder(object_pairs_hook=hook)
    at, work = text.find("{"), 0
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as exc:
            work += PER_TRY + (exc.pos - at if isinstance(exc, json.JSONDecodeError) else PER_TRY)
            if work > MAX_WORK:
                raise NoVerdict("it has too many braces that open no JSON object") from None
            at = text.find("{", at + 1)
            continue
        if isinstance(value, dict):
            yield value, text[at:end]
        at = text.find("{", end)
