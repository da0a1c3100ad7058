"""Options that several commands share, so that they are called and explained the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Topology file; else POLARQ_TOPOLOGY, else ./topology.yaml, else the defaults.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.", show_default=False)]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="SHIM", help="Go through the HTTP shim at this address; else POLARQ_URL.", show_default=False
    ),
]
