"""`polarq nodes`: the fleet, as its nodes last described themselves."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Column, Screen, local_time, print_json, print_table, shown
from polarq.contracts.node import NodeRecord

COLUMNS = (
    Column("node"),
    Column("state"),
    Column("prepare", "right"),
    Column("ready", "right"),
    Column("run", "right"),
    Column("score", "right"),
    Column("queued", "right"),
    Column("proxy"),
    Column("inference"),
    Column("model"),
    Column("seen"),
)


@command
def nodes(config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """List the nodes: load per stage, health, model."""
    with open_door(config, url) as door:
        records = door.nodes()
    if as_json:
        print_json([record.model_dump(mode="json") for record in records])
    else:
        print_nodes(Screen(), records)
    return ExitCode.OK


def print_nodes(screen: Screen, records: Sequence[NodeRecord]) -> None:
    """The fleet as a table, and below it what ails its nodes."""
    if not records:
        screen.say("no node has announced itself; start one: celery -A polarq worker -Q node0")
        return
    print_table(screen, COLUMNS, [_cells(record) for record in records])
    for record in records:
        if record.health.message:
            screen.say((shown(record.node_id), "bold"), "  ", shown(record.health.message))


def node_state(record: NodeRecord) -> Text:
    """One word: what the node does with new work."""
    if not record.alive:
        return Text("gone", "red")
    if record.draining:
        return Text("draining", "yellow")
    return Text("paused", "yellow") if record.paused else Text("up", "green")


def _cells(record: NodeRecord) -> list[Text]:
    load = record.metrics
    return [
        Text(shown(record.node_id)),
        node_state(record),
        Text(f"{load.init_inflight}/{record.max_init_workers}"),
        Text(str(load.ready_depth)),
        Text(f"{load.run_inflight}/{record.max_run_workers}"),
        Text(f"{load.postrun_inflight}/{record.max_postrun_workers}"),
        Text(str(record.queue_depth + load.init_queue_depth)),
        _health(record.health.proxy),
        _health(record.health.inference),
        Text(shown(record.model or "-", limit=40)),
        Text(local_time(record.last_seen_at)),
    ]


def _health(ok: bool | None) -> Text:
    return Text("-") if ok is None else Text("ok", "green") if ok else Text("down", "red")
