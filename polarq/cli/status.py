"""`polarq status`: the fleet and the latest tasks on one screen."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from polarq.cli.door import open_client
from polarq.cli.nodes import print_nodes
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Column, Screen, local_time, print_json, print_table, shown
from polarq.contracts.rollout import TaskCounts, TaskState
from polarq.ledger import without_password
from polarq.ledger.calls import TaskRow
from polarq.ledger.records import moment, read_counts

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
    as_json: Json = False,
) -> ExitCode:
    """Show the fleet and the latest tasks."""
    with open_client(config) as client:
        calls = client.ledger.calls
        records = client.nodes()
        rows = client.ledger.do(calls.task_rows(client.ledger.do(calls.recent_task_ids(limit))))
        where = without_password(client.url)
    if as_json:
        nodes = [record.model_dump(mode="json") for record in records]
        print_json({"redis": where, "nodes": nodes, "tasks": [_json(row) for row in rows]})
        return ExitCode.OK
    screen = Screen()
    screen.line(("Redis ", "bold"), shown(where))
    print_nodes(screen, records)
    if rows:
        print_table(screen, COLUMNS, [_cells(row) for row in rows])
    else:
        screen.line("no tasks yet; submit one: polarq submit task.yaml")
    return ExitCode.OK


def _json(row: TaskRow) -> dict[str, Any]:
    fields = row.fields
    created, updated = moment(fields.get("created_ms")), moment(fields.get("updated_ms"))
    return {
        "task_id": row.task_id,
        "run_id": fields.get("run_id", ""),
        "state": fields["state"],
        "counts": read_counts(fields).model_dump(),
        "harness": fields.get("harness", ""),
        "model": fields.get("model", ""),
        "created_at": created.isoformat() if created else None,
        "updated_at": updated.isoformat() if updated else None,
    }


def _cells(row: TaskRow) -> list[Text]:
    fields = row.fields
    counts: TaskCounts = read_counts(fields)
    state = TaskState(fields["state"])
    numbers = (counts.running, counts.queued, counts.completed, counts.failed, counts.timed_out, counts.cancelled)
    return [
        Text(shown(row.task_id)),
        Text(state.value, STATES[state]),
        Text(f"{counts.ended}/{counts.total}"),
        *(Text(str(value), "" if value else "dim") for value in numbers),
        Text(shown(fields.get("harness", "-"), limit=40)),
        Text(local_time(moment(fields.get("updated_ms")))),
    ]
