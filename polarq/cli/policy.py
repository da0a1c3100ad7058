"""`polarq policy`: which policy a run's engines sample with, as its trainer says."""

from __future__ import annotations

from typing import Annotated

import typer

from polarq.cli.door import open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.ledger.policy import MOST


@command
def policy(
    run: Annotated[str, typer.Argument(metavar="RUN_ID", help="A training run; see polarq runs.")],
    version: Annotated[
        int | None,
        typer.Argument(
            metavar="[VERSION]",
            min=0,
            max=MOST,
            help="What its engines sample with from now on; without it the present one is shown.",
            show_default=False,
        ),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Show or set a run's policy version. Every rollout that starts records it, so that its staleness is known."""
    with open_door(config, url) as door:
        state = door.run(run) if version is None else door.set_policy_version(run, version)
    if as_json:
        print_json({"run_id": state.run_id, "policy_version": state.policy_version})
    elif state.policy_version is None:
        Screen().say("run ", shown(run), f" has no policy version; its trainer sets one: polarq policy {shown(run)} 0")
    else:
        Screen().say("run ", shown(run), f": policy version {state.policy_version}")
    return ExitCode.OK
