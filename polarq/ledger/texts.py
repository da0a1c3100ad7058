"""Texts that many rollouts have in common, held once."""

from __future__ import annotations

import sys
from typing import Any

_LONG_CHARS = 200


def with_shared_texts(request: Any) -> Any:
    """A parsed request whose long texts (the instruction can have megabytes) are the same objects in each rollout of
    its group that this process holds. A text cannot be changed, so that nobody sees what another does to its task."""
    if isinstance(request, str):
        return sys.intern(request) if len(request) >= _LONG_CHARS else request
    if isinstance(request, list):
        return [with_shared_texts(part) for part in request]
    if isinstance(request, dict):
        return {key: with_shared_texts(part) for key, part in request.items()}
    return request
