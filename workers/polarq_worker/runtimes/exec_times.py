"""Where a sandbox's time went, by what its commands were for (never by reading them)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory, ExecTimesReport


class ExecTimes:
    """Of one sandbox. A command that was cancelled counts, as cancelled."""

    def __init__(self) -> None:
        self._seconds: dict[ExecCategory, float] = {}
        self._counts: Counter[ExecCategory] = Counter()
        self._kinds: Counter[ExecKind] = Counter()
        self._failed = 0
        self.out_of_memory: set[ExecCategory] = set()
        """What a command was for that failed while the kernel killed for want of memory."""

    @contextmanager
    def of(self, category: ExecCategory) -> Iterator[Callable[[ExecKind, bool], None]]:
        began = time.monotonic()
        end = (ExecKind.CANCELLED, False)

        def ended(kind: ExecKind, ok: bool) -> None:
            nonlocal end
            end = (kind, ok)

        try:
            yield ended
        finally:
            self._seconds[category] = self._seconds.get(category, 0.0) + time.monotonic() - began
            self._counts[category] += 1
            self._kinds[end[0]] += 1
            self._failed += not end[1]

    def report(self) -> ExecTimesReport:
        return ExecTimesReport(
            total_s=sum(self._seconds.values()),
            count=sum(self._counts.values()),
            failed=self._failed,
            timed_out=self._kinds[ExecKind.TIMED_OUT],
            cancelled=self._kinds[ExecKind.CANCELLED],
            seconds=dict(self._seconds),
            counts=dict(self._counts),
        )
