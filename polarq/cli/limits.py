"""`polarq limits`: what bounds the queue and shares the nodes between runs, in the whole deployment."""

from __future__ import annotations

from typing import Any

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, local_time, print_json, shown
from polarq.ledger.limits import Published
from polarq.settings import Settings
from polarq.topology import load_topology

limits = typer.Typer(help="Show or set the deployment's limits: back-pressure and shares.", no_args_is_help=False)


@limits.command()
@command
def show(config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """Show the limits that hold, whatever this machine's topology file says."""
    with open_door(config, url) as door:
        now = door.limits()
    if as_json:
        print_json(_json(now))
    else:
        _say(now)
    return ExitCode.OK


@limits.command("set")
@command
def publish(config: Config = None, url: Url = None, as_json: Json = False) -> ExitCode:
    """Make the limits section of the topology file the deployment's, until it is set again.

    Submissions go by it at once, workers with their next heartbeat.
    """
    wanted = load_topology(config, Settings.from_env()).limits
    with open_door(config, url) as door:
        now = door.set_limits(wanted)
    if as_json:
        print_json(_json(now))
    else:
        _say(now)
    return ExitCode.OK


def _json(now: Published) -> dict[str, Any]:
    return {"version": now.version, "by": now.by, "limits": now.limits.model_dump(mode="json")}


def _say(now: Published) -> None:
    screen = Screen()
    if now.version:
        at = f", at {local_time(now.at)}" if now.at is not None else ""
        screen.say(f"version {now.version}, published by ", shown(now.by), at)
    else:
        screen.say("nobody has published limits; each process goes by its own topology file, this one by")
    values = now.limits.model_dump(mode="json")
    for name, value in values.items():
        if name != "runs":
            screen.say(f"  {name}: {'no limit' if value is None else shown(value)}")
    for run_id, share in values["runs"].items():
        told = ", ".join(f"{name} {'no limit' if value is None else value}" for name, value in share.items())
        screen.say("  run ", shown(run_id), f": {told}")
