"""`polarq acknowledge`: the results of a task, or of one rollout, are stored elsewhere and may go."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import find_task, open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown


@command
def acknowledge(
    target: Annotated[str, typer.Argument(metavar="TASK_OR_ROLLOUT", help="A task id or rollout id that has ended.")],
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Say that results are stored: they are archived (retention.archive), then deleted. Outcome and reward stay."""
    with open_door(config, url) as door:
        picture, index = find_task(door, target)
        count = door.acknowledge(picture.task_id, index)
    if as_json:
        print_json({"target": target, "acknowledged": count})
    elif count:
        Screen().say(shown(target), f": {count} {'result' if count == 1 else 'results'} acknowledged and deleted")
    else:
        Screen().say(shown(target), " was acknowledged already")
    return ExitCode.OK
