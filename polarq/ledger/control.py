"""Flags that hold work back, in the ledger: a broadcast tells of them at once, claims and heartbeats find them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polarq.contracts.rollout import EARLY_STOP, EarlyStop
from polarq.contracts.task import Task, split_rollout_id
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.records import decode, read_early_stop


@dataclass(frozen=True, slots=True)
class RunState:
    """One training run, over all its tasks."""

    run_id: str
    paused: bool
    waiting: int
    held: int
    """Rollouts of it that nodes hold."""
    policy_version: int | None = None
    """As its trainer last said; None: it never did, or so long ago that it is forgotten."""

    @property
    def active(self) -> bool:
        return self.waiting + self.held > 0


_NOT_FORGOTTEN = "local t = redis.call('TIME') return redis.call('ZRANGEBYSCORE', KEYS[1], t[1] * 1000, '+inf')"


def run_states(keys: Keys, run_ids: Sequence[str]) -> Call[list[RunState]]:
    """How each of the runs is, whether the ledger knows of it or not."""
    commands: list[tuple[Any, ...]] = []
    for run_id in run_ids:
        commands.append(("SISMEMBER", keys.runs_paused, run_id))
        commands.append(("ZCARD", keys.run_waiting(run_id)))
        commands.append(("SCARD", keys.run_held(run_id)))
        commands.append(("HGET", keys.run(run_id), "policy_version"))

    def read(replies: list[Any]) -> list[RunState]:
        rows = zip(run_ids, replies[::4], replies[1::4], replies[2::4], replies[3::4], strict=True)
        return [
            RunState(run_id, bool(paused), int(waiting), int(held), None if version is None else int(version))
            for run_id, paused, waiting, held, version in rows
        ]

    return Call(read, commands=tuple(commands))


def run_state(keys: Keys, run_id: str) -> Call[RunState]:
    one = run_states(keys, [run_id])
    return Call(lambda replies: one.read(replies)[0], commands=one.commands)


_LINE = """
local t = redis.call('TIME')
local since = t[1] * 1000 + math.floor(t[2] / 1000) - ARGV[1]
return {redis.call('ZCARD', KEYS[1]), redis.call('ZCOUNT', KEYS[1], since, '+inf')}
"""


def how_many_wait(keys: Keys, lately_s: float) -> Call[tuple[int, int]]:
    """Rollouts of all runs that nobody has claimed, and how many of them wait for no longer than `lately_s`."""
    command = ("EVAL", _LINE, 1, keys.waiting, int(lately_s * 1000))
    return Call(lambda replies: (int(replies[0][0]), int(replies[0][1])), commands=(command,))


def waiting_task(keys: Keys, task_id: str) -> Call[Task | None]:
    """The request of a task of which some rollout waits; None when none does, or the task is unknown."""

    def read(replies: list[Any]) -> Task | None:
        request, queued = replies[0]
        return Task.model_validate(json.loads(request)) if request and int(queued or 0) else None

    return Call(read, commands=(("HMGET", keys.task(task_id), "request", "queued"),))


def early_stop_of(keys: Keys, rollout_id: str) -> Call[EarlyStop | None]:
    """The early stop that told this rollout to end; None when somebody cancelled it."""
    fields = ("early", "early_usable", "early_ms")
    commands = (
        ("HGET", keys.rollout(rollout_id), "why"),
        ("HMGET", keys.task(split_rollout_id(rollout_id)[0]), *fields),
    )

    def read(replies: list[Any]) -> EarlyStop | None:
        if replies[0] is None or decode(replies[0]) != EARLY_STOP:
            return None
        return read_early_stop({name: decode(value) for name, value in zip(fields, replies[1], strict=True) if value})

    return Call(read, commands=commands)


def drain_node(keys: Keys, node_id: str, *, on: bool, deadline_s: float | None) -> Call[None]:
    """The deadline is the server's: a key that expires, so that no clock of a node matters."""
    flags, until = keys.node_flags(node_id), keys.node_drain(node_id)
    commands: list[tuple[Any, ...]] = [("HDEL", flags, "draining", "deadline"), ("DEL", until)]
    if on and deadline_s is not None:
        commands.append(("SET", until, "1", "PX", max(1, int(deadline_s * 1000))))
        commands.append(("HSET", flags, "draining", "1", "deadline", "1"))
    elif on:
        commands.append(("HSET", flags, "draining", "1"))
    return Call(lambda _: None, commands=tuple(commands))


def set_run_workers(keys: Keys, node_id: str, run_workers: int | None) -> Call[None]:
    """How many harnesses the node runs at once; None: as its topology says."""
    flags = keys.node_flags(node_id)
    command = ("HDEL", flags, "run_workers") if run_workers is None else ("HSET", flags, "run_workers", run_workers)
    return Call(lambda _: None, commands=(command,))


def known_runs(keys: Keys) -> Call[list[str]]:
    """Runs of which the ledger has a task, a policy version or a pause, by id."""

    def read(replies: list[Any]) -> list[str]:
        return sorted({decode(run_id) for reply in replies for run_id in reply})

    remembered = ("EVAL", _NOT_FORGOTTEN, 1, keys.runs_known)
    return Call(read, commands=(remembered, ("SMEMBERS", keys.runs_paused)))


def tasks_of(keys: Keys, run_id: str) -> Call[list[str] | None]:
    """A run's tasks, without those of which all is acknowledged; None: the ledger knows of no such run."""

    def read(replies: list[Any]) -> list[str] | None:
        task_ids, known = replies
        return [decode(task_id) for task_id in task_ids] if task_ids or known is not None else None

    return Call(read, commands=(("ZRANGE", keys.run_tasks(run_id), 0, -1), ("ZSCORE", keys.runs_known, run_id)))


def pause_run(keys: Keys, run_id: str, on: bool) -> Call[bool]:
    """Sets or clears a run's pause; whether that changed anything."""
    return Call(lambda replies: bool(replies[0]), commands=(("SADD" if on else "SREM", keys.runs_paused, run_id),))
