"""How much of a node's run slots is used: no overlap, Polar's policy, and polarq's stages with the warm pool.

    python -m benchmarks.occupancy

A simulated node with run slots as the scarce resource takes 512 rollouts, whose times are in `occupancy_times.csv`
(drawn once, with heavy tails, by `occupancy_times.py`). Time is virtual; polarq's part is the worker's own `Slots`,
`WarmPool` and `Snapshots`, which only get a clock that jumps and sandboxes that take their time.

- no overlap: a slot prepares, runs, makes the evaluator's sandbox and grades, one after the other.
- Polar's policy: prepare workers of their own, each of which holds what it has prepared until a run slot is free; every
  sandbox is started and prepared from its image; the evaluator's is made when the run begins and held during it.
- polarq: half as many prepare workers, and as many sandboxes made ahead at once, so that no more are in the making than
  with Polar; a recipe is prepared once; a prepared sandbox waits without its worker; the evaluator's is asked for when
  the run has ended.

All three have the same run slots and as many places for grading. Occupancy is what of the run slots' time was spent
running harnesses, from the start until the last rollout has begun to run: after that nothing is left to fill them with.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.occupancy_node import SimulatedRuntime, VirtualLoop
from benchmarks.occupancy_times import FILE
from polarq.contracts.specs import RuntimeSpec
from polarq.ledger import AsyncLedger, Calls, Keys
from polarq.topology import Topology
from polarq_worker.patience import Patience
from polarq_worker.runtimes.base import Runtime
from polarq_worker.slots import Slots
from polarq_worker.warm.members import Wish
from polarq_worker.warm.parts import Warm
from polarq_worker.warm.recipe import Recipe

RUN, PREPARE, POST = 32, 8, 16
TARGET = 0.97
LOOK_S = 0.5
BUDGET_S = 1e9


@dataclass(frozen=True)
class Times:
    """One rollout's, in seconds."""

    task: int
    start_s: float
    prepare_s: float
    keep_s: float
    from_snapshot_s: float
    run_s: float
    evaluate_s: float


@dataclass
class Node:
    """What is counted while rollouts go through it."""

    run_began: list[float] = field(default_factory=list)
    ran: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0
    sandboxes: int = 0
    most_sandboxes: int = 0
    sandbox_s: float = 0.0

    async def runs(self, seconds: float) -> None:
        began = now()
        self.run_began.append(began)
        await asyncio.sleep(seconds)
        self.ran.append((began, now()))

    async def made(self, seconds: float) -> float:
        """A sandbox that is begun now."""
        began = now()
        self.sandboxes += 1
        self.most_sandboxes = max(self.most_sandboxes, self.sandboxes)
        await asyncio.sleep(seconds)
        return began

    def gone(self, began: float) -> None:
        self.sandboxes -= 1
        self.sandbox_s += now() - began

    @property
    def occupancy(self) -> float:
        until = max(self.run_began)
        return sum(min(end, until) - min(began, until) for began, end in self.ran) / (RUN * until)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- the three


async def no_overlap(node: Node, rollouts: Sequence[Times]) -> None:
    waiting = list(reversed(rollouts))

    async def slot() -> None:
        while waiting:
            one = waiting.pop()
            agents = await node.made(one.start_s + one.prepare_s)
            await node.runs(one.run_s)
            evaluators = await node.made(one.start_s + one.prepare_s)
            await asyncio.sleep(one.evaluate_s)
            node.gone(agents)
            node.gone(evaluators)

    await asyncio.gather(*(slot() for _ in range(RUN)))


async def polars(node: Node, rollouts: Sequence[Times]) -> None:
    prepare, run, post = asyncio.Semaphore(PREPARE), asyncio.Semaphore(RUN), asyncio.Semaphore(POST)

    async def rollout(one: Times) -> None:
        async with prepare:
            agents = await node.made(one.start_s + one.prepare_s)
            await run.acquire()
        evaluators = asyncio.create_task(node.made(one.start_s + one.prepare_s))
        await node.runs(one.run_s)
        run.release()
        async with post:
            began = await evaluators
            await asyncio.sleep(one.evaluate_s)
        node.gone(agents)
        node.gone(began)

    await asyncio.gather(*(rollout(one) for one in rollouts))


