"""How full Redis is: told before it bites, and refused to new tasks before results find no place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polarq.ledger.admission import FULL_SHARE, HIGH_SHARE
from polarq.ledger.calls import Call, Calls, Server
from polarq.ledger.records import decode
from polarq.ledger.scripts import script


class MemoryLevel(StrEnum):
    """How much of the memory budget is used."""

    OK = "ok"
    HIGH = "high"
    """From 80 % on: somebody should do something."""
    FULL = "full"
    """From 95 % on: new tasks are refused."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Redis' memory beside what it may use."""

    level: MemoryLevel
    used_bytes: int
    budget_bytes: int
    """0: no limit."""
    changed: bool
    """The level was another when it was last looked at."""

    @property
    def share(self) -> float:
        """0 without a limit."""
        return self.used_bytes / self.budget_bytes if self.budget_bytes else 0.0

    @property
    def line(self) -> str:
        """For people."""
        used = f"Redis uses {self.used_bytes / 2**20:.0f}"
        if not self.budget_bytes:
            return f"{used} MiB, and has no limit"
        return f"{used} of the {self.budget_bytes / 2**20:.0f} MiB it may ({self.share:.0%})"


MEMORY_ADVICE = "acknowledge results, lower retention.result_s, or raise redis.memory_budget (or maxmemory)"


def memory_of(calls: Calls, server: Server) -> Call[tuple[int, int]]:
    """Bytes that a Redis beside the ledger's uses, and how many it may (0: no limit)."""

    def read(replies: list[Any]) -> tuple[int, int]:
        info: dict[str, Any] = replies[0]
        most, wanted = int(info.get("maxmemory", 0)), calls.admission.memory_budget or 1.0
        budget = most * wanted if wanted <= 1 else min(wanted, most or wanted)
        return int(info.get("used_memory", 0)), int(budget)

    return Call(read, commands=(("INFO", "memory"),), at=server)


def tell_memory(calls: Calls, server: Server, used: int, budget: int, keep_s: float) -> Call[None]:
    """Has the ledger count it too, for a while. See `memory_use`."""
    key = calls.keys.memory_at(server)
    told = ("SET", key, f"{used} {budget}", "PX", int(keep_s * 1000)) if budget else ("DEL", key)
    return Call(lambda _: None, commands=(told,))


def memory_use(calls: Calls) -> Call[MemoryUse]:
    """Looks; whoever finds the level changed writes the event `redis.memory`. Of several Redis it is the fullest."""

    def read(reply: list[Any]) -> MemoryUse:
        level = MemoryLevel(decode(reply[0]))
        return MemoryUse(level, int(reply[1]), int(reply[2]), changed=decode(reply[3]) != level)

    args = (calls.events_max, calls.admission.budget, HIGH_SHARE, FULL_SHARE)
    return Call(read, script("memory"), (calls.keys.memory, calls.keys.events), args)
