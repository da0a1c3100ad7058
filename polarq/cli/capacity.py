"""`polarq capacity`: how many harnesses a node runs at once, changed while it works."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.client.controls import MOST_RUN_WORKERS


@command
def capacity(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A node id; see polarq nodes.")],
    run_workers: Annotated[
        int | None,
        typer.Argument(
            metavar="[N]",
            min=1,
            max=MOST_RUN_WORKERS,
            help="Harnesses that run at once; without it, what the node's topology says.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Change how many harnesses a node runs at once. What runs is not interrupted."""
    with open_door(config, url) as door:
        record = door.set_capacity(node, run_workers)
    if as_json:
        print_json(record.model_dump(mode="json"))
    else:
        many = "as many harnesses at once as its topology says" if run_workers is None else f"{run_workers} at once"
        Screen().say(shown(node), " runs ", many)
    return ExitCode.OK
