"""`polarq show`: one task or one rollout, down to what was said and sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from polarq.callback.record import CallbackAttempt, Ending
from polarq.cli.artifacts import artifact_lines
from polarq.cli.door import Door, find_task, open_door
from polarq.cli.fidelity import fidelity_lines
from polarq.cli.options import Config, Json, Url
from polarq.cli.outcome import ExitCode, Unusable, command, rollout_code, task_code
from polarq.cli.picture import Picture, Row, counts_text, number, print_rollouts, state_text
from polarq.cli.terminal import Column, Screen, local_time, print_json, print_table, seconds, shown, shown_lines
from polarq.contracts.rollout import RolloutResult, StepReport
from polarq.contracts.sandbox import SandboxReport
from polarq.contracts.trajectory import Trace, Trajectory


@command
def show(
    target: Annotated[str, typer.Argument(metavar="TASK_OR_ROLLOUT", help="A task id or rollout id.")],
    trajectory: Annotated[
        bool, typer.Option("--trajectory", help="Also what was said and sampled.", show_default=False)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Write the whole result there, trajectories included.", show_default=False
        ),
    ] = None,
    config: Config = None,
    url: Url = None,
    as_json: Json = False,
) -> ExitCode:
    """Show a task or a rollout. The exit code is the outcome (5: not ended yet)."""
    screen = Screen()
    with open_door(config, url) as door:
        picture, index = find_task(door, target)
        rows = picture.rows if index is None else (picture.rows[index],)
        code = task_code(picture.state, picture.counts) if index is None else rollout_code(rows[0].state)
        wanted = trajectory or out is not None or index is not None
        tries = door.callbacks(picture.task_id) if index is None and picture.state.terminal else []
        results = {row.rollout_id: result for row in rows if (result := _result(door, row))} if wanted else {}
    told = {"callbacks": [attempt.model_dump(mode="json") for attempt in tries]} if tries else {}
    document = _document(picture, index, results, full=trajectory or out is not None) | told
    if out is not None:
        _write(out, document)
    if as_json:
        brief = document if trajectory else _document(picture, index, results, full=False) | told
        print_json(brief | {"exit_code": int(code)})
        return code
    if index is None:
        _print_task(screen, picture)
        for line in _callback_lines(tries):
            screen.say(line)
    print_rollouts(screen, rows)
    for row in rows:
        result = results.get(row.rollout_id)
        if result is not None and (index is not None or trajectory):
            _print_rollout(screen, result, trajectory=trajectory)
    if out is not None:
        screen.say("written: ", shown(out))
    return code


def _result(door: Door, row: Row) -> RolloutResult | None:
    """The whole result of an ended rollout; None while it has none."""
    return door.rollout(row.rollout_id) if row.outcome is not None else None


def _document(picture: Picture, index: int | None, results: dict[str, RolloutResult], *, full: bool) -> dict[str, Any]:
    if index is not None:
        row = picture.rows[index]
        result = results.get(row.rollout_id)
        extra = {} if result is None else result.model_dump(mode="json", exclude=None if full else {"trajectory"})
        return row.json() | ({"result": extra} if result is not None else {})
    document = picture.json()
    if full:
        document["results"] = [result.model_dump(mode="json") for result in results.values()]
    return document


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as exc:
        raise Unusable(f"cannot write {path}: {exc.strerror}; choose another --out") from None


def _print_task(screen: Screen, picture: Picture) -> None:
    screen.say(("task ", "bold"), shown(picture.task_id), f"  {picture.state.value}  {counts_text(picture.counts)}")
    facts = (
        ("run", picture.run_id),
        ("harness", picture.harness),
        ("model", picture.model),
        ("created", local_time(picture.created_at)),
        ("changed", local_time(picture.updated_at)),
    )
    screen.say("  ".join(f"{name} {shown(value)}" for name, value in facts if value))
    if picture.waiting_for is not None:
        screen.say(("waits for ", "yellow"), shown(picture.waiting_for, limit=400))


def _callback_lines(tries: Sequence[CallbackAttempt]) -> Iterator[Text]:
    """How the task's callback fares: in one line, and why it failed last."""
    if not tries:
        return
    last = tries[-1]
    said = f" ({last.status})" if last.status is not None else ""
    at = f"{shown(last.host)}, try {last.number} at {local_time(last.at)}"
    if last.ending is Ending.DELIVERED:
        yield Text.assemble("callback ", ("delivered", "green"), f"{said} to {at}")
        return
    then = "given up" if last.ending.final else "tried again"
    how = last.ending.value.replace("_", " ")
    yield Text.assemble("callback ", (f"{how}{said}", "red"), f" at {at}; {then}  {shown(last.message, limit=200)}")


