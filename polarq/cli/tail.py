"""`polarq tail`: events as they happen, resumable by their ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import typer

from polarq.cli.door import WAIT_STEP_S, of_task, open_client
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, command, complain, task_code
from polarq.cli.progress import event_line
from polarq.cli.terminal import Screen, print_json
from polarq.client import Client
from polarq.contracts.event import Event
from polarq.errors import InvalidInput, LedgerUnavailable

EVENT_ID = re.compile(r"\d{1,20}(-\d{1,20})?")


@command
def tail(
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="Only this task, from its start to its end.", show_default=False),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Go on after this event (0: from the oldest kept).", show_default=False),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> ExitCode:
    """Show events as they happen: of one task until it ends, or of everything until Ctrl-C.

    With --json each event is one line of JSON; its event_id is what --after takes.
    """
    if after is not None and not EVENT_ID.fullmatch(after):
        raise InvalidInput("--after", [f"'{after}' is not an event id (like 1764420000000-0, as --json prints it)"])
    screen = Screen()
    last = after
    with open_client(config) as client:
        try:
            for event in _everything(client, after) if task is None else _of_one(client, task, after):
                if as_json:
                    print_json(event.model_dump(mode="json"), line=True)
                else:
                    screen.line(event_line(event))
                    screen.file.flush()
                last = event.event_id
        except (KeyboardInterrupt, LedgerUnavailable):
            if last is not None:
                complain(f"to go on from here: --after {last}")
            raise
        if task is None:
            return ExitCode.OK
        record = client.record(task)
        return task_code(record.state, record.counts)


def _everything(client: Client, after: str | None) -> Iterator[Event]:
    last = after or client.ledger.do(client.ledger.calls.last_event_id())
    while True:
        for event in client.ledger.wait_events(last, WAIT_STEP_S):
            last = event.event_id
            yield event


def _of_one(client: Client, task_id: str, after: str | None) -> Iterator[Event]:
    """The task's events; from just before it was made, as event ids are the server's milliseconds."""
    created = client.record(task_id).created_at
    last = after or f"{int(created.timestamp() * 1000) - 1}"
    while True:
        over = client.record(task_id).state.terminal
        events = client.ledger.wait_events(last, 0.001 if over else WAIT_STEP_S)
        if events:
            last = events[-1].event_id
            yield from of_task(events, task_id)
        elif over:
            return
