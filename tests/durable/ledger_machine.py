"""The ledger as a state machine: after every step all that it shows is compared with the model.

Down to the members of the indexes, the order of the events, and what expires.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis.stateful import invariant

from polarq.contracts import RolloutState, TaskCounts
from tests.durable.key_layout import strangers
from tests.durable.ledger_model import RUNS, TaskModel
from tests.durable.ledger_reaping import ReaperSteps
from tests.durable.ledger_steps import ENDS, KEEP_S

S = RolloutState


def texts(members: Any) -> set[str]:
    return {member.decode() for member in members}


class LedgerMachine(ReaperSteps):
    """See the module."""

    @invariant()
    def every_rollout_is_where_it_should_be_and_is_counted_there(self) -> None:
        for task_id, task in self.tasks.items():
            record = self.do(self.calls.task(task_id))
            assert record is not None
            assert len(record.rollouts) == len(task.rollouts)
            for seen, meant in zip(record.rollouts, task.rollouts, strict=True):
                assert (seen.state, seen.attempt, seen.token) == (meant.state, meant.attempt, meant.token)
                assert (seen.summary is not None) == seen.state.terminal
                if meant.active:
                    assert (seen.owner, seen.job_id) == (meant.owner, meant.job)
                if seen.summary is not None:
                    assert seen.summary.outcome.state is meant.state
                    meant.summary = meant.summary or seen.summary.model_dump_json()
                    assert seen.summary.model_dump_json() == meant.summary, "a visible end has changed"
            self.counters_are_the_states(record.counts, task)
            # A task ends exactly when its last rollout has.
            assert record.state == task.state
            assert record.celery_ids == tuple(task.celery_ids)

    def counters_are_the_states(self, counts: TaskCounts, task: TaskModel) -> None:
        states = Counter(r.state for r in task.rollouts)
        assert counts.total == len(task.rollouts)
        assert counts.queued == states[S.QUEUED]
        assert counts.running == sum(r.active for r in task.rollouts)
        assert (counts.completed, counts.failed, counts.timed_out, counts.cancelled) == tuple(
            states[end] for end in ENDS
        )

    @invariant()
    def indexes_hold_what_they_are_for(self) -> None:
        queued = {r.rollout_id for r in self.all_rollouts() if r.state is S.QUEUED}
        held = {r.rollout_id for r in self.all_rollouts() if r.active}
        assert self.members(self.keys.waiting) == queued
        assert self.members(self.keys.leases) == held
        assert self.members(self.keys.tasks) == set(self.tasks)
        runs_waiting = {RUNS[rollout_id.rpartition(".")[0]] for rollout_id in queued}
        assert texts(self.redis.smembers(self.keys.runs_waiting)) == runs_waiting
        for run in set(RUNS.values()):
            of_run = {r for r in queued | held if RUNS[r.rpartition(".")[0]] == run}
            assert self.members(self.keys.run_waiting(run)) == queued & of_run
            assert texts(self.redis.smembers(self.keys.run_held(run))) == held & of_run

    def members(self, key: str) -> set[str]:
        return texts(self.redis.zrange(key, 0, -1))

    @invariant()
    def events_tell_every_transition_once_and_in_order(self) -> None:
        kinds = {"task.created": "task_id", "session.state_changed": "session_id", "task.completed": "task_id"}
        events = self.do(self.calls.events("0", 100_000))
        seen = [(e.type, e.data[kinds[e.type]], e.data["status"]) for e in events if e.type in kinds]
        assert seen == self.story.lines

    @invariant()
    def what_has_ended_expires_and_nothing_strange_is_left(self) -> None:
        names = list(self.redis.scan_iter(match=f"{self.keys.prefix}:*", count=1000))
        assert not strangers(names, self.keys)
        with self.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.ttl(name)
            ttl: dict[bytes, Any] = dict(zip(names, pipe.execute(), strict=True))
        for task_id, task in self.tasks.items():
            for name in [self.keys.task(task_id), *(self.keys.rollout(r.rollout_id) for r in task.rollouts)]:
                if task.ended:
                    assert 0 < ttl[name.encode()] <= KEEP_S, f"{name} does not expire"
                else:
                    assert ttl[name.encode()] == -1, f"{name} expires under a task that runs"
