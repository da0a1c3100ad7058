"""`polarq export`: results of tasks, of a run or of an archive as a file of another program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from polarq.cli.door import Door, RedisDoor, check_row, open_door
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, Unusable, command
from polarq.cli.picture import Row
from polarq.cli.terminal import Screen, print_json, shown
from polarq.contracts.completion import Completion
from polarq.contracts.rollout import Outcome, RolloutResult
from polarq.errors import TaskNotFound
from polarq.export.archived import archived_group, archived_tasks
from polarq.export.atif import Atif
from polarq.export.base import Format, Group, Rollout, Verdict, by_task
from polarq.export.completions import Completions
from polarq.export.formats import NAMES
from polarq.export.jsonl import JsonLines
from polarq.export.parquet import Parquet
from polarq.export.parts import Parts
from polarq.export.polar import Polar
from polarq.export.run import export as write
from polarq.export.sft import Sft, SftFilters
from polarq.store.archive import Archive
from polarq.store.completions import captured

_BY_SUFFIX = {".parquet": "parquet", ".jsonl": "jsonl"}


@command
def export(
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="The file; for atif a folder of files.", show_default=False)
    ],
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK_OR_ROLLOUT]...", help="Task ids or rollout ids.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="|".join(NAMES), help="Else by the name of the file.", show_default=False),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="All tasks of a run.", show_default=False)
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="From an archive (all of it, if nothing is named), not Redis.", show_default=False
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="parquet, jsonl: also what must not be trained on, under mask 0.", show_default=False
        ),
    ] = False,
    min_reward: Annotated[
        float | None, typer.Option(metavar="R", help="sft: of rollouts with this reward or more.", show_default=False)
    ] = None,
    best_of_group: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="sft: of each task's N best rollouts, among those named.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="sft: conversations of N tokens at most.", show_default=False)
    ] = None,
    dedup: Annotated[bool, typer.Option(help="sft: the same conversation once.")] = True,
    ids: Annotated[bool, typer.Option("--ids", help="sft: the token ids too.", show_default=False)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="In place of a file that is there.", show_default=False)
    ] = False,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Write results to a file. A killed export goes on where it was when it is called again."""
    filters = SftFilters(min_reward, best_of_group, max_tokens, dedup, ids)
    name = form or _BY_SUFFIX.get(to.suffix, "")
    _check(
        name, filters, everything=everything, targets=bool(targets), run=run is not None, archive=archive is not None
    )
    asked = list(dict.fromkeys(targets or []))
    with ExitStack() as stack:
        if archive is not None:
            kept, door = Archive(archive), None
            named = by_task(asked, lambda one: bool(kept.indices(one))) or dict.fromkeys(archived_tasks(kept, run))
            groups = [functools.partial(archived_group, kept, *one) for one in named.items()]
        else:
            door = stack.enter_context(open_door(config, url))
            named = by_task(asked, functools.partial(_is_task, door))
            groups = [functools.partial(_group, door, *one) for one in named.items()]
            groups += [
                functools.partial(_group, door, one, of_run=True) for one in (door.run_tasks(run) if run else [])
            ]
        made = _format(name, filters, door, everything=everything)
        parts = stack.enter_context(
            Parts(to, made, {"targets": asked, "run": run, "archive": archive}, overwrite=overwrite)
        )
        screen = Screen()
        if parts.resumed and not as_json:
            screen.say(f"going on: {len(parts.seen)} rollouts were through")
        with _bar(screen, len(groups), quiet=as_json) as told:
            report = write(groups, made, parts, told)
    if as_json:
        print_json(
            {
                "file": str(to),
                "format": name,
                "rollouts": report.rollouts,
                "records": report.records,
                "skipped": report.skipped,
                "traces_left_out": report.traces_left_out,
            }
        )
    else:
        screen.say(f"{report.records} records of {report.rollouts} rollouts in ", (shown(to), "bold"))
        for reason, count in report.skipped.most_common():
            screen.say(f"  left out: {count} {shown(reason)}")
        for reason, count in report.traces_left_out.most_common():
            screen.say(f"  traces left out of these rollouts: {count} {shown(reason)}")
    return ExitCode.FAILED if report.damaged else ExitCode.OK


def _check(name: str, filters: SftFilters, *, everything: bool, targets: bool, run: bool, archive: bool) -> None:
    if name not in NAMES:
        raise Unusable(f"give --format, one of {', '.join(NAMES)}, or a file that ends in .parquet or .jsonl")
    if not (targets or run or archive):
        raise Unusable("name tasks or rollouts, or give --run RUN or --archive FOLDER")
    if targets and run:
        raise Unusable("name tasks, or give --run: not both")
    if name == "completions" and archive:
        raise Unusable("an archive has no captured calls; export completions from Redis, before they expire")
    if everything and name not in {"parquet", "jsonl"}:
        raise Unusable(f"--all is for parquet and jsonl: {name} leaves out nothing that it could hold")
    if filters.min_reward is not None and not math.isfinite(filters.min_reward):
        raise Unusable(f"--min-reward {filters.min_reward:g} is no number that a reward could reach")
    if filters != SftFilters() and name != "sft":
        raise Unusable("--min-reward, --best-of-group, --max-tokens, --no-dedup and --ids are for --format sft")


def _format(name: str, filters: SftFilters, door: Door | None, *, everything: bool) -> Format:
    match name:
        case "parquet":
            return Parquet(everything=everything)
        case "jsonl":
            return JsonLines(everything=everything)
        case "sft":
            return Sft(filters)
        case "polar":
            return Polar()
        case "atif":
            return Atif()
    if not isinstance(door, RedisDoor):
        raise Unusable("captured calls are in Redis alone: leave --url and POLARQ_URL out")
    return Completions(functools.partial(captured_calls, door))


def captured_calls(door: RedisDoor, result: RolloutResult) -> list[Completion]:
    """What was captured of a committed result's attempt; nothing where it has expired. Raises `PayloadCorrupt`."""
    record = door.client.record(result.task_id).rollouts[result.index]
    ledger = door.client.ledger
    return ledger.do(captured(ledger.calls.keys, result.rollout_id, record.attempt, record.token))


def _is_task(door: Door, any_id: str) -> bool:
    try:
        door.picture(any_id)
    except TaskNotFound:
        return False
    return True


def _group(door: Door, task_id: str, named: Collection[int] | None = None, *, of_run: bool = False) -> Group:
    """The ended rollouts of a task, all or those named. A run's task that has expired since the run was asked for has
    none. Raises `TaskNotFound`."""
    try:
        picture = door.picture(task_id)
    except TaskNotFound:
        if not of_run:
            raise
        return Group(task_id, [])
    for index in named or ():
        check_row(picture, index)
    rows = [row for row in picture.rows if named is None or row.index in named]
    ended = [_rollout(door, row, row.outcome) for row in rows if row.outcome is not None]
    return Group(picture.task_id, ended, len(rows) - len(ended))


def _rollout(door: Door, row: Row, outcome: Outcome) -> Rollout:
    return Rollout(row.rollout_id, lambda: Verdict(outcome, row.reward), lambda: door.rollout(row.rollout_id))


@contextmanager
def _bar(screen: Screen, groups: int, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Draws how many groups are through, on a terminal."""
    if quiet or not screen.live:
        yield lambda _: None
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("of {task.total} tasks"), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        bar = progress.add_task("", total=groups)
        yield lambda more: progress.advance(bar, more)
