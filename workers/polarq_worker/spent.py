"""Where the time of a rollout went that its walk cannot see: parts of the sandboxes' own stages.

Whoever waits names a mapping for itself and for what is begun on its behalf; made ahead for nobody, a part is nobody's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar

_OF: ContextVar[MutableMapping[str, float] | None] = ContextVar("polarq_spent", default=None)


@contextmanager
def counted_in(spent: MutableMapping[str, float]) -> Iterator[None]:
    """What is measured within adds to `spent`: seconds by the part's name."""
    token = _OF.set(spent)
    try:
        yield
    finally:
        _OF.reset(token)


@contextmanager
def measured(part: str, *, there: bool = True) -> Iterator[None]:
    """`there`: whether there is anything of the kind to do."""
    began = time.monotonic()
    try:
        yield
    finally:
        spent = _OF.get()
        if spent is not None and there:
            spent[part] = spent.get(part, 0.0) + time.monotonic() - began
