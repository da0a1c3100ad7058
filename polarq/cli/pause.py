"""`polarq pause` and `polarq resume`: a node takes nothing new, or nothing of a run is started, until it is resumed."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.errors import InvalidInput

Node = Annotated[str | None, typer.Argument(metavar="[NODE]", help="A node id; see polarq nodes.", show_default=False)]
Run = Annotated[
    str | None, typer.Option("--run", metavar="RUN_ID", help="A training run instead of a node.", show_default=False)
]


@command
def pause(
    node: Node = None, run: Run = None, config: Config = None, url: Url = None, as_json: Json = False
) -> ExitCode:
    """Pause a node or a run: nothing new is started, what runs goes on."""
    return _set("pause", node, run, config, url, as_json)


@command
def resume(
    node: Node = None, run: Run = None, config: Config = None, url: Url = None, as_json: Json = False
) -> ExitCode:
    """Let a paused node or run go on."""
    return _set("resume", node, run, config, url, as_json)


def _set(verb: str, node: str | None, run: str | None, config: Config, url: Url, as_json: bool) -> ExitCode:
    if (node is None) == (run is None):
        raise InvalidInput(f"polarq {verb}", ["name a node, or a run with --run"])
    on = verb == "pause"
    with open_door(config, url) as door:
        if node is not None:
            record = door.pause_node(node, on)
            found = record.model_dump(mode="json")
            text = "takes nothing new; what it has goes on" if on else "takes work again"
        else:
            assert run is not None
            state = door.pause_run(run, on)
            found = {"run_id": run, "paused": state.paused, "waiting": state.waiting, "in_flight": state.held}
            told = f"{state.waiting} rollouts wait, {state.held} are in flight"
            text = f"is paused; {told}" if on else f"goes on; {told}"
    if as_json:
        print_json(found)
    else:
        Screen().say("run " if node is None else "", shown(run if node is None else node), " ", text)
    return ExitCode.OK
