"""Reads a reward that a program wrote: one finite number in its range, or no reward at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from polarq.errors import EvaluatorFault

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (`object_pairs_hook`). Raises ValueError where a key is there twice: one of them is a lie."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def reward_of(text: str, key: str, low: float, high: float, what: str) -> tuple[float, dict[str, Any]]:
    """(the number, the JSON object it stood in). Raises `EvaluatorFault`, which names `what`."""
    text = text.strip()
    if not text:
        raise EvaluatorFault(f"{what} is blank, and should hold a number")
    if _NUMBER.fullmatch(text):
        return in_range(float(text), low, high, what), {}
    try:
        value = json.loads(text, object_pairs_hook=unambiguous)
    except (ValueError, RecursionError):
        raise EvaluatorFault(f"{what} is neither a number nor JSON without repeated keys: '{text[:80]}'") from None
    if not isinstance(value, dict) or key not in value:
        raise EvaluatorFault(f"{what} is JSON without the key '{key}': '{text[:80]}'")
    return in_range(value[key], low, high, f"'{key}' in {what}"), value


def credit_of(value: dict[str, Any], turns: Sequence[int], low: float, high: float, what: str) -> dict[str, Any]:
    """`trace_rewards` (a number per trace) and `turn_rewards` (a list per trace, of a number per turn), those that are
    in `value`; `turns` are the turns of each trace. Raises `EvaluatorFault` for other numbers of them, too."""
    found: dict[str, Any] = {}
    if "trace_rewards" in value:
        found["trace_rewards"] = _numbers(value["trace_rewards"], len(turns), low, high, f"'trace_rewards' in {what}")
    if "turn_rewards" in value:
        name, given = f"'turn_rewards' in {what}", value["turn_rewards"]
        if not isinstance(given, list) or len(given) != len(turns):
            raise EvaluatorFault(f"{name} is no list of {len(turns)} lists, one per trace")
        pairs = enumerate(zip(given, turns, strict=True))
        found["turn_rewards"] = [_numbers(one, count, low, high, f"{name}, trace {at}") for at, (one, count) in pairs]
    return found


def _numbers(value: Any, count: int, low: float, high: float, what: str) -> list[float]:
    if not isinstance(value, list) or len(value) != count:
        told = f"{len(value)} entries" if isinstance(value, list) else f"'{str(value)[:80]}'"
        raise EvaluatorFault(f"{what} must be a list of {count} numbers, and is {told}")
    return [in_range(one, low, high, what) for one in value]


def in_range(value: Any, low: float, high: float, what: str) -> float:
    """Raises `EvaluatorFault` for what is no number, not finite, or outside; nothing is clamped."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise EvaluatorFault(f"{what} is no number: '{str(value)[:80]}'")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EvaluatorFault(f"{what} is {number}, which is no reward")
    if not low <= number <= high:
        raise EvaluatorFault(f"{what} is {number:g}, outside {low:g} to {high:g} (min_reward, max_reward)")
    return number
