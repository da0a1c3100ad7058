"""`polarq worker`: another spelling of `celery -A polarq worker -Q NODE`, and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from polarq.cli.options import Config
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.terminal import print_json
from polarq.errors import InvalidTopology
from polarq.settings import Settings
from polarq.topology import load_topology


def celery_command(node_id: str) -> list[str]:
    """How a worker is started: the celery program beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("celery")
    program = str(beside) if os.access(beside, os.X_OK) else shutil.which("celery")
    if program is None:
        raise Unusable("there is no celery program; pip install 'polarq[worker]'")
    return [program, "-A", "polarq", "worker", "-Q", node_id]


@command
def worker(
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
    """Start a node's worker: execs `celery -A polarq worker -Q NODE`; further arguments go to Celery."""
    return start(celery_command(chosen_node(node, config)), context.args, config, as_json=as_json)


def chosen_node(node: str | None, config: Path | None) -> str:
    """The node asked for, else POLARQ_NODE_ID, else the topology's only one. Raises `InvalidTopology`."""
    settings = Settings.from_env()
    chosen = node or settings.node_id
    if chosen is not None:
        return chosen
    nodes = load_topology(config, settings).gateway.nodes
    if len(nodes) > 1:
        raise InvalidTopology("--node", [f"which node is this? one of {', '.join(n.id for n in nodes)}"])
    return nodes[0].id


def start(program: list[str], extra: list[str], config: Path | None, *, as_json: bool) -> ExitCode:
    """Becomes the program (or, with --json, only says what it would become)."""
    arguments = [*program, *extra]
    env = {} if config is None else {"POLARQ_TOPOLOGY": str(config.resolve())}
    if as_json:
        print_json({"exec": arguments, "env": env})
        return ExitCode.OK
    sys.stdout.flush()
    os.environ.update(env)
    try:
        os.execvp(arguments[0], arguments)  # noqa: S606 - no shell is wanted
    except OSError as exc:
        raise Unusable(f"cannot start {arguments[0]}: {exc.strerror}") from None
