"""`polarq status`: the fleet and the latest tasks on one screen."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from polarq.cli.door import open_door
from polarq.cli.nodes import print_nodes
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.picture import TaskLine
from polarq.cli.terminal import Column, Screen, local_time, print_json, print_table, shown
from polarq.contracts.rollout import TaskState

COLUMNS = (
    Column("task"),
    Column("state"),
    Column("ended", "right"),
    Column("running", "right"),
    Column("queued", "right"),
    Column("completed", "right"),
    Column("failed", "right"),
    Column("timed out", "right"),
    Column("cancelled", "right"),
    Column("harness"),
    Column("changed"),
)
STATES = {
    TaskState.RUNNING: "cyan",
    TaskState.COMPLETED: "green",
    TaskState.CANCELLING: "yellow",
    TaskState.CANCELLED: "yellow",
}


@command
def status(
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Tasks shown, latest change first.")
    ] = 10,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Show the fleet and the latest tasks."""
    with open_door(config, url) as door:
        records, tasks, where = door.nodes(), door.tasks(limit), door.where
    if as_json:
        nodes = [record.model_dump(mode="json") for record in records]
        print_json({"door": where, "nodes": nodes, "tasks": [task.json() for task in tasks]})
        return ExitCode.OK
    screen = Screen()
    screen.say(shown(where))
    print_nodes(screen, records)
    screen.say("")
    if tasks:
        print_table(screen, COLUMNS, [_cells(task) for task in tasks])
    else:
        screen.say("no tasks yet; submit one: polarq submit task.yaml")
    return ExitCode.OK


def _cells(task: TaskLine) -> list[Text]:
    counts = task.counts
    numbers = (counts.running, counts.queued, counts.completed, counts.failed, counts.timed_out, counts.cancelled)
    return [
        Text(shown(task.task_id)),
        Text(task.state.value, STATES[task.state]),
        Text(f"{counts.ended}/{counts.total}"),
        *(Text(str(value), "" if value else "dim") for value in numbers),
        Text(shown(task.harness or "-", limit=40)),
        Text(local_time(task.updated_at)),
    ]
