"""Progress while a task runs: a table that is drawn over on a terminal, one line per change elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from rich.live import Live
from rich.table import Table
from rich.text import Text

from polarq.cli.door import Door, Update
from polarq.cli.picture import Picture, Row, counts_text, number, state_text
from polarq.cli.terminal import Screen, clock_time, seconds, shown
from polarq.contracts.event import Event
from polarq.contracts.rollout import RolloutState

MARKS = {
    RolloutState.COMPLETED: ("✔", "green"),
    RolloutState.FAILED: ("✘", "red"),
    RolloutState.TIMED_OUT: ("✘", "red"),
    RolloutState.CANCELLED: ("-", "yellow"),
    RolloutState.QUEUED: ("·", "dim"),
}
LIVE_ROWS = 20
"""Rollouts drawn at once; of a larger task those that run come first."""


def follow(screen: Screen, door: Door, task_id: str, timeout_s: float | None, *, quiet: bool = False) -> Picture:
    """Shows the task's way to its end and returns it as it then is. Raises `ResultTimeout`."""
    updates = door.watch(task_id, timeout_s)
    if quiet:
        return _last(updates)
    return _drawn(screen, updates) if screen.live else _told(screen, updates)


def _last(updates: Iterator[Update]) -> Picture:
    *_, update = updates
    return update.picture


def _told(screen: Screen, updates: Iterator[Update]) -> Picture:
    """One line per change."""
    before: dict[str, RolloutState] = {}
    waiting_for: str | None = None
    for update in updates:
        picture = update.picture
        if picture.waiting_for not in {None, waiting_for}:
            screen.say("waits for ", shown(picture.waiting_for, limit=400))
        waiting_for = picture.waiting_for
        for event in update.events:
            if event.type == "session.state_changed":
                before[str(event.data.get("session_id"))] = _state(event)
                screen.say(_change_line(event))
        for row in picture.rows if picture.state.terminal else ():
            # An end that no event told: events are capped, the record is not.
            if row.state is not before.get(row.rollout_id):
                screen.say(shown(row.rollout_id), "  ", state_text(row.state))
        screen.file.flush()
    return picture


def _state(event: Event) -> RolloutState:
    try:
        return RolloutState(str(event.data.get("status")))
    except ValueError:
        return RolloutState.QUEUED


def _change_line(event: Event) -> Text:
    """One step of a rollout, for a person who waits."""
    state, data = _state(event), event.data
    more = f"reward {number(data.get('reward'))}" if state.terminal else f"on {shown(data.get('node_id') or '-')}"
    rollout = shown(data.get("session_id"))
    return Text.assemble((clock_time(event.at), "dim"), "  ", rollout, "  ", state_text(state), "  ", more)


def event_line(event: Event) -> Text:
    """One event as a line: when, what, whose, and the rest of what it says."""
    data = dict(event.data)
    task, rollout = data.pop("task_id", None), data.pop("session_id", None)
    status = data.pop("status", None)
    parts: list[str | tuple[str, str]] = [(clock_time(event.at), "dim"), "  ", shown(event.type)]
    if rollout is not None or task is not None:
        parts += ["  ", (shown(rollout or task), "bold")]
    if status is not None:
        parts += ["  ", shown(status)]
    rest = [f"{shown(key)}={shown(value)}" for key, value in data.items() if value not in (None, "")]
    return Text.assemble(*parts, *(["  ", " ".join(rest)] if rest else []))


class Board:
    """The table while it is drawn over: the seconds in a stage go on between updates."""

    def __init__(self) -> None:
        self.picture: Picture | None = None
        self._skew_s = 0.0

    def show(self, picture: Picture) -> None:
        self.picture = picture
        if picture.updated_at is not None:
            # Stage times are the server's: the newest of them is not in our future.
            self._skew_s = max(self._skew_s, (picture.updated_at - datetime.now(UTC)).total_seconds())

    def __rich__(self) -> Table:
        board = Table.grid(padding=(0, 2, 0, 0))
        picture = self.picture
        if picture is None:
            return board
        rows = sorted(picture.rows, key=lambda row: (row.state.terminal or row.state is RolloutState.QUEUED, row.index))
        for row in sorted(rows[:LIVE_ROWS], key=lambda row: row.index):
            board.add_row(*self._cells(row))
        board.add_row(Text(""), Text(counts_text(picture.counts), "dim"))
        if picture.waiting_for is not None:
            board.add_row(Text(""), Text(f"waits for {shown(picture.waiting_for, limit=400)}", "yellow"))
        return board

    def _cells(self, row: Row) -> list[Text]:
        mark, style = MARKS.get(row.state, ("▸", "cyan"))
        if row.state.terminal:
            spent, detail = row.timing.total_s, f"reward {number(row.reward)}"
            if row.outcome is not None and row.outcome.state is not RolloutState.COMPLETED:
                detail = shown(f"{row.outcome.boundary.value}: {row.outcome.message}", limit=80)
        else:
            spent = None if row.stage_at is None else self._since(row.stage_at)
            detail = f"on {shown(row.node_id)}" if row.node_id else ""
        return [
            Text(mark, style),
            Text(shown(row.rollout_id), overflow="ellipsis", no_wrap=True),
            state_text(row.state),
            Text(f"{seconds(spent)} s" if spent is not None else "", justify="right"),
            Text(detail, overflow="ellipsis", no_wrap=True),
        ]

    def _since(self, moment: datetime) -> float:
        return max(0.0, (datetime.now(UTC) - moment).total_seconds() + self._skew_s)


def _drawn(screen: Screen, updates: Iterator[Update]) -> Picture:
    board = Board()
    with Live(board, console=screen, refresh_per_second=8, transient=True):
        for update in updates:
            board.show(update.picture)
    assert board.picture is not None
    return board.picture
