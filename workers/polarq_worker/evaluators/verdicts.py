"""Finds a judge's verdict in what it wrote: one JSON object, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_FENCE = re.compile(r"\s*```[A-Za-z]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
MAX_CHARS = 200_000


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
    found = list(_objects(bare))
    if len(found) != 1:
        raise NoVerdict("it holds no JSON object" if not found else f"it holds {len(found)} JSON objects")
    value, whole = found[0]
    if not whole and any(value == other for one in quoted for other, _ in _objects(one[:MAX_CHARS])):
        raise NoVerdict("its only JSON object stands in what it was to judge")
    return value


def _objects(text: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """(object, whether it is all of the text), the outermost ones."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("{", at + 1)
            continue
        if isinstance(value, dict):
            yield value, at == 0 and end == len(text)
        at = text.find("{", end)