def _print_rollout(screen: Screen, result: RolloutResult, *, trajectory: bool) -> None:
    screen.say("")
    screen.say(("rollout ", "bold"), shown(result.rollout_id), "  ", state_text(result.outcome.state))
    where = f"attempt {result.attempt} on {shown(result.node_id or '-')}"
    screen.say(f"  {where}, from {local_time(result.started_at)} to {local_time(result.ended_at)}")
    for loss in result.losses:
        screen.say("  lost: ", shown(loss.line))
    at_claim = "no version published" if result.policy_version is None else f"version {result.policy_version}"
    sampled = f", sampled by {', '.join(shown(version) for version in result.versions)}" if result.versions else ""
    screen.say(f"  policy at its start: {at_claim}{sampled}")
    outcome = result.outcome
    screen.say(f"  trainable: {'yes' if outcome.trainable else 'no'}")
    spent = [f"{k.removesuffix('_s')} {seconds(v)}" for k, v in result.timing.model_dump().items() if v is not None]
    screen.say(f"  seconds: {', '.join(spent) or '-'}")
    if result.reward is not None:
        screen.say("  reward ", (number(result.reward.outcome), "bold"), f" by {shown(result.reward.evaluator) or '-'}")
        for key, value in result.reward.report.items():
            screen.say(f"    {shown(key)}: {shown(value if isinstance(value, str) else json.dumps(value))}")
    if result.harness is not None:
        screen.say(f"  harness {shown(result.harness.name)}: {'ok' if result.harness.ok else 'not ok'}")
        for number_, step in enumerate(result.harness.steps):
            for line in _step_lines(number_, step):
                screen.say(line)
    if result.sandbox is not None:
        for line in _sandbox_lines(result.sandbox):
            screen.say(line)
    if result.artifacts:
        screen.say("  files:")
        for line in artifact_lines(result.artifacts):
            screen.say(Text("  ").append_text(line))
    if result.trajectory is not None:
        _print_trajectory(screen, result.trajectory, messages=trajectory)


def _sandbox_lines(sandbox: SandboxReport) -> Iterator[Text]:
    what = f"{shown(sandbox.backend)} ({shown(sandbox.isolation)}), {sandbox.origin}, network {sandbox.network}"
    yield Text(f"  sandbox {what}")
    for denied in sandbox.denied:
        yield Text(f"    refused: {shown(denied.target)} ({denied.count})", "yellow")
    for cut in sandbox.history:
        done = f"{cut.refs_removed} refs and {cut.commits_removed} commits taken away"
        yield Text(f"    history of {shown(cut.repository)}: {shown(cut.problem, limit=200) or done}")


def _step_lines(index: int, step: StepReport) -> Iterator[Text]:
    how = step.kind.value.replace("_", " ")
    code = f" {step.exit_code}" if step.exit_code is not None else ""
    signal = f" by signal {step.signal}" if step.signal is not None else ""
    yield Text(f"    step {index}: {how}{code}{signal}, {seconds(step.duration_s)} s {shown(step.message)}")
    for name, text in (("stdout", step.stdout_tail), ("stderr", step.stderr_tail)):
        if text.strip():
            yield Text(f"      {name} (its end)", "dim")
            for line in shown_lines(text, limit=12):
                yield Text(f"      | {line}")


TRACE_COLUMNS = (
    Column("trace"),
    Column("prompt", "right"),
    Column("response", "right"),
    Column("trainable", "right"),
    Column("reward", "right"),
    Column("finish"),
)


def _print_trajectory(screen: Screen, trajectory: Trajectory, *, messages: bool) -> None:
    for line in fidelity_lines(trajectory):
        screen.say(line)
    if trajectory.traces:
        print_table(screen, TRACE_COLUMNS, [_trace_cells(trace) for trace in trajectory.traces])
    if messages:
        for trace in trajectory.traces:
            for line in _trace_lines(trace):
                screen.say(line)


def _trace_cells(trace: Trace) -> list[Text]:
    numbers = (len(trace.prompt_ids), len(trace.response_ids), trace.trainable_tokens)
    return [
        Text(str(trace.index)),
        *(Text(f"{value:,}") for value in numbers),
        Text(number(trace.reward)),
        Text(shown(trace.untrainable or trace.finish_reason or "-", limit=60)),
    ]


def _trace_lines(trace: Trace) -> Iterator[Text]:
    yield Text(f"trace {trace.index}", "bold")
    for message in [*trace.prompt_messages, *trace.response_messages]:
        yield Text(f"  {shown(message.get('role', '?'))}", "cyan")
        content = message.get("content")
        for line in shown_lines(content if isinstance(content, str) else json.dumps(content)) if content else []:
            yield Text(f"    {line}")
        for call in message.get("tool_calls") or []:
            yield Text(f"    calls {shown(json.dumps(call))}", "dim")
