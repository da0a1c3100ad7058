"""Text is shown, never obeyed."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from polarq.cli.terminal import Column, Screen, print_table, seconds, shown, shown_lines


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("fix [red]src[/] [/usr/lib x] [dist]", "fix [red]src[/] [/usr/lib x] [dist]"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x1b[2J\x1b[1A", "\\x1b[2J\\x1b[1A"),
        ("a\u202eb\u2066c\u200fd", "a\\u202eb\\u2066c\\u200fd"),
        ("one\ntwo\r\tthree", "one\\ntwo\\r\\tthree"),
        ("\x7f\x9b31m\u2028", "\\x7f\\x9b31m\\u2028"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("Grüße, 世界, 👩\u200d💻", "Grüße, 世界, 👩\u200d💻"),
    ],
)
def test_control_characters_are_shown_escaped_and_all_else_literally(text: str, seen: str) -> None:
    assert shown(text) == seen


@given(st.text(max_size=300))
def test_nothing_shown_moves_the_cursor_or_breaks_the_line(text: str) -> None:
    safe = shown(text)
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in safe)
    safe.encode("utf-8")


def test_a_long_line_is_cut_with_a_mark_that_says_how_much_is_missing() -> None:
    safe = shown("x" * 2_000_000, limit=100)
    assert safe == "x" * 100 + "… [+1999900 characters]"


def test_a_long_log_keeps_its_beginning_and_its_end() -> None:
    lines = shown_lines("\n".join(str(n) for n in range(1000)), limit=10)
    assert lines == ["0", "1", "2", "3", "4", "… [990 lines left out]", "995", "996", "997", "998", "999"]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.042, "0.04"), (1.26, "1.3"), (99.96, "100.0"), (128.4, "128")]
)
def test_seconds_are_short(value: float | None, text: str) -> None:
    assert seconds(value) == text


def printed(width: int) -> str:
    out = io.StringIO()
    screen = Screen(out)
    screen.width = width
    columns = [Column("rollout"), Column("outcome"), Column("reward", "right")]
    print_table(screen, columns, [[Text("a-rather-long-task-id.0"), Text("completed"), Text("1")]])
    return out.getvalue()


def test_a_table_that_fits_is_a_table() -> None:
    head, *_ = [line for line in printed(60).splitlines() if line.strip()]
    assert head.split() == ["rollout", "outcome", "reward"]


def test_a_table_that_does_not_fit_is_told_row_by_row_and_loses_nothing() -> None:
    lines = printed(30).splitlines()
    assert [line.split() for line in lines if line.strip()] == [
        ["rollout", "a-rather-long-task-id.0"],
        ["outcome", "completed"],
        ["reward", "1"],
    ]


def test_a_screen_that_is_not_utf_8_shows_escapes_instead_of_failing() -> None:
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii"))
    screen.say(shown("Grüße 世"))
    screen.file.flush()
    assert raw.getvalue() == b"Gr\\xfc\\xdfe \\u4e16\n"
