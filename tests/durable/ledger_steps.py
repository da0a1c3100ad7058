"""The steps of the ledger's machine: hypothesis makes them, the real Lua takes them, the model says what is right."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from polarq.contracts import Outcome, RolloutState, RolloutSummary
from polarq.errors import StepRefused, TaskConflict
from polarq.ledger import Call, Calls, Claim, Keys, Ledger, Refused, Released
from polarq.ledger.scripts import Script
from polarq.ledger.states import ACTIVE, TRANSITIONS
from tests.durable.ledger_model import RUNS, RolloutModel, Story, TaskModel, Ticket, a_task

S = RolloutState
T = TypeVar("T")

ENDS = (S.COMPLETED, S.FAILED, S.TIMED_OUT, S.CANCELLED)
NODES = ("node0", "node1", "node2")
LEASE_S = 1000.0
KEEP_S = 5000

Swaps = Mapping[str, tuple[str, str]]
"""Script name -> (text, other text): a ledger that is broken on purpose."""


class LedgerSteps(RuleBasedStateMachine):
    """See the module. `url` is a server of its own or a shared one: keys lie under a prefix of this run."""

    def __init__(self, url: str, swaps: Swaps | None = None) -> None:
        super().__init__()
        self.keys = Keys(f"machine-{secrets.token_hex(6)}")
        self.ledger = Ledger(url, Calls(self.keys, keep_s=KEEP_S))
        self.calls = self.ledger.calls
        self.redis: redis.Redis = self.ledger.redis
        self.swaps = swaps or {}
        self.tasks: dict[str, TaskModel] = {}
        self.tombstones: set[str] = set()
        self.tickets: list[Ticket] = []
        self.committed: list[tuple[Ticket, RolloutSummary]] = []
        self.story = Story()
        self.highest: dict[str, int] = {}
        self.starts: Counter[str] = Counter()

    def teardown(self) -> None:
        names = list(self.redis.scan_iter(match=f"{self.keys.prefix}:*", count=1000))
        if names:
            self.redis.delete(*names)
        self.ledger.close()

    def do(self, call: Call[T]) -> T:
        """Carries out a call, its script broken if this run is about that."""
        if call.script is not None and call.script.name in self.swaps:
            old, new = self.swaps[call.script.name]
            assert old in call.script.source, f"{call.script.name}.lua has no {old!r} any more"
            source = call.script.source.replace(old, new)
            sha1 = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
            call = dataclasses.replace(call, script=Script(call.script.name, source, sha1))
        return self.ledger.do(call)

    # --- the model's own steps

    def rollout(self, rollout_id: str) -> RolloutModel:
        task_id, _, index = rollout_id.rpartition(".")
        return self.tasks[task_id].rollouts[int(index)]

    def all_rollouts(self) -> list[RolloutModel]:
        return [rollout for task in self.tasks.values() for rollout in task.rollouts]

    def ended_one(self, task_id: str) -> None:
        """After an end: the task's event, once."""
        task = self.tasks[task_id]
        if task.ended:
            self.story.lines.append(("task.completed", task_id, task.state))

    def pick(self, data: st.DataObject) -> RolloutModel:
        return data.draw(st.sampled_from(self.all_rollouts()), label="rollout")

    def pick_ticket(self, data: st.DataObject) -> Ticket:
        """Mostly one that still holds its rollout; else any, outdated ones too."""
        current = [t for t in self.tickets if self.holds(t)]
        return data.draw(st.sampled_from(current + self.tickets), label="ticket")

    def holds(self, ticket: Ticket) -> bool:
        rollout = self.rollout(ticket.rollout_id)
        return rollout.active and rollout.token == ticket.token

    # --- the trainer's steps

    @initialize(samples=st.integers(1, 3))
    def begin(self, samples: int) -> None:
        self.submit("a", samples, "x")

    @rule(
        task_id=st.sampled_from(sorted(RUNS)),
        samples=st.integers(1, 3),
        celery_id=st.sampled_from("xyz"),
    )
    def submit(self, task_id: str, samples: int, celery_id: str) -> None:
        task, known = a_task(task_id, samples), self.tasks.get(task_id)
        refused = task_id in self.tombstones or (known is not None and known.task != task)
        try:
            done = self.do(self.calls.submit(task, celery_id))
        except TaskConflict:
            assert refused, "refused for no reason"
            return
        assert not refused, "a submission that had to be refused was taken"
        assert done.created == (known is None)
        if known is None:
            rollouts = [RolloutModel(task.rollout_id(i)) for i in range(samples)]
            self.tasks[task_id] = TaskModel(task, [celery_id], rollouts)
            self.story.lines.append(("task.created", task_id, "running"))
        elif celery_id not in known.celery_ids:
            known.celery_ids.append(celery_id)

    @rule(
        task_id=st.sampled_from(sorted(RUNS)),
        index=st.none() | st.integers(0, 3),
        tombstone_s=st.sampled_from([0, 0, 600]),
    )
    def cancel(self, task_id: str, index: int | None, tombstone_s: int) -> None:
        done = self.do(self.calls.cancel(task_id, index, tombstone_s))
        task = self.tasks.get(task_id)
        if task is None:
            assert not done.known
            assert done.registered == (tombstone_s > 0)
            if tombstone_s:
                self.tombstones.add(task_id)
            return
        if task.ended:
            assert done.already_over
            return
        if index is not None and index >= len(task.rollouts):
            assert not done.known
            return
        told = task.rollouts if index is None else [task.rollouts[index]]
        running = {(r.rollout_id, r.owner, r.job) for r in told if r.active}
        assert {(a.rollout_id, a.owner, a.job_id) for a in done.active} == running
        if index is None:
            task.cancelling = True
        some_ended = False
        for rollout in told:
            if rollout.state is S.QUEUED:
                rollout.state = S.CANCELLED
                self.story.moved(rollout)
                some_ended = True
            elif rollout.active:
                rollout.cancel = True
        if some_ended:
            self.ended_one(task_id)

    @rule(celery_id=st.sampled_from("xyz"))
    def cancel_and_submit(self, celery_id: str) -> None:
        """Mostly the cancel is the first that is heard of the task."""
        self.cancel("d", None, 600)
        self.submit("d", 1, celery_id)

    # --- the worker's steps

    @rule(data=st.data(), node=st.sampled_from(NODES))
    def claim(self, data: st.DataObject, node: str) -> None:
        rollout = self.pick(data)
        call = self.claim_call(rollout.rollout_id, node)
        self._claimed(call, rollout, node, self.do(call))

    def claim_call(self, rollout_id: str, node: str) -> Call[Claim | Refused]:
        """A claim by the node's present worker."""
        return self.calls.claim(rollout_id, node, LEASE_S, f"job-{node}", incarnation=f"{node}-{self.starts[node]}")

    def _claimed(self, call: Call[Claim | Refused], rollout: RolloutModel, node: str, answer: Claim | Refused) -> None:
        if rollout.state.terminal:
            assert answer == Refused("done", rollout.state.value)
        elif rollout.active and not rollout.lease_over:
            assert answer == Refused("busy", rollout.owner)
        else:
            assert isinstance(answer, Claim), f"not granted: {answer}"
            assert answer.token > self.highest.get(rollout.rollout_id, 0), "a token was given out twice"
            assert answer.attempt == rollout.attempt + 1
            assert answer.task == self.tasks[answer.task.task_id].task
            if rollout.active:
                rollout.was_lost()
            rollout.state, rollout.owner, rollout.job = S.PREPARING, node, f"job-{node}"
            rollout.incarnation = str(call.args[8])
            rollout.attempt, rollout.token, rollout.lease_over = answer.attempt, answer.token, False
            self.highest[rollout.rollout_id] = answer.token
            self.tickets.append(Ticket(call, rollout.rollout_id, node, answer.token, answer.attempt))
            self.story.moved(rollout)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def repeat_a_claim(self, data: st.DataObject) -> None:
        """The answer got lost, and the client library sends the same claim once more, perhaps much later."""
        ticket = self.pick_ticket(data)
        rollout = self.rollout(ticket.rollout_id)
        answer = self.do(ticket.call)
        granted = [t for t in self.tickets if t.call is ticket.call and self.holds(t)]
        if granted:
            assert isinstance(answer, Claim)
            assert (answer.token, answer.attempt) == (granted[0].token, granted[0].attempt)
        else:
            self._claimed(ticket.call, rollout, ticket.node, answer)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), anywhere=st.sampled_from([None, None, None, *ACTIVE]))
    def advance(self, data: st.DataObject, anywhere: RolloutState | None) -> None:
        ticket = self.pick_ticket(data)
        rollout = self.rollout(ticket.rollout_id)
        later = ACTIVE[ACTIVE.index(rollout.state) + 1 :] if rollout.active else ()
        to = anywhere or (later[0] if later else S.EVALUATING)
        try:
            answer = self.do(self.calls.advance(ticket.rollout_id, ticket.token, to))
        except StepRefused:
            assert self.holds(ticket)
            assert to not in TRANSITIONS[rollout.state]
            return
        if not self.holds(ticket):
            assert answer == "lost"
        elif rollout.cancel:
            assert answer == "cancel"
        else:
            assert answer == "ok"
            if rollout.state is not to:
                assert to in TRANSITIONS[rollout.state]
                rollout.state = to
                self.story.moved(rollout)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        some = [self.pick_ticket(data) for _ in range(data.draw(st.integers(1, 3), label="how many"))]
        answers = self.do(self.calls.renew([(t.rollout_id, t.token) for t in some], LEASE_S))
        for ticket, answer in zip(some, answers, strict=True):
            rollout = self.rollout(ticket.rollout_id)
            if not self.holds(ticket):
                assert answer == "lost"
                continue
            assert answer == ("cancel" if rollout.cancel else "ok")
            rollout.lease_over = False

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), end=st.sampled_from(ENDS), reward=st.none() | st.sampled_from([0.0, 0.25, 1.0]))
    def commit(self, data: st.DataObject, end: RolloutState, reward: float | None) -> None:
        ticket = self.pick_ticket(data)
        self._commit(ticket, RolloutSummary(outcome=Outcome(state=end), reward=reward))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def repeat_a_commit(self, data: st.DataObject) -> None:
        """The answer got lost. What it says the second time changes nothing, were it something else."""
        ticket, summary = data.draw(st.sampled_from(self.committed), label="commit")
        self._commit(ticket, summary.model_copy(update={"reward": 0.5}))

    def _commit(self, ticket: Ticket, summary: RolloutSummary) -> None:
        rollout, task_id = self.rollout(ticket.rollout_id), ticket.rollout_id.rpartition(".")[0]
        done = self.do(self.calls.commit(ticket.rollout_id, ticket.token, summary))
        if not self.holds(ticket):
            # Again, with the token that ended it, and to the same end: that is success, and changes nothing.
            assert done.won == (rollout.token == ticket.token and rollout.state is summary.outcome.state)
        else:
            assert done.won
            self.committed.append((ticket, summary))
            rollout.state, rollout.summary = summary.outcome.state, summary.model_dump_json()
            self.story.moved(rollout)
            self.ended_one(task_id)
        if done.won:
            assert done.finished == self.tasks[task_id].ended

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), counted=st.booleans())
    def release(self, data: st.DataObject, counted: bool) -> None:
        self._release(self.pick_ticket(data), counted)

    def _release(self, ticket: Ticket, counted: bool) -> None:
        rollout = self.rollout(ticket.rollout_id)
        done = self.do(self.calls.release(ticket.rollout_id, ticket.token, counted=counted, reason="drain"))
        assert (done is not None) == self.holds(ticket)
        if done is None:
            return
        assert done is (Released.CANCELLED if rollout.cancel else Released.QUEUED)
        if rollout.cancel:
            rollout.token += 1
            self.highest[rollout.rollout_id] = rollout.token
            rollout.state = S.CANCELLED
            self.story.moved(rollout)
            self.ended_one(rollout.rollout_id.rpartition(".")[0])
        else:
            self.given_back(rollout, counted=counted)

    def given_back(self, rollout: RolloutModel, *, counted: bool) -> None:
        """Queued again, under a token that nobody holds."""
        rollout.state, rollout.owner, rollout.job, rollout.lease_over = S.QUEUED, "", "", False
        rollout.incarnation = ""
        rollout.token += 1
        self.highest[rollout.rollout_id] = rollout.token
        if not counted:
            rollout.attempt -= 1
        self.story.moved(rollout)

    @precondition(lambda self: any(r.active for r in self.all_rollouts()))
    @rule(data=st.data())
    def a_lease_runs_out(self, data: st.DataObject) -> None:
        self.expire(data.draw(st.sampled_from([r for r in self.all_rollouts() if r.active]), label="rollout"))

    def expire(self, rollout: RolloutModel) -> None:
        """By writing the deadline into the past, where waiting would put it."""
        self.redis.hset(self.keys.rollout(rollout.rollout_id), "lease_ms", 1)
        self.redis.zadd(self.keys.leases, {rollout.rollout_id: 1})
        rollout.lease_over = True
