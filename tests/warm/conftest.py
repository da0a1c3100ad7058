"""A node's warm pool without the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.ledger import AsyncLedger, Calls, Keys
from polarq.topology import Topology
from polarq_worker.patience import Patience
from polarq_worker.runtimes.base import Runtime
from polarq_worker.warm.members import Member, Wish
from polarq_worker.warm.parts import Warm
from polarq_worker.warm.recipe import Recipe

BUDGET_S = 300.0


class Rig:
    """`pool` are settings of `runtimes.pool`. The ledger is never asked: these sandboxes end with their worker."""

    def __init__(self, home: Path, **pool: Any) -> None:
        home.mkdir(exist_ok=True)
        self.home = home
        self.events_file = home / "events"
        self.prepared_file = home / "prepared"
        self.events_file.touch()
        self.prepared_file.touch()
        self.started: list[Runtime] = []
        runtimes = {"local": {"isolation": "none"}, "pool": pool}
        nodes = [{"id": "node0", "runtimes": runtimes}]
        self.topology = Topology.parse(
            {"gateway": {"nodes": nodes}, "security": {"allowed_modules": ["tests.warm.boxes"]}}
        )
        self.ledger = AsyncLedger("redis://127.0.0.1:1/0", Calls(Keys()))
        (home / "rollouts").mkdir(exist_ok=True)
        node = self.topology.resolve("node0")
        self.warm = Warm.of(self.topology, node, "0123456789", self.ledger, Patience(), home)
        self.pool = self.warm.pool
        self._names = 0

    # --- what is asked for

    def spec(self, *commands: str, box: str = "SnapBox", **fields: Any) -> RuntimeSpec:
        """A recipe of commands; the first of each notes that it was carried out."""
        prepare = [{"type": "exec", "command": f"echo x >> {self.prepared_file}; {command}"} for command in commands]
        env = {"EVENTS": str(self.events_file), **fields.pop("env", {})}
        data = {"import_path": f"tests.warm.boxes:{box}", "prepare": prepare, "env": env, **fields}
        return RuntimeSpec.parse(data)

    async def recipe(self, *commands: str, **fields: Any) -> Recipe:
        spec = self.spec(*commands, **fields)
        return await self.warm.recipes.of(spec, spec.prepare)

    async def take(self, recipe: Recipe, budget_s: float = BUDGET_S) -> Member:
        self._names += 1
        return await self.pool.take(recipe, f"r{self._names}", None, budget_s, self.started.append)

    async def arrived(self) -> None:
        """Returns when nothing is being made ahead any more."""
        await until(lambda: not self.pool.making)

    async def made_ahead(self, *recipes: Recipe) -> int:
        """Has all of it made ahead that may be. Answers how many wait then."""
        while self.pool.ahead(wishes(*recipes)):
            await self.arrived()
        return self.pool.idle

    # --- what happened

    @property
    def prepared(self) -> int:
        """How often a command of a recipe was carried out."""
        return len(self.prepared_file.read_text().split())

    def events(self, kind: str) -> list[list[str]]:
        lines = [line.split() for line in self.events_file.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == kind]

    async def aclose(self) -> None:
        for runtime in self.started:
            await self.pool.stop(runtime)
        await self.pool.aclose()


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    """Makes rigs in one folder, one after another."""
    made: list[Rig] = []

    def make(**pool: Any) -> Rig:
        made.append(Rig(tmp_path / "node", **pool))
        return made[-1]

    yield make
    for rig in made:
        await rig.aclose()


@pytest.fixture
def rig(rigs: Callable[..., Rig]) -> Rig:
    return rigs()


def wishes(*recipes: Recipe) -> list[Wish]:
    return [Wish(recipe, BUDGET_S) for recipe in recipes]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110  (of parts that nobody tells about)
            await asyncio.sleep(0.01)


async def run(runtime: Runtime, command: str) -> str:
    result = await runtime.exec(command, timeout_s=60)
    assert result.ok, result.why
    return result.stdout_text
