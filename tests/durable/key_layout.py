"""Which keys may be in Redis at all: read off `Keys`, so that a new kind of key is known as soon as it is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from polarq.ledger import Keys

_TASK, _NUMBER = "TASKTASK", 987654
_TASK_ID, _ROLLOUT_ID = re.escape(_TASK), re.escape(f"{_TASK}.{_NUMBER}")


def known_keys(keys: Keys) -> re.Pattern[str]:
    """Matches every key that polarq itself writes; what Celery and kombu write is under `keys.celery`."""
    patterns = {re.escape(keys.celery) + ".*"}
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name in {"prefix", "celery"}:
            continue
        value = getattr(keys, name)
        if callable(value):
            value = value(*(_sample(p) for p in inspect.signature(member).parameters.values() if p.name != "self"))
        for text in [value] if isinstance(value, str) else value:
            patterns.add(_pattern(text))
    return re.compile("|".join(sorted(patterns)))


def strangers(found: Iterable[bytes], keys: Keys) -> list[str]:
    """Keys under the prefix that no part of polarq is known to write."""
    known = known_keys(keys)
    return sorted(key for key in (name.decode() for name in found) if not known.fullmatch(key))


def _sample(parameter: inspect.Parameter) -> str | int:
    if parameter.annotation == "int":
        return _NUMBER
    return f"{_TASK}.{_NUMBER}" if parameter.name == "rollout_id" else _TASK


def _pattern(text: str) -> str:
    """Stems (rollouts, chunks of a payload) are followed by a number."""
    open_ids = re.escape(text).replace(_ROLLOUT_ID, r".+").replace(_TASK_ID, r".+").replace(str(_NUMBER), r"\d+")
    return open_ids + r"(\d+|:\d+)?"
