"""How much a sandbox may keep in /dev/shm. It is memory: without a limit a full one leaves nothing to a grader."""

from __future__ import annotations

from polarq.contracts.specs import RuntimeSpec

KEY = "shm_mb"
DEFAULT_MB = 64
"""Docker's."""


def problems(spec: RuntimeSpec) -> list[str]:
    """One line, with the key, where the task's wish is none."""
    wanted = spec.kwargs.get(KEY, DEFAULT_MB)
    right = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0
    return [] if right else [f"kwargs.{KEY}: a whole number above 0 is needed"]


def size(spec: RuntimeSpec) -> int:
    """Bytes: what the task asks for, else the default, and of a small memory no more than half."""
    if KEY in spec.kwargs:
        return int(spec.kwargs[KEY]) << 20
    return min(DEFAULT_MB << 20, (spec.memory_mb or 1 << 20) * 500_000)
