"""Prometheus' text format, by hand: a handful of gauges from the ledger and this shim's own request counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from polarq.contracts.node import NodeRecord
from polarq.contracts.rollout import TaskCounts, TaskState
from polarq.errors import LedgerUnavailable
from polarq.http.answers import Handler
from polarq.ledger import AsyncLedger
from polarq.ledger.calls import Call
from polarq.ledger.control import known_runs
from polarq.ledger.fidelity import run_fidelity
from polarq.ledger.memory import MemoryLevel, MemoryUse, memory_use
from polarq.ledger.reaping import reaped_counts

if TYPE_CHECKING:
    from polarq.http.shim import Shim

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_EVENTS_ADDED = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'entries-added' then return info[i + 1] end
end
return redis.call('XLEN', KEYS[1])
"""

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


class RequestCounts:
    """Requests that this process answered, by method, route and status."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def middleware(self) -> Any:
        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            resource = request.match_info.route.resource
            # A path that is no route is not made a label: anybody could make any number of them.
            route = resource.canonical if resource is not None else "other"
            self._counts[(request.method, route, response.status)] += 1
            return response

        return count

    def samples(self) -> list[Sample]:
        return [
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(self._counts.items())
        ]


@dataclass(slots=True)
class Page:
    """A scrape in the making."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, about: str, samples: Iterable[Sample]) -> None:
        self.lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            self.lines.append(f"{name}{{{inside}}} {value:.15g}" if inside else f"{name} {value:.15g}")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


async def metrics_page(shim: Shim) -> str:
    """The scrape. Without Redis it still answers, and says so by `polarq_ledger_up 0`."""
    page = Page()
    try:
        await _add_ledger(page, shim)
        up = 1
    except LedgerUnavailable:
        page = Page()
        up = 0
    page.add("polarq_ledger_up", "gauge", "Whether Redis answers.", [({}, up)])
    page.add("polarq_http_requests_total", "counter", "Requests this shim answered.", shim.requests.samples())
    return page.text()


async def _add_ledger(page: Page, shim: Shim) -> None:
    ledger = shim.client.ledger
    await shim.index.refresh()
    tasks = shim.index.all()
    by_state = Counter(task.state for task in tasks)
    page.add(
        "polarq_tasks",
        "gauge",
        "Tasks the ledger keeps, by state.",
        [({"state": s.value}, by_state[s]) for s in TaskState],
    )
    page.add(
        "polarq_rollouts",
        "gauge",
        "Rollouts of these tasks, by where they are or how they ended.",
        [({"outcome": name}, count) for name, count in _sums([task.counts for task in tasks]).items()],
    )
    waiting, leased, kept, added = await ledger.do(_sizes(ledger))
    page.add("polarq_waiting_rollouts", "gauge", "Rollouts that no node has claimed.", [({}, waiting)])
    page.add("polarq_leased_rollouts", "gauge", "Rollouts that a node holds under a lease.", [({}, leased)])
    page.add("polarq_events_kept", "gauge", "Events in the stream.", [({}, kept)])
    page.add("polarq_events_total", "counter", "Events ever written.", [({}, added)])
    page.add(
        "polarq_reaped_total",
        "counter",
        "What workers put right after a loss: rollouts queued again, failed or cancelled, rung again, and so on.",
        [({"what": what}, count) for what, count in sorted((await ledger.do(reaped_counts(ledger.calls))).items())],
    )
    runs = await ledger.do(known_runs(ledger.calls.keys))
    totals = await ledger.do(run_fidelity(ledger.calls.keys, runs))
    page.add(
        "polarq_run_fidelity_total",
        "counter",
        "What the trajectories of a run's rollouts add up to: tokens sampled, trainable and masked, breaks, and so on.",
        [
            ({"run": run_id, "what": what}, count)
            for run_id, row in zip(runs, totals, strict=True)
            for what, count in sorted(row.items())
        ],
    )
    _add_memory(page, await ledger.do(memory_use(ledger.calls)))
    _add_nodes(page, await ledger.nodes())


def _sums(all_counts: list[TaskCounts]) -> dict[str, int]:
    names = ("queued", "running", "completed", "failed", "timed_out", "cancelled")
    return {name: sum(getattr(counts, name) for counts in all_counts) for name in names}


def _sizes(ledger: AsyncLedger) -> Call[tuple[int, int, int, int]]:
    """(waiting, leased, events kept, events ever written)."""
    keys = ledger.calls.keys
    commands = (
        ("ZCARD", keys.waiting),
        ("ZCARD", keys.leases),
        ("XLEN", keys.events),
        ("EVAL", _EVENTS_ADDED, 1, keys.events),
    )
    return Call(lambda r: (int(r[0]), int(r[1]), int(r[2]), int(r[3])), commands=commands)


def _add_memory(page: Page, memory: MemoryUse) -> None:
    page.add("polarq_redis_memory_used_bytes", "gauge", "Memory that Redis uses.", [({}, memory.used_bytes)])
    page.add(
        "polarq_redis_memory_budget_bytes",
        "gauge",
        "Memory that it may use; 0: no limit.",
        [({}, memory.budget_bytes)],
    )
    page.add(
        "polarq_redis_memory_level",
        "gauge",
        "How full it is: high is a warning, at full new tasks are refused.",
        [({"level": level.value}, level is memory.level) for level in MemoryLevel],
    )


def _add_nodes(page: Page, nodes: list[NodeRecord]) -> None:
    page.add("polarq_nodes_alive", "gauge", "Nodes that are alive.", [({}, sum(node.alive for node in nodes))])
    each = [({"node": node.node_id}, node) for node in nodes]
    page.add("polarq_node_up", "gauge", "Whether a node is alive.", [(of, node.alive) for of, node in each])
    page.add("polarq_node_draining", "gauge", "Whether a node drains.", [(of, node.draining) for of, node in each])
    page.add("polarq_node_paused", "gauge", "Whether a node is paused.", [(of, node.paused) for of, node in each])
    page.add(
        "polarq_node_queue_depth",
        "gauge",
        "Doorbells in a node's queue.",
        [(of, node.queue_depth) for of, node in each],
    )
    page.add(
        "polarq_node_loop_lag_seconds",
        "gauge",
        "How late a node's engine loop turns (99th percentile of a minute).",
        [(of, node.loop_lag_s) for of, node in each if node.loop_lag_s is not None],
    )
    page.add(
        "polarq_node_stage",
        "gauge",
        "Rollouts per stage of a node.",
        [({**of, "stage": name}, value) for of, node in each for name, value in node.metrics.model_dump().items()],
    )
    page.add(
        "polarq_node_pool",
        "gauge",
        "A node's warm pool: sandboxes that wait or are made ahead, snapshots of recipes and their megabytes.",
        [
            ({**of, "what": what}, getattr(node.pool, what))
            for of, node in each
            for what in ("idle", "coming", "snapshots", "snapshots_mb")
        ],
    )
    page.add(
        "polarq_node_sandboxes_taken_total",
        "counter",
        "Sandboxes that a node's worker handed to rollouts, by how it came by them.",
        [
            ({**of, "from": origin}, getattr(node.pool, name))
            for of, node in each
            for origin, name in (("warm", "taken_warm"), ("snapshot", "taken_from_snapshot"), ("cold", "taken_cold"))
        ],
    )
    page.add(
        "polarq_node_capacity",
        "gauge",
        "Rollouts a node works on at once, per stage.",
        [
            ({**of, "stage": stage}, getattr(node, f"max_{stage}_workers"))
            for of, node in each
            for stage in ("init", "run", "postrun")
        ],
    )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
