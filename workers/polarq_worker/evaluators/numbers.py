"""Reads a reward that a program wrote: one finite number in its range, or no reward at all."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from polarq.errors import EvaluatorFault

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def reward_of(text: str, key: str, low: float, high: float, what: str) -> tuple[float, dict[str, Any]]:
    """(the number, the JSON object it stood in). Raises `EvaluatorFault`, which names `what`."""
    text = text.strip()
    if not text:
        raise EvaluatorFault(f"{what} is blank, and should hold a number")
    if _NUMBER.fullmatch(text):
        return in_range(float(text), low, high, what), {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise EvaluatorFault(f"{what} is neither a number nor JSON: '{text[:80]}'") from None
    if not isinstance(value, dict) or key not in value:
        raise EvaluatorFault(f"{what} is JSON without the key '{key}': '{text[:80]}'")
    return in_range(value[key], low, high, f"'{key}' in {what}"), value


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
