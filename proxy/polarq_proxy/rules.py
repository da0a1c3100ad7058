"""What a rollout's rules make of a call: sampling parameters replaced, answers kept within what is left."""

from __future__ import annotations

from typing import Any

from polarq.store.grants import SessionRules
from polarq_proxy.call import ModelCall

LIMITS = ("max_tokens", "max_completion_tokens")
"""The names under which a harness may ask for a limit; the second is what chat completions calls it now."""


def asked_limit(call: ModelCall) -> int | None:
    """How many tokens the harness wants at most."""
    for name in reversed(LIMITS):
        value = call.options.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def limit(call: ModelCall, most: int | None) -> dict[str, Any]:
    """Lets the answer be `most` tokens long (None: as long as the context allows). Returns what was changed, as the
    harness had it."""
    changed = {name: call.options.pop(name) for name in LIMITS if name in call.options}
    if most is not None:
        call.options["max_tokens"] = most
    return {} if changed == {"max_tokens": most} else changed or {"max_tokens": None}


def apply(rules: SessionRules, call: ModelCall, sampled_before: int) -> dict[str, Any]:
    """Changes `call` as the rules want. Returns what the harness had asked for instead, by parameter."""
    changed: dict[str, Any] = {}
    for name, value in rules.sampling.items():
        if call.options.get(name) != value:
            changed[name] = call.options.get(name)
            call.options[name] = value
    most = [value for value in (asked_limit(call), rules.max_tokens) if value is not None]
    if rules.max_sampled_tokens is not None:
        most.append(max(1, (rules.max_sampled_tokens - sampled_before) // call.choices))
    if most and min(most) != asked_limit(call):
        changed.update(limit(call, min(most)))
    return changed
