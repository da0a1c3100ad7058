"""`polarq inference pause`, `resume` and `status`: model calls are held back while a policy's weights change."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command, complain
from polarq.cli.terminal import Column, Screen, print_json, print_table, shown
from polarq.client.pausing import LEASE_S, LONGEST_S, TIMEOUT_S, InferenceState, NodeInference
from polarq.errors import InvalidInput, NotPaused

COLUMNS = (
    Column("node"),
    Column("alive"),
    Column("inference"),
    Column("calls"),
    Column("in flight", "right"),
    Column("held back", "right"),
)

Run = Annotated[
    str | None,
    typer.Option("--run", metavar="RUN_ID", help="Model calls of this run only; else of all.", show_default=False),
]


@command
def pause(
    run: Run = None,
    abort: Annotated[
        bool, typer.Option("--abort", help="Cut the calls in flight instead of waiting for them.", show_default=False)
    ] = False,
    lease: Annotated[
        float, typer.Option("--lease", min=0, metavar="S", help="The pause ends by itself after S seconds.")
    ] = LEASE_S,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0, metavar="S", help="Wait at most S seconds for calls in flight (exit 124)."),
    ] = TIMEOUT_S,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Hold model calls back, and wait until none is in flight. A later pause prolongs it.

    Rollouts go on: their calls wait at the proxies, and pass when the pause ends.
    """
    _check({"--lease": lease, "--timeout": timeout})
    with open_door(config, url) as door:
        try:
            state = door.pause_inference("abort" if abort else "drain", timeout, lease, run)
        except (KeyboardInterrupt, NotPaused):
            complain(f"the pause holds for up to {lease:g} s: {_words('polarq inference resume', run)} ends it")
            raise
    if as_json:
        print_json(_json(state, run))
    else:
        Screen().say(_whose(run), f" are held back for {lease:g} s, and none is in flight")
    return ExitCode.OK


@command
def resume(run: Run = None, config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """End a pause of model calls."""
    with open_door(config, url) as door:
        state = door.resume_inference(run)
    if as_json:
        print_json(_json(state, run))
    else:
        Screen().say(_whose(run), " pass")
    return ExitCode.OK


@command
def status(run: Run = None, config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """Show whether model calls are held back, and what each node says of it."""
    with open_door(config, url) as door:
        state = door.inference_state(run)
    if as_json:
        print_json(_json(state, run))
        return ExitCode.OK
    screen = Screen()
    held = Text("are held back", "yellow") if state.paused else Text("pass", "green")
    flying = "" if state.in_flight is None else f"; {state.in_flight} in flight"
    screen.say(_whose(run), " ", held, flying)
    if state.nodes:
        print_table(screen, COLUMNS, [_cells(node) for node in state.nodes])
    else:
        screen.say("no node has announced itself")
    return ExitCode.OK


def _check(seconds: dict[str, float]) -> None:
    for flag, value in seconds.items():
        if not 0 < value <= LONGEST_S:
            raise InvalidInput(flag, [f"{value:g} is no number of seconds above 0, and at most {LONGEST_S:.0f}"])


def _whose(run: str | None) -> str:
    return "all model calls" if run is None else f"model calls of run {shown(run)}"


def _words(text: str, run: str | None) -> str:
    return text if run is None else f"{text} --run {run}"


def _cells(node: NodeInference) -> list[Text]:
    usable = {True: "ok", False: "down", None: "?"}[node.usable]
    return [
        Text(shown(node.node_id)),
        Text("yes") if node.alive else Text("no", "red"),
        Text(usable, "red" if node.usable is False else ""),
        Text("held back", "yellow") if node.paused else Text("pass"),
        Text("-" if node.in_flight is None else str(node.in_flight)),
        Text(str(node.waiting)),
    ]


def _json(state: InferenceState, run: str | None) -> dict[str, Any]:
    nodes = [
        {
            "node_id": node.node_id,
            "alive": node.alive,
            "inference": node.usable,
            "paused": node.paused,
            "in_flight": node.in_flight,
            "waiting": node.waiting,
        }
        for node in state.nodes
    ]
    return {"run_id": run, "paused": state.paused, "in_flight": state.in_flight, "nodes": nodes}
