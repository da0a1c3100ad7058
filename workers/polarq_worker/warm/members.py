"""Sandboxes as the warm pool knows them: what is there, what is coming, what will be asked for."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from polarq.contracts.sandbox import ScrubbedHistory
from polarq_worker.runtimes.base import Runtime
from polarq_worker.warm.recipe import Recipe
from polarq_worker.warm.snapshots import Lease

Origin = Literal["cold", "snapshot", "warm", "reused"]


@dataclass(eq=False)
class Member:
    """A sandbox and what it was made of."""

    runtime: Runtime
    recipe: Recipe
    origin: Origin = "cold"
    history: Sequence[ScrubbedHistory] = ()
    lease: Lease | None = None
    idle_since: float = 0.0
    used: bool = False


@dataclass(eq=False)
class Coming:
    """One that is being made ahead."""

    recipe: Recipe
    making: asyncio.Task[Member]
    taken: bool = False
    landed: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """What work in sight will ask for."""

    recipe: Recipe
    budget_s: float
    """What preparing may take."""


@dataclass(slots=True)
class Handed:
    """How often sandboxes were handed out, by where they came from."""

    counts: Counter[Origin] = field(default_factory=Counter)


def empty(folder: Path) -> None:
    """What it says is its last rollout's."""
    with os.scandir(folder) if folder.is_dir() else nullcontext(()) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink()
