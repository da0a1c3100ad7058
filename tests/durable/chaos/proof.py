"""After a chaos run: what the ledger, the store, the events and the harnesses' own log prove; a line is a failure."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from polarq.client import Client
from polarq.contracts.rollout import RolloutResult, RolloutState, RolloutSummary
from polarq.errors import PolarqError, TaskNotFound
from polarq.ledger import TaskRecord
from tests.durable.chaos.fleet import NODES, Fleet
from tests.durable.chaos.load import AGENT_S, TAKEN, Load, summary_text
from tests.durable.chaos.receiver import Receiver
from tests.durable.chaos.trouble import Killed, Trouble
from tests.durable.key_layout import strangers

ALL_ENDED_S = 240.0
TIDY_S = 60.0
CALLBACKS_S = 150.0
"""A claim of a worker that died runs out first; then the reaper has another one deliver."""
TOGETHER_S = 1.0
"""How long an attempt may outlast the beginning of the next one: ending a process takes a moment on a busy machine."""


@dataclass
class Attempt:
    """One run of a harness, by its own account."""

    began: float
    last: float
    ended: bool = False
    answers: list[str] = field(default_factory=list)


@dataclass
class Proof:
    """See the module."""

    fleet: Fleet
    load: Load
    trouble: Trouble
    receiver: Receiver
    log: Path
    broken: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        return self.fleet.stack.client

    # --- while the fleet still runs

    def all_end(self) -> None:
        began = time.monotonic()
        open_tasks = set(self.load.submitted)

        def none_open() -> bool:
            for task_id in sorted(open_tasks):
                try:
                    if self.client.head(task_id).state.terminal:
                        open_tasks.discard(task_id)
                except TaskNotFound:
                    self.broken.append(f"{task_id} was submitted and is not in the ledger")
                    open_tasks.discard(task_id)
            return not open_tasks

        if not _within(ALL_ENDED_S, none_open):
            for task_id in sorted(open_tasks):
                where = [(r.rollout_id, r.state.value, r.owner) for r in self.client.record(task_id).rollouts]
                self.broken.append(f"{task_id} has not ended after {ALL_ENDED_S:g} s: {where}")
        self.figures["from the last trouble to the last end"] = f"{time.monotonic() - began:.1f} s"

    def all_is_taken(self) -> None:
        """The trainer got each result of its run."""
        wanted = {
            task.rollout_id(i)
            for task in self.load.submitted.values()
            if task.run_id == TAKEN
            for i in range(task.num_samples)
        }
        if not _within(TIDY_S, lambda: wanted <= self.load.taken.keys()):
            self.broken.append(f"the trainer never got {sorted(wanted - self.load.taken.keys())}")
        self.figures["results taken and acknowledged"] = len(self.load.taken)

    def callbacks(self) -> None:
        """Each task's end was told to its trainer: at least once, signed, always as the same delivery."""
        taken = self.receiver.taken
        missing = set(self.load.submitted)

        def all_told() -> bool:
            missing.difference_update([task_id for task_id in missing if taken.get(task_id)])
            return not missing

        if not _within(CALLBACKS_S, all_told):
            self.broken.extend(f"the callback of {task_id} was never delivered" for task_id in sorted(missing))
        for task_id, deliveries in sorted(taken.items()):
            if len({delivery.delivery_id for delivery in deliveries}) != 1:
                self.broken.append(f"the callback of {task_id} came under several ids: {deliveries}")
            if not all(delivery.signed for delivery in deliveries):
                self.broken.append(f"the callback of {task_id} was not signed as it should be")
            whole = (task_id, self.load.submitted[task_id].num_samples)
            if any((delivery.task_id, delivery.ended) != whole for delivery in deliveries):
                self.broken.append(f"the callback of {task_id} told of something else: {deliveries}")
        self.figures["callbacks"] = len(taken)
        self.figures["callbacks delivered more than once"] = sum(len(found) > 1 for found in taken.values())
        self.figures["callbacks that the receiver failed at first"] = dict(self.receiver.failed)

    def nodes_are_empty(self) -> None:
        """Sandboxes, leases, queues: nothing is left on a node that has nothing to do."""
        keys, redis = self.client.ledger.calls.keys, self.client.ledger.redis

        def queued() -> int:
            return sum(int(redis.llen(name)) for queue in [*NODES, "polarq"] for name in keys.queue_lists(queue))

        if not _within(TIDY_S, lambda: not self.fleet.sandboxes):
            self.broken.append(f"sandbox folders are left: {self.fleet.sandboxes}")
        if not _within(TIDY_S, lambda: not queued()):
            self.broken.append(f"{queued()} messages are left in the queues of nodes that are idle")
        for name in (keys.leases, keys.waiting):
            if left := redis.zrange(name, 0, -1):
                self.broken.append(f"{name} still holds {left}")

    # --- when the workers have stopped

    def processes_are_gone(self) -> None:
        if not _within(TIDY_S, lambda: not self.fleet.processes):
            self.broken.extend(f"a process is left: {line}" for line in self.fleet.processes)

    def records(self) -> None:
        """One visible end each, unchanged since it was first seen, its payload readable and fitting."""
        attempts = self._attempts()
        ends, reasons = Counter[str](), Counter[str]()
        said = self._ends_told()
        for task_id in self.load.submitted:
            try:
                record = self.client.record(task_id)
            except TaskNotFound:
                continue  # said already
            self._counters_fit(record)
            for rollout in record.rollouts:
                if not rollout.state.terminal or rollout.summary is None:
                    self.broken.append(f"{rollout.rollout_id} is {rollout.state.value} and has no end")
                    continue
                ends[rollout.state.value] += 1
                outcome = rollout.summary.outcome
                if rollout.state in {RolloutState.FAILED, RolloutState.TIMED_OUT}:
                    reasons[f"{outcome.boundary.value}/{outcome.reason}: {outcome.message[:100]}"] += 1
                if said[rollout.rollout_id] != [rollout.state.value]:
                    self.broken.append(f"{rollout.rollout_id} ended in events as {said[rollout.rollout_id]}")
                now = self.client.ledger.do(summary_text(self.client.ledger.calls.keys, rollout.rollout_id))
                if self.load.first_seen.get(rollout.rollout_id) != now:
                    self.broken.append(f"the end of {rollout.rollout_id} is not the one first seen")
                self._payload_fits(rollout.rollout_id, rollout.token, rollout.summary, attempts)
        self.figures["rollouts"] = dict(ends)
        self.figures["failures"] = dict(reasons)
        self._never_twice(attempts)

    def _counters_fit(self, record: TaskRecord) -> None:
        states = Counter(r.state.value for r in record.rollouts)
        counts = record.counts.model_dump()
        wrong = {
            end: counts[end] for end in ("completed", "failed", "timed_out", "cancelled") if counts[end] != states[end]
        }
        if wrong or counts["total"] != len(record.rollouts):
            self.broken.append(f"{record.task_id}: its counters {counts} are not its rollouts {dict(states)}")

    def _payload_fits(
        self, rollout_id: str, token: int, summary: RolloutSummary, attempts: dict[tuple[str, int], Attempt]
    ) -> None:
        if summary.payload is None:
            if summary.outcome.state is not RolloutState.CANCELLED:
                self.broken.append(f"{rollout_id} {summary.outcome.state.value} without a payload")
            return
        taken = self.load.taken.get(rollout_id)
        try:
            result = self.client.rollout(rollout_id) if taken is None else taken
        except PolarqError as exc:
            self.broken.append(f"the payload of {rollout_id} cannot be read: {exc}")
            return
        if any(spent is not None and spent < 0 for spent in result.timing.model_dump().values()):
            self.broken.append(f"{rollout_id} spent less than no time: {result.timing}")
        if not summary.payload.key.endswith(f"-{token}"):
            self.broken.append(f"{rollout_id}: {summary.payload.key} won, and the last token given out was {token}")
        reward = None if result.reward is None else result.reward.outcome
        if (result.outcome, reward) != (summary.outcome, summary.reward):
            self.broken.append(f"{rollout_id}: its payload says {result.outcome}, {reward}; the ledger {summary}")
        if summary.outcome.state is RolloutState.COMPLETED:
            attempt = attempts.get((rollout_id, token))
            if attempt is None or not attempt.ended:
                self.broken.append(f"{rollout_id} completed under token {token}, and that harness did not end well")
            else:
                self._calls_fit(rollout_id, attempt, result)
            if reward != 1.0:
                self.broken.append(f"{rollout_id} completed with the reward {reward}")

    def _calls_fit(self, rollout_id: str, attempt: Attempt, result: RolloutResult) -> None:
        """Each answer that the harness got is in the trajectory once, and nothing else is."""
        traces = result.trajectory.traces if result.trajectory is not None else []
        said = [m["content"].replace(" ", "_") for t in traces for m in t.response_messages if m["role"] == "assistant"]
        if sorted(said) != sorted(attempt.answers):
            self.broken.append(f"{rollout_id}: the harness was answered {attempt.answers}, the trajectory has {said}")

    def _never_twice(self, attempts: dict[tuple[str, int], Attempt]) -> None:
        """No attempt goes on when the next one has begun. A stopped worker cannot end its own, until it goes on."""
        by_rollout = defaultdict(list)
        for (rollout_id, token), attempt in attempts.items():
            by_rollout[rollout_id].append((token, attempt))
        excused, longest = 0, 0.0
        for rollout_id, runs in by_rollout.items():
            runs.sort()
            for (old, first), (new, second) in pairwise(runs):
                together = first.last - second.began
                longest = max(longest, together)
                if together <= TOGETHER_S:
                    continue
                if any(
                    began <= second.began and first.last <= to + 2 * TOGETHER_S for _, began, to in self.trouble.stopped
                ):
                    excused += 1
                    continue
                self.broken.append(f"{rollout_id}: attempt {old} ran for {together:.1f} s beside attempt {new}")
        self.figures["harness runs"] = len(attempts)
        self.figures["runs that outlasted a lease while their worker was stopped"] = excused
        self.figures["longest time two attempts ran together"] = f"{max(0.0, longest):.2f} s"

    def _attempts(self) -> dict[tuple[str, int], Attempt]:
        attempts: dict[tuple[str, int], Attempt] = {}
        for line in self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []:
            word, rollout_id, token, at, detail = line.split(" ")
            name = (rollout_id, int(token))
            if word == "begin" and name in attempts:
                self.broken.append(f"{rollout_id} began twice under token {token}")
            attempt = attempts.setdefault(name, Attempt(float(at), float(at)))
            attempt.last = float(at)
            attempt.ended = attempt.ended or word == "end"
            if word == "answered":
                attempt.answers.append(detail)
        return attempts

    def _ends_told(self) -> dict[str, list[str]]:
        told: dict[str, list[str]] = defaultdict(list)
        for event in self.load.events:
            if event.type == "session.state_changed" and RolloutState(event.data["status"]).terminal:
                told[event.data["session_id"]].append(event.data["status"])
        return told

    def keys(self) -> None:
        """Nothing strange in Redis, and nothing of a task that would stay for ever."""
        keys, redis = self.client.ledger.calls.keys, self.client.ledger.redis
        names = list(redis.scan_iter(match=f"{keys.prefix}:*", count=1000))
        self.broken.extend(f"nobody is known to write the key {name}" for name in strangers(names, keys))
        for name in names:
            if b"{" in name and redis.ttl(name) == -1:
                self.broken.append(f"the key {name.decode()} never expires")
        grants = [name for name in names if name.decode().startswith(keys.grant(""))]
        still_open = [name for name in grants if redis.hget(name, "state") == b"open"]
        for name in still_open:
            if not 0 < redis.ttl(name) <= AGENT_S + 180:
                self.broken.append(f"the grant {name.decode()} stays open")
        self.figures["keys"] = len(names)
        self.figures["grants of killed workers, open until they expire"] = len(still_open)

    # --- figures

    def recovery(self, kills: list[Killed]) -> None:
        """From a worker's death to the next claim of each rollout that it held."""
        waits: list[tuple[float, str]] = []
        for kill in kills:
            held: set[str] = set()
            for event in self.load.events:
                if event.type != "session.state_changed":
                    continue
                rollout_id, at = event.data["session_id"], event.at.timestamp()
                status = RolloutState(event.data["status"])
                if at <= kill.at:
                    ours = event.data.get("node_id") == kill.node and status is not RolloutState.QUEUED
                    (held.add if ours and not status.terminal else held.discard)(rollout_id)
                elif rollout_id in held and (status is RolloutState.PREPARING or status.terminal):
                    held.discard(rollout_id)
                    if status is RolloutState.PREPARING:
                        waits.append((at - kill.at, f"{rollout_id} of {kill.node}"))
        self.figures["rollouts held by killed workers and claimed again"] = len(waits)
        if waits:
            self.figures["kill to next claim"] = (
                f"median {median(wait for wait, _ in waits):.1f} s, max {max(waits)[0]:.1f} s ({max(waits)[1]})"
            )


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
