"""`polarq submit`: one task file through Redis or the HTTP shim, then its way to the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, Unreachable, command, complain, task_code
from polarq.cli.picture import counts_text, print_rollouts
from polarq.cli.progress import follow
from polarq.cli.terminal import Screen, print_json, shown
from polarq.contracts.task import Task
from polarq.errors import LedgerUnavailable


@command
def submit(
    task_file: Annotated[Path, typer.Argument(metavar="TASK_FILE", help="A task as YAML or JSON.", show_default=False)],
    wait: Annotated[bool, typer.Option(help="Wait for the end and print the table; else only the task's id.")] = True,
    num_samples: Annotated[
        int | None,
        typer.Option("--num-samples", "-n", help="Rollouts, instead of what the file says.", show_default=False),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="S", help="Wait at most S seconds (exit 124); the task goes on.", show_default=False
        ),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Submit a task and wait for its rollouts. The exit code is the outcome."""
    task = Task.load(task_file)
    if num_samples is not None:
        task = Task.load({**task.model_dump(mode="json"), "num_samples": num_samples})
    screen = Screen()
    with open_door(config, url) as door:
        accepted = door.submit(task)
        if not wait:
            if as_json:
                print_json({"task_id": accepted.task_id, "created": accepted.created})
            else:
                screen.say(shown(accepted.task_id))
            return ExitCode.OK
        if not as_json:
            known = "" if accepted.created else " (the same request was there already)"
            screen.say("task ", (shown(accepted.task_id), "bold"), f", {task.num_samples} samples{known}")
        try:
            picture = follow(screen, door, accepted.task_id, timeout, quiet=as_json)
        except (KeyboardInterrupt, LedgerUnavailable, Unreachable):
            task_id = accepted.task_id
            complain(f"no longer waiting; task '{task_id}' goes on: polarq show {task_id}, or polarq cancel {task_id}")
            raise
    code = task_code(picture.state, picture.counts)
    if as_json:
        print_json(picture.json() | {"exit_code": int(code)})
        return code
    screen.say("")
    print_rollouts(screen, picture.rows)
    screen.say(counts_text(picture.counts))
    return code
