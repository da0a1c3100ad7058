"""What kind of Redis the ledger stands on, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarq.ledger.calls import Call


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """From the server's own INFO. None where it does not say (managed services hide parts)."""

    name: str
    version: str
    used_bytes: int
    max_bytes: int
    """0: no limit."""
    policy: str | None
    appendonly: bool | None

    @property
    def evicts(self) -> bool:
        """Whether it may throw keys away when it is full: queues and results, without a word."""
        return self.max_bytes > 0 and self.policy not in {None, "noeviction"}

    @property
    def problem(self) -> str | None:
        """What makes it unusable as a ledger, and what to do; None when it is usable."""
        if self.evicts:
            return (
                f"it evicts keys when full (maxmemory-policy {self.policy}), which would lose rollouts silently; "
                "set maxmemory-policy noeviction"
            )
        return None

    @property
    def warning(self) -> str | None:
        """What is risky about it, and what to do."""
        if self.policy not in {None, "noeviction"}:
            return f"maxmemory-policy is {self.policy}; set noeviction before you set a maxmemory"
        if self.appendonly is False:
            return "appendonly is off: a restart of Redis forgets tasks; set appendonly yes, appendfsync everysec"
        return None


def server_facts() -> Call[ServerFacts]:
    def read(replies: list[Any]) -> ServerFacts:
        info: dict[str, Any] = replies[0]
        appendonly = info.get("aof_enabled")
        return ServerFacts(
            name=str(info.get("server_name", "redis")),
            version=str(info.get("valkey_version") or info.get("redis_version") or "?"),
            used_bytes=int(info.get("used_memory", 0)),
            max_bytes=int(info.get("maxmemory", 0)),
            policy=info.get("maxmemory_policy"),
            appendonly=None if appendonly is None else bool(int(appendonly)),
        )

    return Call(read, commands=(("INFO",),))
