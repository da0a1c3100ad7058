"""Which node's queue each rollout of a task is rung on.

Only live nodes that do not drain and carry the asked labels are chosen. Where none is live, the doorbells go to the
nodes of the topology (or node0) and wait there: the ledger has the rollouts, so nothing depends on the choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from polarq.contracts.node import NodeRecord
from polarq.contracts.task import Task
from polarq.errors import InvalidTask
from polarq.topology.models import Topology


def choose_queues(task: Task, nodes: Sequence[NodeRecord], topology: Topology) -> list[str]:
    """One queue per rollout, in sample order. Raises `InvalidTask` for a pinned node that does not exist."""
    place = task.placement
    if place.policy == "pinned":
        assert place.node_id is not None
        known = {node.node_id for node in nodes} | {node.id for node in topology.gateway.nodes}
        if place.node_id not in known:
            raise InvalidTask(
                "task", [f"placement.node_id: no node '{place.node_id}' (known: {', '.join(sorted(known))})"]
            )
        return [place.node_id] * task.num_samples
    live = [n for n in nodes if n.alive and not n.draining and _carries(n.labels, place.labels)]
    if live:
        loads = [(_load(node), node.node_id, _capacity(node)) for node in live]
    else:
        waiting = [n for n in topology.gateway.nodes if _carries(n.labels, place.labels)]
        if not waiting and place.labels:
            wanted = ", ".join(f"{k}={v}" for k, v in place.labels.items())
            raise InvalidTask("task", [f"placement.labels: no node carries {wanted}"])
        loads = [(0.0, node.id, node.capacity) for node in waiting or topology.gateway.nodes]
    if place.policy == "together":
        return [min(loads)[1]] * task.num_samples
    return _spread(loads, task.num_samples)


def _spread(loads: list[tuple[float, str, int]], count: int) -> list[str]:
    """Least relative load first; each assignment counts before the next."""
    heap = list(loads)
    heapq.heapify(heap)
    queues = []
    for _ in range(count):
        load, node_id, capacity = heapq.heappop(heap)
        queues.append(node_id)
        heapq.heappush(heap, (load + 1 / capacity, node_id, capacity))
    return queues


def _carries(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def _capacity(node: NodeRecord) -> int:
    return node.max_init_workers + 2 * node.max_run_workers + node.max_postrun_workers


def _load(node: NodeRecord) -> float:
    m = node.metrics
    busy = m.init_queue_depth + m.init_inflight + m.ready_depth + m.run_inflight + m.postrun_queue_depth
    return (busy + m.postrun_inflight + node.queue_depth) / _capacity(node)


def celery_priority(dispatch_priority: int) -> int:
    """Polar's 0..100 (higher first) as a kombu priority 0..9 on Redis (0 is served first)."""
    return 9 - round(dispatch_priority * 9 / 100)
