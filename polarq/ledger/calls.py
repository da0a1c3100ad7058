"""Every step of the ledger as a `Call`: what to send, and how to read the answer.

A call knows nothing of sync or async; `Ledger` and `AsyncLedger` carry it out. A call is one script or one read, so
that a repeat after a lost script cache repeats nothing else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from polarq.contracts.event import Event
from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import EARLY_STOP, Boundary, Outcome, RolloutState, RolloutSummary, TaskState
from polarq.contracts.task import Task, split_rollout_id
from polarq.errors import PayloadMissing, StepRefused, TaskConflict
from polarq.ledger.admission import FULL_SHARE, UNLIMITED, Admission, Place, facts
from polarq.ledger.keys import PRIORITY_STEPS, Keys
from polarq.ledger.records import (
    ActiveRollout,
    Cancelled,
    Claim,
    Committed,
    Refused,
    Released,
    Submitted,
    TaskHead,
    TaskRecord,
    UnreadableClaim,
    decode,
    moment,
    read_losses,
    text_fields,
)
from polarq.ledger.scripts import Script, script
from polarq.ledger.texts import with_shared_texts

T = TypeVar("T")

Server = Literal["ledger", "payloads", "queues"]
"""What a Redis is there for. One may be there for all of it."""

_QUEUE_DEPTH = "local n=0 for _,k in ipairs(KEYS) do n=n+redis.call('LLEN',k) end return n"

_ANNOUNCE = """
local there = redis.call('GET', KEYS[1])
if there and ARGV[1] ~= '' and there ~= ARGV[1] then return there end
-- Alive first: a record without that is a node that is gone.
redis.call('SET', KEYS[1], ARGV[1] == '' and '1' or ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return false
"""

_DEPART = """
local there = redis.call('GET', KEYS[1])
if there and ARGV[1] ~= '' and there ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HDEL', KEYS[3], ARGV[2])
return redis.call('HDEL', KEYS[2], ARGV[2])
"""

EARLY_SUMMARY = RolloutSummary(
    outcome=Outcome(
        state=RolloutState.CANCELLED,
        boundary=Boundary.CONTROL,
        reason=EARLY_STOP,
        message="enough usable rollouts of its task had ended before it started",
    )
)

CANCELLED_SUMMARY = RolloutSummary(
    outcome=Outcome(
        state=RolloutState.CANCELLED,
        boundary=Boundary.CONTROL,
        reason="cancelled",
        message="cancelled before it started",
    )
)

RELEASED_SUMMARY = RolloutSummary(
    outcome=Outcome(
        state=RolloutState.CANCELLED,
        boundary=Boundary.CONTROL,
        reason="cancelled",
        message="cancelled on request, while its worker was leaving",
    )
)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request to Redis: a script with keys and arguments, or plain read commands, and the reader of the reply."""

    read: Callable[[Any], T]
    script: Script | None = None
    keys: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    commands: tuple[tuple[Any, ...], ...] = ()
    at: Server = "ledger"
    """Which Redis it is for, where there are several."""
    replicas: int = 0
    """How many replicas must have what the script wrote before it counts as done."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One line of a task listing: counters, no rollouts."""

    task_id: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Calls:
    """Builds calls for one key layout and retention."""

    keys: Keys
    events_max: int = 100_000
    keep_s: int = 7 * 24 * 3600
    admission: Admission = UNLIMITED
    elsewhere: Mapping[Server, str] = field(default_factory=dict)
    """Addresses of the Redis of what is not in the ledger's."""
    replicas: int = 0
    """Replicas that must have a submission or a commit before it counts."""

    # --- the trainer's side

    def submit(self, task: Task, celery_id: str) -> Call[Submitted]:
        """Records a task, or finds the same one again. Raises `TaskConflict` for a different one, and `QueueFull`."""
        k = self.keys
        model = task.agent.model_name or ""
        harness = task.agent.harness or task.agent.import_path or ""
        args = (
            task.task_id, task.canonical_json(), task.digest(), task.num_samples, task.run_id, celery_id, harness,
            model, k.rollout_stem(task.task_id), self.events_max, self.keep_s,
            *self.admission.most_waiting(task.run_id), self.admission.budget, FULL_SHARE,
            *facts(task, self.admission),
        )  # fmt: skip
        keys = (k.task(task.task_id), k.tombstone(task.task_id), k.tasks, k.waiting, k.events)

        def read(reply: list[bytes]) -> Submitted:
            word = decode(reply[0])
            if word == "cancelled":
                raise TaskConflict(
                    f"task '{task.task_id}' was cancelled before it arrived; submit it under a new task_id"
                )
            if word == "conflict":
                raise TaskConflict(
                    f"task_id '{task.task_id}' is taken by a different request ({decode(reply[1])}); choose another id"
                )
            if word == "memory":
                raise self.admission.out_of_memory(task, int(reply[1]), int(reply[2]))
            if word == "full":
                raise self.admission.full(task, decode(reply[1]) == "run", int(reply[2]))
            return Submitted(task.task_id, decode(reply[2]), word == "created", TaskState(decode(reply[1])))

        return Call(read, script("submit"), keys, args, replicas=self.replicas)

    def cancel(self, task_id: str, index: int | None = None, tombstone_s: int = 0) -> Call[Cancelled]:
        """Cancels a task, or one rollout of it. `tombstone_s` > 0: an unknown task is refused if it comes later."""
        k = self.keys
        stem = k.rollout_stem(task_id)
        keys = (k.task(task_id), k.tombstone(task_id), k.tasks, k.leases, k.waiting, k.events)
        args = (
            task_id, "" if index is None else index, tombstone_s, stem, self.events_max, self.keep_s,
            CANCELLED_SUMMARY.model_dump_json(),
        )  # fmt: skip

        def read(reply: list[bytes]) -> Cancelled:
            word, *rest = [decode(part) for part in reply]
            if word == "cancelling":
                active = tuple(ActiveRollout(*rest[i : i + 3]) for i in range(0, len(rest), 3))
                return Cancelled(known=True, active=active)
            return Cancelled(known=word == "done", already_over=word == "done", registered=word == "registered")

        return Call(read, script("cancel"), keys, args)

    def task(self, task_id: str, *, with_request: bool = False) -> Call[TaskRecord | None]:
        """A task and its rollouts as one consistent picture; None when it is unknown."""

        def read(reply: list[Any]) -> TaskRecord | None:
            if not reply:
                return None
            return TaskRecord.read(task_id, text_fields(reply[0]), [text_fields(r) for r in reply[1]])

        args = (self.keys.rollout_stem(task_id), "1" if with_request else "0")
        return Call(read, script("snapshot"), (self.keys.task(task_id),), args)

    def head(self, task_id: str) -> Call[TaskHead | None]:
        """A task's state and counters, without its rollouts; None when it is unknown."""
        rows = self.task_rows([task_id])

        def read(replies: Any) -> TaskHead | None:
            found = rows.read(replies)
            return TaskHead.read(task_id, found[0].fields) if found else None

        return Call(read, commands=rows.commands)

    def recent_task_ids(self, limit: int, since_ms: float = 0) -> Call[list[str]]:
        """Task ids by time of their last change, newest first."""
        command = ("ZREVRANGEBYSCORE", self.keys.tasks, "+inf", since_ms, "LIMIT", 0, limit)
        return Call(lambda reply: [decode(i) for i in reply[0]], commands=(command,))

    def task_rows(self, task_ids: Sequence[str]) -> Call[list[TaskRow]]:
        """Counters of many tasks; ids that expired are left out."""
        names = (
            "state", "run_id", "num", "queued", "completed", "failed", "timed_out", "cancelled", "harness", "model",
            "created_ms", "updated_ms", "celery_id",
        )  # fmt: skip
        commands = tuple(("HMGET", self.keys.task(i), *names) for i in task_ids)

        def read(replies: list[list[bytes | None]]) -> list[TaskRow]:
            rows = []
            for task_id, values in zip(task_ids, replies, strict=True):
                if values[0] is not None:
                    fields = {n: decode(v) for n, v in zip(names, values, strict=True) if v is not None}
                    rows.append(TaskRow(task_id, fields))
            return rows

        return Call(read, commands=commands)

    # --- the worker's side

    def claim(
        self,
        rollout_id: str,
        node_id: str,
        lease_s: float,
        job_id: str,
        place: Place | None = None,
        incarnation: str = "",
    ) -> Call[Claim | Refused]:
        """Asks for the right to run a rollout. Carrying the same call out twice grants it once.

        With a place, `rollout_id` is a hint: the claim is for what stands first in line and fits there.
        """
        k, task_id = self.keys, split_rollout_id(rollout_id)[0]
        keys = (k.task(task_id), k.rollout(rollout_id), k.leases, k.waiting, k.events, k.tasks)
        args = (
            rollout_id, node_id, int(lease_s * 1000), job_id, self.events_max, task_id, secrets.token_hex(8),
            "" if place is None else place.as_json(), incarnation or ("" if place is None else place.incarnation),
        )  # fmt: skip

        def read(reply: list[Any]) -> Claim | Refused:
            if decode(reply[0]) != "granted":
                return Refused(decode(reply[0]), decode(reply[1]) if len(reply) > 1 else "")
            claimed_at = moment(reply[5])
            assert claimed_at is not None
            try:
                task = Task.model_validate(with_shared_texts(json.loads(reply[4])))
            except (ValueError, TypeError) as exc:
                raise UnreadableClaim(decode(reply[6]), int(reply[2]), exc) from exc
            policy = None if reply[7] is None else int(reply[7])
            return Claim(
                rollout_id=decode(reply[6]),
                attempt=int(reply[1]),
                token=int(reply[2]),
                waited_s=int(reply[3]) / 1000,
                claimed_at=claimed_at,
                task=task,
                policy_version=policy,
                losses=() if reply[8] is None else read_losses(decode(reply[8])),
            )

        return Call(read, script("claim"), keys, args)

    def look(self, place: Place, most: int, deep: int | None = None) -> Call[list[str]]:
        """Waiting rollouts that a node would claim one after another. `deep`: how many of each run are looked at, where
        not only the first ones are."""
        args = (place.as_json(), most, "" if deep is None else deep)
        return Call(lambda reply: [decode(i) for i in reply], script("look"), (self.keys.waiting,), args)

    def advance(self, rollout_id: str, token: int, to: RolloutState) -> Call[str]:
        """Enters a stage. Answers 'ok', 'cancel' (stop, then commit) or 'lost' (somebody else has it; discard). Raises
        `StepRefused` for a step that the transition table does not have."""
        k, task_id = self.keys, split_rollout_id(rollout_id)[0]
        keys = (k.task(task_id), k.rollout(rollout_id), k.events, k.tasks)

        def read(reply: Any) -> str:
            if isinstance(reply, list):
                raise StepRefused(rollout_id, decode(reply[1]), to.value)
            return decode(reply)

        return Call(read, script("advance"), keys, (rollout_id, token, to.value, self.events_max, task_id))

    def renew(self, held: Sequence[tuple[str, int]], lease_s: float) -> Call[list[str]]:
        """Renews the leases of (rollout_id, token) pairs in one step; per pair 'ok', 'cancel' or 'lost'."""
        keys = (self.keys.leases, *(self.keys.rollout(rollout_id) for rollout_id, _ in held))
        args = (int(lease_s * 1000), *(part for pair in held for part in pair))
        return Call(lambda reply: [decode(a) for a in reply], script("renew"), keys, args)

    def commit(self, rollout_id: str, token: int, summary: RolloutSummary) -> Call[Committed]:
        """Makes an attempt's result the visible one. Repeating it with the same token is harmless. Raises
        `PayloadMissing` when its payload is not there."""
        k, task_id = self.keys, split_rollout_id(rollout_id)[0]
        keys = (k.task(task_id), k.rollout(rollout_id), k.leases, k.events, k.tasks)
        # Polar's rule for what counts towards an early stop.
        usable = summary.outcome.state is RolloutState.COMPLETED and summary.trainable_tokens > 0
        reward = "" if summary.reward is None else repr(summary.reward)
        args = (
            rollout_id, token, summary.outcome.state.value, summary.model_dump_json(), self.events_max, task_id,
            k.rollout_stem(task_id), self.keep_s, reward, "1" if usable else "0",
            # Completed there: Lua's JSON would make an empty list an object, so what is empty is left out.
            EARLY_SUMMARY.model_dump_json(exclude_defaults=True), json.dumps(summary.counted()),
            *self._payload_to_see(summary),
        )  # fmt: skip

        def read(reply: list[Any]) -> Committed:
            word = decode(reply[0])
            if word == "lost":
                return Committed(False, False, decode(reply[1]))
            if word == "missing":
                raise PayloadMissing(f"the payload of rollout '{rollout_id}' has to be written before its commit")
            told = [decode(part) for part in reply[2:]]
            stopping = tuple(ActiveRollout(*told[i : i + 3]) for i in range(0, len(told), 3))
            return Committed(True, int(reply[1]) == 1, stopping=stopping)

        return Call(read, script("commit"), keys, args, replicas=self.replicas)

    def _payload_to_see(self, summary: RolloutSummary) -> tuple[Any, ...]:
        """What of a payload must be there when it is committed; of one in another Redis the script cannot tell."""
        ref = summary.payload
        return () if ref is None or "payloads" in self.elsewhere else (ref.key, ref.chunks)

    def release(self, rollout_id: str, token: int, *, counted: bool, reason: str) -> Call[Released | None]:
        """Gives a claimed rollout back; None when it was no longer ours."""
        k, task_id = self.keys, split_rollout_id(rollout_id)[0]
        keys = (k.task(task_id), k.rollout(rollout_id), k.leases, k.waiting, k.events, k.tasks)
        args = (
            rollout_id, token, "1" if counted else "0", self.events_max, task_id, reason, k.rollout_stem(task_id),
            self.keep_s, RELEASED_SUMMARY.model_dump_json(exclude_defaults=True),
        )  # fmt: skip

        def read(reply: bytes) -> Released | None:
            word = decode(reply)
            return None if word == "lost" else Released(word)

        return Call(read, script("release"), keys, args)

    # --- nodes and events

    def announce(self, record: NodeRecord, alive_s: float, incarnation: str = "") -> Call[dict[str, str]]:
        """Writes a node's record and says that it is alive; answers its flags, `drain_over` among them once its
        drain's deadline has passed, and `server_ms`, the server's time. Where another incarnation has the node's place
        nothing is written, and `taken_by` names it."""
        body = record.model_dump_json(exclude={"alive", "draining", "paused", "queue_depth"})
        commands = (
            (
                "EVAL",
                _ANNOUNCE,
                2,
                self.keys.node_alive(record.node_id),
                self.keys.nodes,
                incarnation,
                int(alive_s * 1000),
                record.node_id,
                body,
            ),
            ("HGETALL", self.keys.node_flags(record.node_id)),
            ("EXISTS", self.keys.node_drain(record.node_id)),
            ("TIME",),
        )

        def read(replies: list[Any]) -> dict[str, str]:
            seconds, micros = replies[3]
            flags = {**read_hash(replies[1]), "server_ms": str(int(seconds) * 1000 + int(micros) // 1000)}
            if replies[0]:
                flags["taken_by"] = decode(replies[0])
            return {**flags, "drain_over": "1"} if "deadline" in flags and not replies[2] else flags

        return Call(read, commands=commands)

    def depart(self, node_id: str, incarnation: str = "") -> Call[None]:
        """Says that a node has stopped in order; nothing where another incarnation has its place."""
        keys = (self.keys.node_alive(node_id), self.keys.nodes, self.keys.rules)
        return Call(lambda _: None, commands=(("EVAL", _DEPART, len(keys), *keys, incarnation, node_id),))

    def node_records(self) -> Call[list[tuple[str, str]]]:
        """(node_id, record as JSON) of every node that announced itself."""

        def read(replies: list[Any]) -> list[tuple[str, str]]:
            return sorted(read_hash(replies[0]).items())

        return Call(read, commands=(("HGETALL", self.keys.nodes),))

    def node_states(self, node_ids: Sequence[str]) -> Call[dict[str, tuple[bool, dict[str, str], int]]]:
        """Per node: alive, flags, depth of its queue (0 where the queues are elsewhere)."""
        commands: list[tuple[Any, ...]] = []
        for node_id in node_ids:
            commands.append(("EXISTS", self.keys.node_alive(node_id)))
            commands.append(("HGETALL", self.keys.node_flags(node_id)))
            if "queues" in self.elsewhere:
                commands.append(("ECHO", 0))
            else:
                commands.append(("EVAL", _QUEUE_DEPTH, len(PRIORITY_STEPS), *self.keys.queue_lists(node_id)))

        def read(replies: list[Any]) -> dict[str, tuple[bool, dict[str, str], int]]:
            rows = zip(node_ids, replies[::3], replies[1::3], replies[2::3], strict=True)
            return {i: (bool(alive), read_hash(flags), int(depth)) for i, alive, flags, depth in rows}

        return Call(read, commands=tuple(commands))

    def depths_elsewhere(self, node_ids: Sequence[str]) -> Call[dict[str, int]] | None:
        """Depths of the nodes' queues where those are in another Redis; None: `node_states` tells."""
        if "queues" not in self.elsewhere:
            return None
        lists = [self.keys.queue_lists(node_id) for node_id in node_ids]
        commands = tuple(("EVAL", _QUEUE_DEPTH, len(names), *names) for names in lists)
        return Call(lambda depths: dict(zip(node_ids, map(int, depths), strict=True)), commands=commands, at="queues")

    def set_node_flag(self, node_id: str, flag: str, on: bool) -> Call[None]:
        """Sets `draining` or `paused`. The node reads it with its next heartbeat."""
        key = self.keys.node_flags(node_id)
        command: tuple[Any, ...] = ("HSET", key, flag, "1") if on else ("HDEL", key, flag)
        return Call(lambda _: None, commands=(command,))

    def note(self, kind: str, data: dict[str, Any]) -> Call[None]:
        """Writes an event that no other step writes (a node that joins or leaves)."""
        body = json.dumps(data)
        command = ("XADD", self.keys.events, "MAXLEN", "~", self.events_max, "*", "type", kind, "data", body)
        return Call(lambda _: None, commands=(command,))

    def events(self, after: str, count: int = 500) -> Call[list[Event]]:
        """Events after an id ('0' for the oldest kept)."""
        start = "-" if after in {"0", "0-0"} else f"({after}"
        command = ("XRANGE", self.keys.events, start, "+", "COUNT", count)
        return Call(lambda replies: [read_event(i, f) for i, f in replies[0]], commands=(command,))

    def last_event_id(self) -> Call[str]:
        """Id of the newest event, '0-0' when there is none: read it before the ledger, then follow from it."""
        command = ("XREVRANGE", self.keys.events, "+", "-", "COUNT", 1)
        return Call(lambda replies: decode(replies[0][0][0]) if replies[0] else "0-0", commands=(command,))


def read_event(event_id: bytes, fields: Any) -> Event:
    """One entry of the event stream."""
    values = read_hash(fields)
    at = moment(decode(event_id).split("-")[0])
    assert at is not None
    try:
        data = json.loads(values.get("data", "{}"))
    except ValueError:
        data = None
    if "type" not in values or not isinstance(data, dict):
        # No polarq wrote it. Readers have to get past it, and see what it says.
        return Event(event_id=decode(event_id), type="unknown", at=at, data={"fields": values})
    return Event(event_id=decode(event_id), type=values["type"], at=at, data=data)


def read_hash(reply: Any) -> dict[str, str]:
    """A hash reply as texts, whether the client library already made it a dictionary (RESP3) or not."""
    if isinstance(reply, dict):
        return {decode(k): decode(v) for k, v in reply.items()}
    return text_fields(reply)
