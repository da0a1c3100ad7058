"""What a rollout costs the ledger when many wait and many run: `python benchmarks/ledger_scale.py`.

Nodes are simulated by coroutines that only take doorbells, claim what stands first in line, advance, renew and commit,
over one private Redis; beside them a trainer keeps as much waiting as there was. Queues are short: a doorbell is rung
for a place, by the node itself, as real nodes do. With `--long` there is one doorbell per rollout from the start. The
CPU time of Redis (INFO) and of the nodes' process, per rollout, is compared with that of the smallest setting in the
same run, which is measured twice to show the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from polarq.client.routing import ahead
from polarq.contracts import Outcome, RolloutState, RolloutSummary, Task
from polarq.ledger import AsyncLedger, Calls, Claim, Keys
from polarq.ledger.admission import Place
from polarq.ledger.reaping import queue_depths
from polarq.ledger.states import ACTIVE
from polarq.testing.redis import EmbeddedRedis

GROUP = 8
ROUND = 100
"""Rollouts of a setting before it is the next one's turn."""
RENEWALS = 4
"""Per rollout, all of a node's in one call: what an attempt of one lease's length needs."""
LEASE_S = 3600.0
MESSAGE = b"x" * 900
"""About what Celery puts around the id in a doorbell."""
DONE = RolloutSummary(outcome=Outcome(state=RolloutState.COMPLETED, trainable=True), reward=1.0, calls=4, traces=4)


@dataclass
class Bench:
    """One setting: rollouts that wait, rollouts that run, nodes they run on."""

    ledger: AsyncLedger
    waiting: int
    in_flight: int
    nodes: int
    long: bool
    _number: int = 0
    _left: int = 0
    """Rollouts that wait."""
    longest: int = 0
    """Doorbells in the longest queue there was."""
    redis_s: float = 0.0
    nodes_s: float = 0.0
    """CPU time."""

    def queue(self, node: int) -> str:
        return self.ledger.calls.keys.queue_lists(f"node{node}")[0]

    async def ring(self, node: int, rollout_ids: list[str]) -> None:
        redis: Any = self.ledger.redis
        if rollout_ids:
            await redis.lpush(self.queue(node), *(f"{i} ".encode() + MESSAGE for i in rollout_ids))

    async def submit(self) -> None:
        """One group. All places are taken, so that nothing is rung unless the queues are to be long."""
        agent = {"harness": "shell", "custom_shell": {"command": "true"}}
        task = Task.load({"task_id": f"t{self._number}", "instruction": "do it", "num_samples": GROUP, "agent": agent})
        self._number += 1
        await self.ledger.do(self.ledger.calls.submit(task, task.task_id))
        self._left += GROUP
        if self.long:
            for index in range(GROUP):
                await self.ring((self._number * GROUP + index) % self.nodes, [task.rollout_id(index)])

    async def seek(self, node: int) -> None:
        """As `polarq_worker.work` does for a node all of whose places are taken but one."""
        calls, more = self.ledger.calls, ahead(self.in_flight // self.nodes)
        heard = (await self.ledger.do(queue_depths(calls, [f"node{node}"])))[f"node{node}"]
        self.longest = max(self.longest, heard)
        if not self.long and heard < 1 + more // 2:
            await self.ring(node, (await self.ledger.do(calls.look(self.place(node), 1 + more)))[heard:])

    def place(self, node: int) -> Place:
        return Place(f"node{node}", {}, "", ["local"], True, {})

    async def claim(self, node: int) -> Claim:
        redis: Any = self.ledger.redis
        while (message := await redis.rpop(self.queue(node))) is None:
            assert not self.long
            await self.seek(node)
        rollout_id = message.split(b" ")[0].decode()
        call = self.ledger.calls.claim(rollout_id, f"node{node}", LEASE_S, "job", self.place(node))
        claim = await self.ledger.do(call)
        if not isinstance(claim, Claim):
            return await self.claim(node)
        self._left -= 1
        return claim

    async def fill(self) -> None:
        while self._left < self.waiting + self.in_flight:
            await self.submit()
        share = self.in_flight // self.nodes
        self._held = [deque([await self.claim(node) for _ in range(share)]) for node in range(self.nodes)]

    async def turn_over(self, rollouts: int) -> None:
        """Ends the oldest rollout of each node in turn, and begins another."""
        before = await self.cpu()
        calls, share = self.ledger.calls, self.in_flight // self.nodes
        for number in range(rollouts):
            node = number % self.nodes
            mine = self._held[node]
            ending = mine.popleft()
            for state in ACTIVE[1:]:
                await self.ledger.do(calls.advance(ending.rollout_id, ending.token, state))
            await self.ledger.do(calls.commit(ending.rollout_id, ending.token, DONE))
            if self._left < self.waiting:
                await self.submit()
            mine.append(await self.claim(node))
            await self.seek(node)
            if (number // self.nodes) % max(1, share // RENEWALS) == 0:
                await self.ledger.do(calls.renew([(c.rollout_id, c.token) for c in mine], LEASE_S))
        after = await self.cpu()
        self.redis_s += after[0] - before[0]
        self.nodes_s += after[1] - before[1]

    async def cpu(self) -> tuple[float, float]:
        info = await self.ledger.redis.info("cpu")
        return info["used_cpu_user"] + info["used_cpu_sys"], time.process_time()


async def measure(settings: Sequence[tuple[int, int, int]], rounds: int, long: bool) -> list[Bench]:
    """Each setting in a server of its own. They take turns, so that whatever else the machine does hits all of them."""
    async with AsyncExitStack() as stack:
        benches = []
        for waiting, in_flight, nodes in settings:
            server = stack.enter_context(EmbeddedRedis())
            ledger = await stack.enter_async_context(AsyncLedger(server.url, Calls(Keys("scale"))))
            benches.append(Bench(ledger, waiting, in_flight, nodes, long))
        for bench in benches:
            await bench.fill()
        for _ in range(rounds):
            for bench in benches:
                await bench.turn_over(ROUND)
        return benches


def main() -> None:
    parser = argparse.ArgumentParser(description="What a rollout costs the ledger at scale.")
    parser.add_argument("--rollouts", type=int, default=4000, help="measured in each setting")
    parser.add_argument("--long", action="store_true", help="one doorbell per rollout from the start")
    options = parser.parse_args()
    settings = [(100, 20, 20), (1_000, 200, 20), (10_000, 2_000, 20), (100, 20, 20)]
    benches = asyncio.run(measure(settings, max(1, options.rollouts // ROUND), options.long))
    base = benches[0]
    measured = max(1, options.rollouts // ROUND) * ROUND
    print(
        f"{'waiting':>8} {'in flight':>9} {'nodes':>5}   {'Redis us':>8} {'ratio':>5}   {'nodes us':>8} {'ratio':>5}   "
        f"{'longest':>7}"
    )
    for bench in benches:
        print(
            f"{bench.waiting:>8} {bench.in_flight:>9} {bench.nodes:>5}"
            f"   {bench.redis_s / measured * 1e6:8.0f} {bench.redis_s / base.redis_s:5.2f}"
            f"   {bench.nodes_s / measured * 1e6:8.0f} {bench.nodes_s / base.nodes_s:5.2f}   {bench.longest:7}"
        )


if __name__ == "__main__":
    main()
