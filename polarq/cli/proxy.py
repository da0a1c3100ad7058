"""`polarq proxy`: a node's proxy by itself, for nodes whose topology says `proxy: {mode: external}`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from polarq.cli.options import Config
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.worker import chosen_node, start


@command
def proxy(
    context: typer.Context,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="Node id; else the topology's only node.", show_default=False),
    ] = None,
    config: Config = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Only print the command that would run.", show_default=False)
    ] = False,
) -> ExitCode:
    """Run a node's proxy by itself: execs `python -m polarq_proxy`; further arguments go to it."""
    if importlib.util.find_spec("aiohttp") is None:
        raise Unusable("the proxy needs aiohttp: pip install 'polarq[proxy]'")
    program = [sys.executable, "-m", "polarq_proxy", "--node", chosen_node(node, config)]
    return start(program, context.args, config, as_json=as_json)
