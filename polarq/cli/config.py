"""`polarq config`: check a topology file, show what holds, print the reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polarq.cli.effective import Value, effective
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, command, complain
from polarq.cli.terminal import Screen, print_json, shown
from polarq.settings import Settings
from polarq.topology.lines import check_topology
from polarq.topology.load import load_topology, topology_file
from polarq.topology.reference import example, flow, markdown, sections

config = typer.Typer(help="Check, show and explain the topology file.", no_args_is_help=False)


@config.command()
@command
def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Else the one that every command reads.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> ExitCode:
    """Check a topology file; every mistake is named with its line. Exit 2 if there is one."""
    path = topology_file(file)
    if path is None:
        if as_json:
            print_json({"file": None, "ok": True, "mistakes": []})
        else:
            Screen().say("there is no topology file; the defaults hold (polarq config reference --yaml shows them)")
        return ExitCode.OK
    topology, mistakes = check_topology(path)
    if as_json:
        told = [{"line": m.line, "path": m.path, "message": m.message} for m in mistakes]
        print_json({"file": str(path), "ok": topology is not None, "mistakes": told})
    elif topology is not None:
        nodes = ", ".join(node.id for node in topology.gateway.nodes)
        Screen().say(f"{shown(path)}: ok; {len(topology.gateway.nodes)} nodes: {shown(nodes)}")
    for mistake in [] if as_json else mistakes:
        where = str(path) if mistake.line is None else f"{path}:{mistake.line}"
        complain(f"{where}: {mistake.path}: {mistake.message}" if mistake.path else f"{where}: {mistake.message}")
    return ExitCode.OK if topology is not None else ExitCode.USAGE


@config.command()
@command
def show(config: Config = None, as_json: Json = False) -> ExitCode:
    """Show the settings that hold, and where each came from. Passwords are masked."""
    settings = Settings.from_env()
    path = topology_file(config, settings)
    values = list(effective(load_topology(config, settings), settings))
    if as_json:
        told = [{"key": v.key, "value": v.value, "from": v.origin} for v in values]
        print_json({"file": None if path is None else str(path), "values": told})
        return ExitCode.OK
    screen = Screen()
    screen.say((f"# file: {shown(path) if path else 'none'}", "dim"))
    names = {"default": "default", "file": "file", "env": "POLARQ_REDIS_URL"}
    for value in values:
        for line in _lines(value, names[value.origin]):
            screen.say(line)
    return ExitCode.OK


def _lines(value: Value, origin: str) -> list[Text]:
    style = "dim" if value.origin == "default" else ""
    setting = f"{shown(value.key)}: {shown(flow(value.value), limit=2000)}"
    return [Text.assemble((setting, style), (f"  # {origin}", "dim"))]


@config.command()
@command
def reference(
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="A topology file with every default in it.", show_default=False)
    ] = False,
    as_json: Json = False,
) -> ExitCode:
    """Print the reference of the topology file, as Markdown."""
    if as_json:
        told = [
            {
                "path": section.path,
                "meaning": section.meaning,
                "keys": [
                    {"name": key.name, "type": key.type, "default": key.default, "meaning": key.meaning}
                    for key in section.keys
                ],
            }
            for section in sections()
        ]
        print_json(told)
    else:
        sys.stdout.write(example() if as_yaml else markdown())
    return ExitCode.OK
