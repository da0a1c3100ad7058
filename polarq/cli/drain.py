"""`polarq drain`: a node takes nothing new and finishes what it has."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown


@command
def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node id; see polarq nodes.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take work again.", show_default=False)] = False,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            min=0,
            metavar="S",
            help="What has not ended after S seconds goes back to the queue, for other nodes.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Drain a node: it takes nothing new and finishes what it has."""
    with open_door(config, url) as door:
        record = door.drain(node, not undo, deadline)
    if as_json:
        print_json(record.model_dump(mode="json"))
    elif undo:
        Screen().say(shown(node), " takes work again")
    else:
        then = "" if deadline is None else f"; what has not ended in {deadline:g} s goes back to the queue"
        Screen().say(shown(node), f" takes nothing new{then}; polarq nodes shows what is left")
    return ExitCode.OK
