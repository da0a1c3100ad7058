"""Submitting a task, cancelling it, and what it waits for: the steps, for both clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polarq.client.agents import check_agent
from polarq.client.deployment import Deployment, TaskSource
from polarq.client.limits import Judge, check_fits
from polarq.client.reading import record_of
from polarq.client.routing import choose_queues, why_waiting
from polarq.client.steps import Steps, all_nodes, ask, work
from polarq.contracts.task import Task, maybe_rollout_id
from polarq.errors import InvalidTask, LedgerUnavailable, NotQueued, TaskNotFound
from polarq.ledger import Cancelled, Submitted
from polarq.ledger.control import run_state, waiting_task
from polarq.ledger.limits import published, under
from polarq.ledger.rules import rules_said

TOMBSTONE_S = 300
"""How long a task that was cancelled before it arrived is refused."""


@contextmanager
def _once_begun(task: Task) -> Iterator[None]:
    """A ledger that goes away here may have taken the task: says so, and what to do."""
    try:
        yield
    except LedgerUnavailable as exc:
        again = f"submit it again, under task_id '{task.task_id}' it is the same task"
        raise NotQueued(f"{exc}. It may have taken the task already: {again}") from exc


def submit(at: Deployment, source: TaskSource, celery_id: str | None) -> Steps[Submitted]:
    calls = at.calls
    task = Task.load(source)
    nodes = yield from all_nodes(calls)
    rules = yield from ask(rules_said(calls.keys))
    try:
        check_agent(task.agent)
        queues = choose_queues(task, nodes, at.topology, judge=Judge(task, at.topology, rules))
    except InvalidTask:
        # What the ledger has taken is the same task again, whatever has become of nodes and rules since.
        if (yield from ask(calls.head(task.task_id))) is None:
            raise
        queues = []
    limits = (yield from ask(published(calls.keys, at.topology.limits))).limits
    check_fits(task, limits)
    with _once_begun(task):
        done = yield from ask(under(calls, limits).submit(task, celery_id or task.task_id))
    if done.created:
        yield from work(lambda: at.ring(task, dict(enumerate(queues))))
    elif queues and not done.state.terminal:
        # The first submitter may have died between recording and ringing; a doorbell too many is harmless.
        record = yield from record_of(calls, task.task_id)
        waiting = [r.index for r in record.rollouts if r.state == "queued"]
        yield from work(lambda: at.ring(task, dict(zip(waiting, queues, strict=False))))
    return done


def waiting_for(at: Deployment, task_id: str) -> Steps[str | None]:
    """What the task's waiting rollouts wait for, in one line; None: for nothing but a free place, or none waits."""
    keys = at.calls.keys
    task = yield from ask(waiting_task(keys, task_id))
    if task is None:
        return None
    run = yield from ask(run_state(keys, task.run_id))
    limits = (yield from ask(published(keys, at.topology.limits))).limits
    most = limits.of_run(task.run_id).max_in_flight
    return why_waiting(task, (yield from all_nodes(at.calls)), at.topology, run, most)


def cancel(at: Deployment, task_id: str, *, register_if_missing: bool) -> Steps[Cancelled]:
    calls = at.calls
    record_id, index = yield from _target(at, task_id)
    done = yield from ask(calls.cancel(record_id, index, TOMBSTONE_S if register_if_missing else 0))
    if not done.known and not done.registered:
        raise TaskNotFound(f"no task '{task_id}' in the ledger")
    yield from work(lambda: at.spread_word(record_id, done))
    return done


def _target(at: Deployment, any_id: str) -> Steps[tuple[str, int | None]]:
    """A task id may itself end in `.<number>`: it is a rollout id only if there is no such task."""
    rollout = maybe_rollout_id(any_id)
    if rollout is not None and (yield from ask(at.calls.head(any_id))) is None:
        return rollout
    return any_id, None
