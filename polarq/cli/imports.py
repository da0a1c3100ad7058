"""`polarq import`: exported files into an archive, which `polarq export --archive` reads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from polarq.cli.options import Json
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.errors import InvalidInput
from polarq.export.formats import read_results
from polarq.store.archive import Archive


@command
def import_files(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Of the formats parquet, jsonl, polar and atif (or its folder).", show_default=False
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", metavar="FOLDER", help="The archive that they come into.", show_default=False)
    ],
    as_json: Json = False,
) -> ExitCode:
    """Read exported results back into an archive. What is there already is never overwritten."""
    archive = Archive(to)
    counts: Counter[str] = Counter()
    for path in files:
        for result in read_results(path):
            if archive.has(result.task_id, result.index):
                raise InvalidInput(result.rollout_id, [f"is in the archive {to} already; choose another --to"])
            archive.put(result)
            counts["rollouts"] += 1
            counts["traces"] += len(result.trajectory.traces) if result.trajectory is not None else 0
    if as_json:
        print_json({"archive": to, "rollouts": counts["rollouts"], "traces": counts["traces"]})
    else:
        Screen().say(f"{counts['traces']} traces of {counts['rollouts']} rollouts in ", (shown(to), "bold"))
    return ExitCode.OK
