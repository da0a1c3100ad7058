"""`polarq tail`: events as they happen, resumable by their ids."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, Unreachable, command, complain, task_code
from polarq.cli.progress import event_line
from polarq.cli.terminal import Screen, print_json
from polarq.errors import InvalidInput, LedgerUnavailable
from polarq.ledger.following import EVENT_ID


@command
def tail(
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="Only this task, from its start to its end.", show_default=False),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on after this event (0: from the oldest kept).", show_default=False),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Show events as they happen: of one task until it ends, or of everything until Ctrl-C.

    With --json each event is one line of JSON; its event_id is what --after takes.
    """
    if after is not None and not EVENT_ID.fullmatch(after):
        raise InvalidInput("--after", [f"'{after}' is not an event id (like 1764420000000-0, as --json prints it)"])
    screen = Screen()
    last = after
    with open_door(config, url) as door:
        try:
            for event in door.events(task, after):
                if as_json:
                    print_json(event.model_dump(mode="json"), line=True)
                else:
                    screen.say(event_line(event))
                    screen.file.flush()
                last = event.event_id
        except (KeyboardInterrupt, LedgerUnavailable, Unreachable):
            if last is not None:
                complain(f"to go on from here: --after {last}")
            raise
        if task is None:
            return ExitCode.OK
        picture = door.picture(task)
        return task_code(picture.state, picture.counts)