class Polarq:
    """The worker's own parts."""

    def __init__(self, home: Path, half: int) -> None:
        pool = {"max_idle": half, "max_starting": half}
        places = {"max_init_workers": half, "max_run_workers": RUN, "max_postrun_workers": POST, "ready_buffer": half}
        nodes = [{"id": "node0", "runtimes": {"pool": pool}, **places}]
        security = {"allowed_modules": ["benchmarks.occupancy_node"]}
        topology = Topology.parse({"gateway": {"nodes": nodes}, "security": security})
        self.node = topology.resolve("node0")
        # Sandboxes that end with their worker have no records: the ledger is never asked.
        ledger = AsyncLedger("redis://127.0.0.1:1/0", Calls(Keys()))
        self.warm = Warm.of(topology, self.node, "simulated", ledger, Patience(), home)
        self.slots = Slots(prepare=half, ready=self.node.ready_places, run=RUN, post=POST)
        self.unprepared: list[int] = []

    async def recipe(self, one: Times) -> Recipe:
        env = {name: str(getattr(one, name)) for name in ("start_s", "keep_s", "from_snapshot_s")}
        spec = RuntimeSpec.parse(
            {
                "import_path": "benchmarks.occupancy_node:SimulatedRuntime",
                "prepare": [{"type": "exec", "command": str(one.prepare_s)}],
                "env": {**env, "TASK": str(one.task)},
            }
        )
        return await self.warm.recipes.of(spec, spec.prepare)

    async def run(self, node: Node, rollouts: Sequence[Times]) -> None:
        # A recipe's own times are the same for all its rollouts; so is a start from its snapshot here.
        first = {one.task: one for one in reversed(rollouts)}
        recipes = {task: await self.recipe(one) for task, one in first.items()}
        claimed = asyncio.Semaphore(self.node.capacity)
        self.unprepared = list(range(len(rollouts)))

        async def rollout(number: int, one: Times) -> None:
            async with claimed:
                await self._rollout(node, number, one, recipes[one.task])

        async def look() -> None:
            while True:
                coming = self.unprepared[: self.node.capacity]
                self.warm.pool.ahead([Wish(recipes[rollouts[number].task], BUDGET_S) for number in coming])
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        await asyncio.gather(*(rollout(number, one) for number, one in enumerate(rollouts)))
        looking.cancel()
        await self.warm.pool.aclose()
        node.most_sandboxes, node.sandbox_s = SimulatedRuntime.most_alive, SimulatedRuntime.alive_s

    async def _rollout(self, node: Node, number: int, one: Times, recipe: Recipe) -> None:
        pool = self.warm.pool
        begun: list[Runtime] = []
        async with self.slots.seat() as seat:
            await seat.enter("prepare")
            self.unprepared.remove(number)
            await pool.take(recipe, f"{number}-agent", None, BUDGET_S, begun.append)
            await seat.enter("run")
            await node.runs(one.run_s)
            await seat.enter("post")
            await pool.take(recipe, f"{number}-eval", None, BUDGET_S, begun.append)
            await asyncio.sleep(one.evaluate_s)
            for runtime in begun:
                await pool.stop(runtime)


# --- the report


def simulate(policy: Callable[[Node, Sequence[Times]], Awaitable[None]], rollouts: Sequence[Times]) -> Node:
    SimulatedRuntime.forget()
    node = Node()

    async def whole() -> None:
        await policy(node, rollouts)
        node.ended = now()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(whole())
    return node


def load() -> list[Times]:
    with FILE.open(encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [Times(task=int(row.pop("task")), **row) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    rollouts = load()
    runs = [one.run_s for one in rollouts]
    tasks = len({one.task for one in rollouts})
    print(
        f"{len(rollouts)} rollouts of {tasks} recipes; run {statistics.median(runs):.0f} s in the middle,"
        f" {statistics.mean(runs):.0f} s on average, {max(runs):.0f} s at most; {RUN} run slots"
    )
    print(f"{'':24}{'occupancy':>10}{'hours':>8}{'sandboxes at most':>19}{'on average':>12}{'prepared':>10}")
    twice = 2 * len(rollouts)
    with tempfile.TemporaryDirectory() as home:
        polarq = Polarq(Path(home), PREPARE // 2)
        report("no overlap", simulate(no_overlap, rollouts), twice)
        report("Polar's policy", simulate(polars, rollouts), twice)
        ours = simulate(polarq.run, rollouts)
        report("polarq", ours, SimulatedRuntime.prepared)
    met = ours.occupancy >= TARGET
    print(f"polarq's occupancy is {'at least' if met else 'BELOW'} {TARGET:.0%}")
    return 0 if met else 1


def report(name: str, node: Node, prepared: int) -> None:
    print(
        f"{name:24}{node.occupancy:>10.1%}{node.ended / 3600:>8.2f}{node.most_sandboxes:>19}"
        f"{node.sandbox_s / node.ended:>12.0f}{prepared:>10}"
    )


if __name__ == "__main__":
    sys.exit(main())
