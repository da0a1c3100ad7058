"""What a worker does again and again beside its rollouts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from polarq.errors import LedgerUnavailable

log = logging.getLogger("polarq.worker.node")


async def every(period_s: float, step: Callable[[], Awaitable[object]]) -> None:
    """Calls `step` once a period. A step that fails is logged and tried again: the loop never ends by itself."""
    due = time.monotonic()
    while True:
        due = max(due + period_s, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        try:
            await step()
        except LedgerUnavailable as exc:
            log.warning("%s", exc)
        except Exception:
            log.exception("%s failed", getattr(step, "__qualname__", step))
