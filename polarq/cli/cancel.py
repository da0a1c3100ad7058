"""`polarq cancel`: stops a task, or one rollout, at whatever stage it is."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import find_task, open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown


@command
def cancel(
    target: Annotated[str, typer.Argument(metavar="TASK_OR_ROLLOUT", help="A task id or rollout id.")],
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Cancel a task or one rollout. What was captured until then is kept."""
    with open_door(config, url) as door:
        picture, index = find_task(door, target)
        done = door.cancel(picture.task_id, index)
    if as_json:
        print_json({"target": target, "already_over": done.already_over, "stopping": list(done.stopping)})
    elif done.already_over:
        Screen().say(shown(target), " had ended already")
    elif done.stopping:
        Screen().say(shown(target), f" is cancelled; {len(done.stopping)} running rollouts are told to stop")
    else:
        Screen().say(shown(target), " is cancelled")
    return ExitCode.OK
