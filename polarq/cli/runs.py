"""`polarq runs`: training runs, and what of them waits, is in flight or is paused."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Column, Screen, print_json, print_table, shown
from polarq.ledger.control import RunState

COLUMNS = (
    Column("run"),
    Column("state"),
    Column("waiting", "right"),
    Column("in flight", "right"),
    Column("policy", "right"),
)


@command
def runs(config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """List the runs: what waits, what is in flight, what is paused, and their policy versions."""
    with open_door(config, url) as door:
        found = door.runs()
    if as_json:
        print_json([_json(run) for run in found])
    elif found:
        rows_ = [
            [
                Text(shown(run.run_id)),
                Text("paused", "yellow")
                if run.paused
                else Text("active", "green")
                if run.active
                else Text("idle", "dim"),
                Text(str(run.waiting)),
                Text(str(run.held)),
                Text("-" if run.policy_version is None else str(run.policy_version)),
            ]
            for run in found
        ]
        print_table(Screen(), COLUMNS, rows_)
    else:
        Screen().say("no runs yet; a task names its own by run_id")
    return ExitCode.OK


def _state(run: RunState) -> Text:
    if run.paused:
        return Text("paused", "yellow")
    return Text("active", "green") if run.active else Text("idle", "dim")


def _json(run: RunState) -> dict[str, Any]:
    row = {"run_id": run.run_id, "paused": run.paused, "waiting": run.waiting, "in_flight": run.held}
    return row if run.policy_version is None else {**row, "policy_version": run.policy_version}
