"""What is done to a fleet, every few seconds, by a seeded random; and how all of it is healed."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import redis
from redis.asyncio import Redis as AsyncRedis

from polarq.errors import PolarqError
from polarq.testing.stack import PartDidNotStart
from tests.durable.chaos.fleet import DRAIN_GRACE_S, LEASE_S, NODES, Fleet
from tests.durable.chaos.load import Load
from tests.pauses import set_pause

DRAIN_LIMIT_S = DRAIN_GRACE_S + 45.0
"""Until a worker that was told to stop must be gone, on a machine that is busy."""
NODE_BACK_S = 180.0


@dataclass(frozen=True)
class Killed:
    """A worker that was killed, by the wall clock (the server's too: it is one machine)."""

    node: str
    at: float


@dataclass
class Trouble:
    """Makes it. Everything runs on the calling thread, `step` by `step`."""

    fleet: Fleet
    load: Load
    chance: random.Random
    say: Callable[[str], None]
    done: Counter[str] = field(default_factory=Counter)
    kills: list[Killed] = field(default_factory=list)
    stopped: list[tuple[str, float, float]] = field(default_factory=list)
    """(node, from, to) on the monotonic clock: it was stopped, and its harnesses were not."""
    problems: list[str] = field(default_factory=list)
    _busy: set[str] = field(default_factory=set)
    """Nodes that something is being done to."""
    _started: dict[str, float] = field(default_factory=dict)
    """When a worker was last started again, on the monotonic clock."""
    _redis_back: float = -1.0
    """When Redis last came back, on the monotonic clock."""
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _rolling: bool = False
    """Every worker is being restarted, one after the other."""
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def run(self, seconds: float) -> None:
        ways = [self.kill_worker] * 4 + [self.stop_worker, self.drain_worker, self.kill_proxy, self.cut_connections] * 2
        ways += [self.kill_redis, self.cancel_task, self.cancel_task, self.cancel_rollout, self.pause_inference]
        ways += [self.rolling_restart, self.forget_scripts, self.lose_messages, self.double_messages]
        ways += [self.set_clock] * (2 if self.fleet.clocks else 0)
        until = time.monotonic() + seconds
        next_at = time.monotonic() + 2.0
        while time.monotonic() < until:
            if time.monotonic() >= next_at:
                self.chance.choice(ways)()
                next_at = time.monotonic() + self.chance.uniform(1.5, 5.0)
            self._what_is_due()
            self._supervise()
            time.sleep(0.05)

    def heal(self) -> None:
        """What was begun is ended; returns when every node is back."""
        deadline = time.monotonic() + NODE_BACK_S
        while self._later and time.monotonic() < deadline:
            self._what_is_due()
            time.sleep(0.05)
        self._supervise()
        for node in NODES:
            try:
                self.fleet.stack.wait_for_node(node)
            except PartDidNotStart as exc:
                self.problems.append(f"{node} does not come back: {exc}\n{exc.last_lines}")

    def _what_is_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._number), then))

    def _a_node(self) -> str | None:
        """One that is left alone so far, as long as another one is too."""
        free = [node for node in NODES if node not in self._busy]
        return self.chance.choice(free) if len(free) > 1 else None

    def _supervise(self) -> None:
        """As an operator's service manager: a worker that has ended is started again."""
        for node in NODES:
            if node in self._busy or not self.fleet.worker_ended(node):
                continue
            if self._redis_back >= self._started.get(node, 0.0):
                # No worker starts without a ledger: it says so in one line and ends.
                self._did("worker started again, as Redis was away at its start", node)
            else:
                self.problems.append(f"the worker of {node} has ended by itself")
            self._back(node)

    def _back(self, node: str) -> None:
        self._started[node] = time.monotonic()
        self.fleet.start_worker(node)
        # It is not touched again before it had time to come up.
        self._busy.add(node)
        self._after(4.0, lambda: self._busy.discard(node))

    def _did(self, what: str, where: str = "") -> None:
        self.done[what] += 1
        self.say(f"{what} {where}".rstrip())

    # --- the ways

    def kill_worker(self) -> None:
        node = self._a_node()
        if node is None:
            return
        self._did("worker killed", node)
        self.fleet.kill_worker(node)
        self.kills.append(Killed(node, time.time()))
        self._busy.add(node)
        self._after(self.chance.choice([0.0, 0.5, 3 * LEASE_S]), lambda: self._back(node))

    def stop_worker(self) -> None:
        node = self._a_node()
        if node is None:
            return
        self._did("worker stopped past its lease", node)
        self.fleet.signal_worker(node, signal.SIGSTOP)
        self._busy.add(node)
        began = time.monotonic()

        def go_on() -> None:
            self.fleet.signal_worker(node, signal.SIGCONT)
            self.stopped.append((node, began, time.monotonic()))
            self._after(2.0, lambda: self._busy.discard(node))

        self._after(LEASE_S * self.chance.uniform(1.2, 2.0), go_on)

    def drain_worker(self) -> None:
        node = self._a_node()
        if node is None:
            return
        self._did("worker drained", node)
        self._drain(node)

    def _drain(self, node: str) -> None:
        """It is started again when it has gone."""
        self.fleet.signal_worker(node, signal.SIGTERM)
        self._busy.add(node)
        deadline = time.monotonic() + DRAIN_LIMIT_S

        def look() -> None:
            if self.fleet.worker_ended(node):
                self._back(node)
            elif time.monotonic() > deadline:
                self.problems.append(f"{node} was told to stop and did not within {DRAIN_LIMIT_S:g} s")
                self.fleet.kill_worker(node)
                self._back(node)
            else:
                self._after(0.2, look)

        self._after(0.2, look)

    def rolling_restart(self) -> None:
        if not self._rolling:
            self._did("rolling restart of every worker")
            self._rolling = True
            self._roll(list(NODES))

    def _roll(self, left: list[str], before: str | None = None) -> None:
        """The next one, as soon as the one before is back and nothing else is being done to it."""
        if self._busy.intersection([before, *left[:1]]):
            self._after(0.5, lambda: self._roll(left, before))
        elif not left:
            self._rolling = False
        else:
            self._drain(left[0])
            self._roll(left[1:], left[0])

    def kill_proxy(self) -> None:
        node = self._a_node()
        # A worker whose proxy is killed before it was ready says so and ends, as it should.
        if node is not None and self.fleet.is_up(node) and self.fleet.kill_proxy(node):
            self._did("proxy killed", node)

    def cut_connections(self) -> None:
        self._did("all connections to Redis cut")
        with redis.Redis.from_url(self.fleet.redis.url) as client:
            for kind in ("normal", "pubsub"):
                client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    def kill_redis(self) -> None:
        away_s = self.chance.uniform(0.2, 1.5 * LEASE_S)
        self._did("Redis killed", f"for {away_s:.1f} s")
        self.fleet.kill_redis(away_s)
        self._redis_back = time.monotonic()

    def lose_messages(self) -> None:
        self._in_queues("messages lost", lambda queues, name, _: queues.delete(name))

    def double_messages(self) -> None:
        self._in_queues("messages doubled", lambda queues, name, messages: queues.rpush(name, *messages))

    def _in_queues(self, what: str, change: Callable[[redis.Redis, str, list[bytes]], object]) -> None:
        """Done to each queue of a node that holds messages now."""
        keys = self.fleet.stack.client.ledger.calls.keys
        with redis.Redis.from_url(self.fleet.redis.url) as client:
            for name in (name for node in NODES for name in keys.queue_lists(node)):
                if messages := client.lrange(name, 0, -1):
                    change(client, name, messages)
                    self._did(what, f"{len(messages)} of {name}")

    def forget_scripts(self) -> None:
        self._did("Redis made to forget its scripts")
        with redis.Redis.from_url(self.fleet.redis.url) as client:
            client.script_flush()

    def set_clock(self) -> None:
        """Its leases, the times it is judged by and how long its stages take must not change by it."""
        node = self.chance.choice(sorted(self.fleet.clocks))
        ahead_s = self.chance.choice([-3600, -400, 0, 400, 3600])
        self._did("clock of a node set", f"{node}, {ahead_s:+d} s")
        self.fleet.clocks[node].set(ahead_s)

    def cancel_task(self) -> None:
        self._cancel(None)

    def cancel_rollout(self) -> None:
        self._cancel(0)

    def _cancel(self, index: int | None) -> None:
        waiting = self.load.open_tasks
        if not waiting:
            return
        task_id = self.chance.choice(waiting)
        what = task_id if index is None else f"{task_id}.{index}"
        try:
            self.fleet.stack.client.cancel(what)
        except PolarqError:
            return  # not recorded yet, or Redis is just away: nothing was asked
        self._did("task cancelled" if index is None else "rollout cancelled", what)

    def pause_inference(self) -> None:
        import asyncio

        lease_s = self.chance.uniform(1.0, 4.0)
        self._did("inference paused", f"for {lease_s:.1f} s")

        async def pause() -> None:
            keys = self.fleet.stack.client.ledger.calls.keys
            async with AsyncRedis.from_url(self.fleet.redis.url) as client:
                await set_pause(client, keys, lease_s=lease_s)

        try:
            asyncio.run(pause())
        except PolarqError:
            return
