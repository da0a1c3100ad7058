"""`polarq artifacts`: the files that came back from a rollout's sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polarq.cli.door import find_task, open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.contracts.artifacts import Artifact
from polarq.errors import ArtifactsUnavailable
from polarq.store.artifacts import fetch, stored_name

_SHOWN_REFUSALS = 5


@command
def artifacts(
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="The id of a rollout that has ended.")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Copy them there.", show_default=False)
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """List the files that came back from a rollout's sandbox, or copy them, where this machine can reach them.

    A folder is one tar archive.
    """
    with open_door(config, url) as door:
        picture, index = find_task(door, rollout)
        if index is None:
            raise Unusable(f"'{rollout}' is a task; name one of its rollouts ({rollout}.0 is the first)")
        if not picture.rows[index].state.terminal:
            raise Unusable(f"rollout '{rollout}' has not ended; its files come with its result")
        found = door.rollout(rollout).artifacts
    problems = {} if to is None else _copy(found, to)
    if as_json:
        made = {"artifacts": [one.model_dump(mode="json") for one in found]}
        print_json(made if to is None else made | {"not_copied": problems})
    else:
        screen = Screen()
        for line in artifact_lines(found):
            screen.say(line)
        for problem in problems.values():
            screen.say(("not copied: ", "red"), shown(problem, limit=400))
        if not found:
            screen.say("nothing came back: the task declares no artifacts and nothing was printed")
    return ExitCode.FAILED if problems else ExitCode.OK


def artifact_lines(found: Sequence[Artifact]) -> Iterator[Text]:
    for one in found:
        line = Text.assemble(f"  {shown(one.name)}  ", (f"{one.size:,} bytes", "dim") if one.where else "")
        if one.problem:
            line.append(f"  {shown(one.problem, limit=200)}", "yellow")
        yield line
        if one.where:
            yield Text(f"    {shown(one.where, limit=400)}", "dim")
        for entry in one.refused[:_SHOWN_REFUSALS]:
            yield Text(f"    left out: {shown(entry.path)} ({shown(entry.reason)})", "yellow")
        more = len(one.refused) - _SHOWN_REFUSALS + one.refused_more
        if more > 0:
            yield Text(f"    left out: {more} more", "yellow")


def _copy(found: Sequence[Artifact], folder: Path) -> dict[str, str]:
    """What could not be copied, and why."""
    problems = {}
    for one in found:
        if one.where:
            try:
                fetch(one.where, folder / stored_name(one.name), one.sha256)
            except ArtifactsUnavailable as exc:
                problems[one.name] = str(exc)
    return problems
