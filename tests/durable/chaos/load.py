"""The stream of short rollouts, and what trainers see of it: submitted, followed, remembered as first seen, taken."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from polarq.client import Client
from polarq.contracts.event import Event
from polarq.contracts.rollout import RolloutResult, RolloutState
from polarq.contracts.task import Task
from polarq.errors import LedgerUnavailable, NotQueued, PolarqError, ResultTimeout, TaskNotFound
from polarq.ledger import Call, Keys
from polarq.ledger.records import decode
from polarq.testing.stack import LocalStack
from tests.durable.chaos.receiver import Receiver

MAX_OPEN = 24
"""Rollouts that have not ended: the stream goes as fast as the machine."""
AGENT_S = 60.0
HARNESS = Path(__file__).with_name("harness.py")
LOOK_AGAIN_S = 5.0
KEPT, TAKEN = "kept", "taken"
"""Two runs: results of one stay in the store; a trainer takes and acknowledges those of the other as they commit."""


class Load:
    """Three threads: one submits, one follows the events, one takes results. All go on whatever happens to Redis."""

    def __init__(self, stack: LocalStack, log: Path, seed: int, receiver: Receiver) -> None:
        self._stack = stack
        self._receiver = receiver
        self._log = log
        self._random = random.Random(seed)
        self.submitted: dict[str, Task] = {}
        self.calls: dict[str, int] = {}
        """Model calls that a rollout of the task makes."""
        self.events: list[Event] = []
        self.first_seen: dict[str, str] = {}
        """rollout_id -> its summary when its end was first heard of, as the ledger had it."""
        self.taken: dict[str, RolloutResult] = {}
        """rollout_id -> the result that the trainer got, once it had acknowledged it."""
        self.problems: list[str] = []
        self._ended: set[str] = set()
        self._stop_submitting = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), name=f"chaos {work.__name__}", daemon=True)
            for work in (self._submit, self._follow, self._take)
        ]

    def start(self) -> None:
        with Client(self._stack.topology, self._stack.settings) as client:
            self._after = client.ledger.do(client.ledger.calls.last_event_id())
        for thread in self._threads:
            thread.start()

    def stop_submitting(self) -> None:
        self._stop_submitting.set()
        self._threads[0].join(120)
        if self._threads[0].is_alive():
            self.problems.append("the submitter hangs")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self.problems.append(f"{thread.name} hangs")

    @property
    def rollout_ids(self) -> list[str]:
        return [task.rollout_id(i) for task in list(self.submitted.values()) for i in range(task.num_samples)]

    @property
    def open_tasks(self) -> list[str]:
        return [
            task_id
            for task_id, task in list(self.submitted.items())
            if any(task.rollout_id(i) not in self._ended for i in range(task.num_samples))
        ]

    def _watched(self, work: Callable[[Client], None]) -> None:
        try:
            with Client(self._stack.topology, self._stack.settings) as client:
                work(client)
        except Exception as exc:
            self.problems.append(f"{work.__name__} ended with {type(exc).__name__}: {exc}")

    def _submit(self, client: Client) -> None:
        number = 0
        while not self._stop_submitting.is_set():
            if len(self.rollout_ids) - len(self._ended) >= MAX_OPEN:
                self._stop_submitting.wait(0.1)
                continue
            task = self._task(number)
            number += 1
            self.submitted[task.task_id] = task
            while True:
                try:
                    client.submit(task)
                    break
                except (NotQueued, LedgerUnavailable):
                    # As the error says: again, under its id it is the same task.
                    time.sleep(0.2)
            self._stop_submitting.wait(self._random.uniform(0.0, 0.3))

    def _task(self, number: int) -> Task:
        choose = self._random
        calls, think_s = choose.choice([1, 2]), choose.choice([0.05, 0.2, 0.5, 0.5, 1.5, 5.0])
        command = f"{sys.executable} -S {HARNESS} {self._log} {calls} {think_s}"
        task_id = f"chaos-{number:04d}"
        self.calls[task_id] = calls
        return Task.load(
            {
                "task_id": task_id,
                "instruction": "Say something.",
                "num_samples": choose.choice([1, 1, 2, 4]),
                "callback_url": self._receiver.url(task_id),
                "timeout_seconds": AGENT_S,
                "agent": {"harness": "shell", "custom_shell": {"command": command}},
                "runtime": {"backend": "local"},
                "evaluator": {"strategy": "session_completed"},
                "placement": {"policy": choose.choice(["spread", "spread", "together"])},
                "run_id": choose.choice([KEPT, TAKEN]),
            }
        )

    def _take(self, client: Client) -> None:
        """As a trainer's loop that is begun again after each fault, and goes on with what it has not acknowledged."""
        while not self._stop.is_set():
            try:
                for result in client.results(run_id=TAKEN, timeout_s=LOOK_AGAIN_S):
                    if result.rollout_id in self.taken:
                        self.problems.append(f"{result.rollout_id} came again after it was acknowledged")
                    client.acknowledge([result.rollout_id])
                    self.taken[result.rollout_id] = result
            except (LedgerUnavailable, TaskNotFound, ResultTimeout):
                pass  # Redis is away, nothing was submitted yet, or it is time to look whether to stop
            self._stop.wait(0.2)

    def _follow(self, client: Client) -> None:
        ledger = client.ledger
        while not self._stop.is_set():
            try:
                events = ledger.wait_events(self._after, 0.5)
                for event in events:
                    self._heard(client, event)
                    self.events.append(event)
                    self._after = event.event_id
            except PolarqError:
                # LedgerUnavailable: nothing is missed, the reading goes on after the last event that was dealt with.
                time.sleep(0.1)

    def _heard(self, client: Client, event: Event) -> None:
        rollout_id = event.data.get("session_id")
        if event.type != "session.state_changed" or rollout_id is None:
            return
        if RolloutState(event.data["status"]).terminal and rollout_id not in self.first_seen:
            self.first_seen[rollout_id] = client.ledger.do(summary_text(client.ledger.calls.keys, rollout_id))
            self._ended.add(rollout_id)


def summary_text(keys: Keys, rollout_id: str) -> Call[str]:
    """A rollout's summary, letter for letter; blank when there is none."""
    command = ("HGET", keys.rollout(rollout_id), "summary")
    return Call(lambda replies: "" if replies[0] is None else decode(replies[0]), commands=(command,))
