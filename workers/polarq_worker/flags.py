"""What the ledger says a node shall do, read with every heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from polarq.topology import Node


@dataclass(frozen=True, slots=True)
class Flags:
    """A node's flags as they last were."""

    draining: bool = False
    drain_over: bool = False
    """The drain's deadline has passed: what is left goes back to the queue."""
    paused: bool = False
    run_workers: int | None = None
    """Instead of the topology's `max_run_workers`."""

    @classmethod
    def read(cls, flags: Mapping[str, str]) -> Self:
        draining = flags.get("draining") == "1"
        return cls(
            draining=draining,
            drain_over=draining and flags.get("drain_over") == "1",
            paused=flags.get("paused") == "1",
            run_workers=int(flags["run_workers"]) if "run_workers" in flags else None,
        )

    @property
    def holds_back(self) -> bool:
        """Nothing new is taken."""
        return self.draining or self.paused

    def resized(self, node: Node) -> Node:
        """The node with the capacity that holds now."""
        return node if self.run_workers is None else node.model_copy(update={"max_run_workers": self.run_workers})
