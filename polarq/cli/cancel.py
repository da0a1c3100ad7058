"""`polarq cancel`: stops a task, or one rollout, at whatever stage it is."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_client
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown


@command
def cancel(
    target: Annotated[str, typer.Argument(metavar="TASK_OR_ROLLOUT", help="A task id or rollout id.")],
    config: Config = None,
    as_json: Json = False,
) -> ExitCode:
    """Cancel a task or one rollout. What was captured until then is kept."""
    with open_client(config) as client:
        done = client.cancel(target)
    running = [rollout.rollout_id for rollout in done.active]
    if as_json:
        print_json({"target": target, "already_over": done.already_over, "stopping": running})
    elif done.already_over:
        Screen().line(shown(target), " had ended already")
    elif running:
        Screen().line(shown(target), f" is cancelled; {len(running)} running rollouts are told to stop")
    else:
        Screen().line(shown(target), " is cancelled")
    return ExitCode.OK
