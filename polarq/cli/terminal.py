"""What reaches the terminal. Text of tasks and sandboxes is shown, never obeyed.

Nothing is printed as markup. Control characters, and characters that reorder or hide text, are shown escaped; long
texts are cut with a mark. JSON keeps every text exactly (and is pure ASCII, so that a terminal obeys none of it).
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any, Literal, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

LINE_LIMIT = 400
"""Characters of a foreign text that are shown on a line."""

_KEPT = {"\u200c", "\u200d"}
"""Joiners: they belong to ordinary words and emoji, and move nothing."""
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def shown(value: object, limit: int = LINE_LIMIT) -> str:
    """A text as one line that is safe on a terminal: whole up to `limit` characters, then cut with a mark."""
    text = str(value)
    rest = len(text) - limit
    if rest > 0:
        text = text[:limit]
    safe = text if text.isascii() and text.isprintable() else "".join(map(_visible, text))
    return f"{safe}… [+{rest} characters]" if rest > 0 else safe


def shown_lines(value: str, limit: int = 60) -> list[str]:
    """A text of several lines, each safe and cut; the middle ones are left out when there are more than `limit`."""
    lines = value.replace("\r\n", "\n").rstrip("\n").split("\n")
    if len(lines) > limit:
        half = limit // 2
        lines = [*lines[:half], f"… [{len(lines) - 2 * half} lines left out]", *lines[-half:]]
    return [shown(line.expandtabs(4)) for line in lines]


def _visible(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if char in _KEPT or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
        return char
    number = ord(char)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def local_time(moment: datetime | None) -> str:
    """A time in the reader's own zone, with the zone."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def clock_time(moment: datetime) -> str:
    """A time of day in the reader's own zone, with the zone."""
    return moment.astimezone().strftime("%H:%M:%S %Z")


def seconds(value: float | None) -> str:
    """A duration in seconds, short: 0.04, 1.3, 128."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


class Screen(Console):
    """A rich console without markup, and without rich's own idea of a closed pipe."""

    def __init__(self, file: IO[str] | None = None) -> None:
        out = file or sys.stdout
        reconfigure = getattr(out, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 shows escapes instead of failing
        super().__init__(file=out, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in self._environ:
            self.width = 4096  # a pipe has no edge: what reads it gets whole lines

    @property
    def live(self) -> bool:
        """Whether lines may be drawn over."""
        return self.is_terminal and not self.is_dumb_terminal and self.is_interactive

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError

    def say(self, *parts: str | Text | tuple[str, str]) -> None:
        """One line, wrapped by the terminal and by nothing else."""
        self.print(Text.assemble(*parts), soft_wrap=True)


def print_json(document: Any, *, line: bool = False) -> None:
    """One JSON document: indented, or on one line."""
    text = json.dumps(document, allow_nan=False) if line else json.dumps(document, allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")
    if line:
        sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    justify: Literal["left", "right"] = "left"


def print_table(screen: Screen, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> None:
    """A table; where it does not fit, one block per row, so that nothing is lost on a narrow terminal."""
    if table_width(columns, rows) <= screen.width:
        screen.print(table(columns, rows))
        return
    width = max(len(column.name) for column in columns)
    for row in rows:
        screen.say(Text(columns[0].name.ljust(width), "dim"), "  ", row[0])
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if cell.plain not in {"", "-"}:
                screen.say(Text(column.name.ljust(width), "dim"), "  ", cell)
        screen.say("")


def table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], gap: int = 2) -> Table:
    """The table itself, as a renderable, with `gap` cells between its columns."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(Text(column.name), justify=column.justify, no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def table_width(columns: Sequence[Column], rows: Sequence[Sequence[Text]], gap: int = 2) -> int:
    """Terminal cells the table takes."""
    cells = [[Text(column.name) for column in columns], *rows]
    return sum(max(row[i].cell_len for row in cells) + gap for i in range(len(columns))) - gap
