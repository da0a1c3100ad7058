"""Every Redis key of polarq, in one place.

Keys of one task carry its id as hash tag, so that they live in one slot. Scripts that also write the shared indexes
(events, tasks, leases) need everything in one slot: on a Redis Cluster give the prefix itself a tag, `{polarq}`.
"""

from __future__ import annotations

from dataclasses import dataclass

from polarq.contracts.task import split_rollout_id

PRIORITY_STEPS = (0, 3, 6, 9)
"""kombu keeps one list per step; 0 is served first."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys under one prefix."""

    prefix: str = "polarq"

    # One task
    def task(self, task_id: str) -> str:
        """Hash: request, digest, state, counters."""
        return f"{self.prefix}:{{{task_id}}}:task"

    def rollout(self, rollout_id: str) -> str:
        """Hash: state, attempt, owner and its incarnation, fencing token, lease, grant, stage, losses, summary."""
        task_id, index = split_rollout_id(rollout_id)
        return f"{self.prefix}:{{{task_id}}}:rollout:{index}"

    def rollout_stem(self, task_id: str) -> str:
        """What `rollout` keys of a task begin with; the index follows."""
        return f"{self.prefix}:{{{task_id}}}:rollout:"

    def payload(self, rollout_id: str, attempt: int, token: int) -> str:
        """Stem of a committed result's chunks: `<stem>:<n>`."""
        task_id, index = split_rollout_id(rollout_id)
        return f"{self.payload_stem(task_id)}{index}:{attempt}-{token}"

    def payload_stem(self, task_id: str) -> str:
        """What `payload` keys of a task begin with; the index and the rest follow."""
        return f"{self.prefix}:{{{task_id}}}:payload:"

    def completions(self, rollout_id: str, attempt: int, token: int) -> str:
        """List: captured completions of one attempt, encoded, in order of recording."""
        task_id, index = split_rollout_id(rollout_id)
        return f"{self.completions_stem(task_id)}{index}:{attempt}-{token}"

    def completions_stem(self, task_id: str) -> str:
        """What `completions` keys of a task begin with; the index and the rest follow."""
        return f"{self.prefix}:{{{task_id}}}:completions:"

    def tombstone(self, task_id: str) -> str:
        """String with expiry: a cancel that arrived before its task."""
        return f"{self.prefix}:{{{task_id}}}:tombstone"

    def callbacks(self, task_id: str) -> str:
        """List: every try to deliver the task's callback, as JSON, oldest first."""
        return f"{self.prefix}:{{{task_id}}}:callbacks"

    def callback_claim(self, task_id: str) -> str:
        """String with expiry: who delivers the task's callback now, or that it is over."""
        return f"{self.prefix}:{{{task_id}}}:callback-claim"

    # Shared
    @property
    def tasks(self) -> str:
        """Sorted set: task ids by time of their last change."""
        return f"{self.prefix}:tasks"

    @property
    def leases(self) -> str:
        """Sorted set: claimed rollouts by lease deadline (server milliseconds)."""
        return f"{self.prefix}:leases"

    @property
    def pause(self) -> str:
        """String with expiry: why model calls are held back, as JSON."""
        return f"{self.prefix}:pause"

    @property
    def run_pauses(self) -> str:
        """Hash with an expiry: run id -> until when (server milliseconds) and why its model calls are held back."""
        return f"{self.prefix}:run-pauses"

    @property
    def pause_acks(self) -> str:
        """Hash: what each node's proxies say of the pause, as JSON."""
        return f"{self.prefix}:pause-acks"

    def proxy_present(self, node_id: str, process: int) -> str:
        """String with an expiry: this proxy process may have calls in flight. How many processes its node has."""
        return f"{self.prefix}:proxy-present:{node_id}/{process}"

    @property
    def waiting(self) -> str:
        """Sorted set: queued rollouts by the time they were queued (server milliseconds)."""
        return f"{self.prefix}:waiting"

    def run_waiting(self, run_id: str) -> str:
        """Sorted set: a run's queued rollouts in the order in which they shall start. Kept beside `waiting`."""
        return f"{self.prefix}:run-waiting:{run_id}"

    def run_held(self, run_id: str) -> str:
        """Set: a run's claimed rollouts. Kept beside `leases`."""
        return f"{self.prefix}:run-held:{run_id}"

    def run_tasks(self, run_id: str) -> str:
        """Sorted set: a run's tasks by when they are forgotten (server milliseconds; inf: not ended), without those of
        which all is acknowledged."""
        return f"{self.prefix}:run-tasks:{run_id}"

    def run(self, run_id: str) -> str:
        """Hash with an expiry: the policy version that the run's trainer has published."""
        return f"{self.prefix}:run:{run_id}"

    def run_fidelity(self, run_id: str) -> str:
        """Hash with an expiry: what the run's trajectories add up to, by `Fidelity.counts`."""
        return f"{self.prefix}:run-fidelity:{run_id}"

    @property
    def runs_known(self) -> str:
        """Sorted set: runs by when they are forgotten (server milliseconds; inf: a task of it has not ended)."""
        return f"{self.prefix}:runs-known"

    @property
    def runs_waiting(self) -> str:
        """Set: runs that have queued rollouts."""
        return f"{self.prefix}:runs-waiting"

    @property
    def runs_held(self) -> str:
        """Set: runs that have claimed rollouts."""
        return f"{self.prefix}:runs-held"

    def claimed(self, nonce: str) -> str:
        """String with an expiry: which rollout a claim was granted that named another."""
        return f"{self.prefix}:claimed:{nonce}"

    @property
    def runs_paused(self) -> str:
        """Set: runs of which nothing is claimed until they are resumed."""
        return f"{self.prefix}:runs-paused"

    @property
    def events(self) -> str:
        """Stream: everything that happened, capped."""
        return f"{self.prefix}:events"

    @property
    def nodes(self) -> str:
        """Hash: node id -> its record as JSON."""
        return f"{self.prefix}:nodes"

    def node_alive(self, node_id: str) -> str:
        """String with a short expiry: the node is there, and which incarnation of it (1: not said)."""
        return f"{self.prefix}:node-alive:{node_id}"

    def node_flags(self, node_id: str) -> str:
        """Hash: draining, paused, deadline (of the drain), run_workers (instead of the topology's)."""
        return f"{self.prefix}:node-flags:{node_id}"

    def node_drain(self, node_id: str) -> str:
        """String with an expiry: until then a draining node may keep what it has."""
        return f"{self.prefix}:node-drain:{node_id}"

    def sandboxes(self, node_id: str) -> str:
        """Hash: runtime id -> record of a sandbox that would outlive its worker, as JSON."""
        return f"{self.prefix}:sandboxes:{node_id}"

    @property
    def fleet(self) -> str:
        """Hash: flags for all nodes (paused inference)."""
        return f"{self.prefix}:fleet"

    @property
    def reaper(self) -> str:
        """String with a short expiry: which worker is the reaper now."""
        return f"{self.prefix}:reaper"

    @property
    def reaped(self) -> str:
        """Hash: what reapers did -> how often."""
        return f"{self.prefix}:reaped"

    @property
    def untold(self) -> str:
        """Sorted set: ended tasks of which Celery and the callback may not know, by when to look (milliseconds)."""
        return f"{self.prefix}:untold"

    @property
    def nodes_lost(self) -> str:
        """Sorted set: nodes with a record that are gone, by when that was noticed (server milliseconds)."""
        return f"{self.prefix}:nodes-lost"

    def grant(self, secret_sha256: str) -> str:
        """Hash with expiry: what a session secret opens."""
        return f"{self.prefix}:grant:{secret_sha256}"

    @property
    def archiver(self) -> str:
        """String with a short expiry: which worker archives what expires soon."""
        return f"{self.prefix}:archiver"

    @property
    def limits(self) -> str:
        """Hash: the deployment's limits as JSON, their version, and who published them."""
        return f"{self.prefix}:limits"

    @property
    def rules(self) -> str:
        """Hash: node id -> what it lets tasks ask for, as JSON."""
        return f"{self.prefix}:rules"

    @property
    def memory(self) -> str:
        """String: how full Redis was when that last changed: ok, high or full."""
        return f"{self.prefix}:memory"

    @property
    def replicated(self) -> str:
        """String with a short expiry: written behind a step that must reach replicas, so that there is something to
        wait for also when the step had been taken before."""
        return f"{self.prefix}:replicated"

    def memory_at(self, server: str) -> str:
        """String with a short expiry: bytes that another Redis of the deployment uses, and how many it may."""
        return f"{self.prefix}:memory-at:{server}"

    @property
    def celery(self) -> str:
        """Prefix of everything Celery and kombu write."""
        return f"{self.prefix}:celery:"

    def queue_lists(self, queue: str) -> list[str]:
        """The lists in which kombu keeps a queue, one per priority step."""
        return [f"{self.celery}{queue}" + (f"\x06\x16{step}" if step else "") for step in PRIORITY_STEPS]
