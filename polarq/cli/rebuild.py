"""`polarq rebuild`: what was captured of rollouts, built anew, offline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from polarq.cli.door import RedisDoor, find_task, open_door
from polarq.cli.export import captured_calls
from polarq.cli.fidelity import fidelity_lines
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.export.completions import Captured, read_completions_file
from polarq.export.jsonl import read_lines
from polarq.export.rebuild import make_builder, rebuilt
from polarq.store.archive import Archive


@command
def rebuild(
    target: Annotated[
        str | None, typer.Argument(metavar="[TASK_OR_ROLLOUT]", help="In Redis; else --from.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="A file of polarq export --format completions.", show_default=False
        ),
    ] = None,
    builder: Annotated[str, typer.Option(metavar="NAME", help="How traces are made.")] = "prefix_merging",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the builder, VALUE as JSON.", show_default=False),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="FOLDER", help="Write the results into this archive.", show_default=False),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> ExitCode:
    """Build stored captured calls anew, print the fidelity, and write the trajectories into an archive."""
    if (target is None) == (source is None):
        raise Unusable("name a task or rollout, or give --from FILE")
    made = make_builder(builder, dict(_setting(text) for text in setting or []))
    archive = Archive(to) if to is not None else None
    captured = _from_redis(target, config) if target is not None else _from_file(source)
    screen, told = Screen(), list[dict[str, Any]]()
    for before, calls, turns in captured:
        result = rebuilt(made, before, calls, turns)
        assert result.trajectory is not None
        if archive is not None:
            archive.put(result)
        if as_json:
            told.append(
                {
                    "rollout_id": result.rollout_id,
                    "builder": builder,
                    "fidelity": result.trajectory.fidelity.model_dump(mode="json"),
                }
            )
            continue
        screen.say((shown(result.rollout_id), "bold"))
        for line in fidelity_lines(result.trajectory):
            screen.say(line)
    if as_json:
        print_json(told)
    return ExitCode.OK


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise Unusable(f"--set takes KEY=VALUE, not '{text}'")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _from_file(path: Path | None) -> Iterator[Captured]:
    assert path is not None
    if not path.is_file():
        raise Unusable(f"there is no file {path}")
    return read_completions_file(read_lines(path))


def _from_redis(target: str, config: Path | None) -> Iterator[Captured]:
    with open_door(config) as door:
        if not isinstance(door, RedisDoor):
            raise Unusable("captured calls are in Redis alone: leave POLARQ_URL out")
        picture, index = find_task(door, target)
        rows = picture.rows if index is None else picture.rows[index : index + 1]
        ended = [row for row in rows if row.outcome is not None]
        if not ended:
            raise Unusable(f"nothing of '{target}' has ended; what was captured is complete then")
        for row in ended:
            result = door.rollout(row.rollout_id)
            calls = captured_calls(door, result)
            if not calls and row.calls:
                raise Unusable(f"what rollout '{row.rollout_id}' captured is not in Redis any more")
            yield Captured(result, calls)
