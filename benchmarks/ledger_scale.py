"""What a rollout costs the ledger when many wait and many run: `python benchmarks/ledger_scale.py`.

Nodes are simulated by coroutines that only claim, advance, renew and commit, over one private Redis; beside them a
trainer keeps the queue as long as it was. The CPU time of Redis (INFO) and of the nodes' process, per rollout, is
compared with that of the smallest setting in the same run, which is measured again at the end to show the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from polarq.contracts import Outcome, RolloutState, RolloutSummary, Task
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.ledger.states import ACTIVE
from polarq.testing.redis import EmbeddedRedis

GROUP = 8
RENEWALS = 4
"""Per rollout, all of a node's in one call: what an attempt of one lease's length needs."""
LEASE_S = 3600.0
DONE = RolloutSummary(outcome=Outcome(state=RolloutState.COMPLETED, trainable=True), reward=1.0, calls=4, traces=4)


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU per rollout."""

    redis_us: float
    nodes_us: float


@dataclass
class Bench:
    """One setting: rollouts that wait, rollouts that run, nodes they run on."""

    ledger: AsyncLedger
    waiting: int
    in_flight: int
    nodes: int
    _number: int = 0
    _doorbells: deque[str] = field(default_factory=deque)

    async def submit(self) -> None:
        """One group, and its doorbells."""
        agent = {"harness": "shell", "custom_shell": {"command": "true"}}
        task = Task.load({"task_id": f"t{self._number}", "instruction": "do it", "num_samples": GROUP, "agent": agent})
        self._number += 1
        await self.ledger.do(self.ledger.calls.submit(task, task.task_id))
        self._doorbells.extend(task.rollout_id(i) for i in range(GROUP))

    async def claim(self, node: int) -> Claim:
        rollout_id = self._doorbells.popleft()
        claim = await self.ledger.do(self.ledger.calls.claim(rollout_id, f"node{node}", LEASE_S, "job"))
        assert isinstance(claim, Claim)
        return claim

    async def fill(self) -> list[deque[Claim]]:
        while len(self._doorbells) < self.waiting + self.in_flight:
            await self.submit()
        share = self.in_flight // self.nodes
        return [deque([await self.claim(node) for _ in range(share)]) for node in range(self.nodes)]

    async def turn_over(self, rollouts: int) -> None:
        """Ends the oldest rollout of each node in turn, and begins another."""
        held = await self.fill()
        before = await self.cpu()
        calls, share = self.ledger.calls, self.in_flight // self.nodes
        for number in range(rollouts):
            node = number % self.nodes
            mine = held[node]
            ending = mine.popleft()
            for state in ACTIVE[1:]:
                await self.ledger.do(calls.advance(ending.rollout_id, ending.token, state))
            await self.ledger.do(calls.commit(ending.rollout_id, ending.token, DONE))
            if len(self._doorbells) < self.waiting:
                await self.submit()
            mine.append(await self.claim(node))
            if (number // self.nodes) % max(1, share // RENEWALS) == 0:
                await self.ledger.do(calls.renew([(c.rollout_id, c.token) for c in mine], LEASE_S))
        after = await self.cpu()
        self.cost = Cost(*((b - a) / rollouts * 1e6 for a, b in zip(before, after, strict=True)))

    async def cpu(self) -> tuple[float, float]:
        info = await self.ledger.redis.info("cpu")
        return info["used_cpu_user"] + info["used_cpu_sys"], time.process_time()


async def measure(waiting: int, in_flight: int, nodes: int, rollouts: int) -> Cost:
    """In a server of its own, so that nothing is left of the setting before."""
    with EmbeddedRedis() as server:
        async with AsyncLedger(server.url, Calls(Keys("scale"))) as ledger:
            bench = Bench(ledger, waiting, in_flight, nodes)
            await bench.turn_over(rollouts)
            return bench.cost


def main() -> None:
    parser = argparse.ArgumentParser(description="What a rollout costs the ledger at scale.")
    parser.add_argument("--rollouts", type=int, default=4000, help="measured in each setting")
    options = parser.parse_args()
    settings = [(100, 20, 20), (1_000, 200, 20), (10_000, 2_000, 20), (100, 20, 20)]
    base: Cost | None = None
    print(f"{'waiting':>8} {'in flight':>9} {'nodes':>5}   {'Redis us':>8} {'ratio':>5}   {'nodes us':>8} {'ratio':>5}")
    for waiting, in_flight, nodes in settings:
        cost = asyncio.run(measure(waiting, in_flight, nodes, options.rollouts))
        base = base or cost
        redis_ratio, nodes_ratio = cost.redis_us / base.redis_us, cost.nodes_us / base.nodes_us
        print(
            f"{waiting:>8} {in_flight:>9} {nodes:>5}   {cost.redis_us:8.0f} {redis_ratio:5.2f}"
            f"   {cost.nodes_us:8.0f} {nodes_ratio:5.2f}"
        )


if __name__ == "__main__":
    main()
