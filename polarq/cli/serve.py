"""`polarq serve`: the HTTP shim."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Annotated

import typer

from polarq.cli.options import Config
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.terminal import print_json
from polarq.settings import Settings
from polarq.topology import load_topology


@command
def serve(
    config: Config = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, instead of rollout.host.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port, instead of rollout.port; 0: a free one.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say the address and the token as JSON.", show_default=False)
    ] = False,
) -> ExitCode:
    """Run the HTTP shim: Polar's own routes and JSON, so that its clients work unchanged."""
    if importlib.util.find_spec("aiohttp") is None:
        raise Unusable("the HTTP shim needs aiohttp: pip install 'polarq[worker]'")
    from polarq.http.serve import serve as serve_shim

    settings = Settings.from_env()
    topology = load_topology(config, settings)
    if as_json:
        asyncio.run(serve_shim(topology, settings, host, port, say=_say_json))
    else:
        asyncio.run(serve_shim(topology, settings, host, port))
    return ExitCode.OK


def _say_json(line: str) -> None:
    print_json({"said": line}, line=True)
