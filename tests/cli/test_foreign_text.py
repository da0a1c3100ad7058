"""Text of tasks and sandboxes on the terminal, in a pipe, in JSON: brackets, escapes, reordering, endless lines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from polarq.client import Client
from polarq.contracts.rollout import ExecKind, StepReport
from tests.cli.conftest import POLARQ, Cli, program
from tests.cli.driving import failed, finish, record, task
from tests.cli.terminals import Terminal

BRACKETS = "fix [red]src[/] [/usr/lib x] [dist]"
ESCAPES = "\x1b]0;owned\x07 \x1b[2J\x1b[1A \u202egnp.exe"
SEEN_ESCAPES = "\\x1b]0;owned\\x07 \\x1b[2J\\x1b[1A \\u202egnp.exe"
LONG = "y" * 2_000_000
HOSTILE = f"{BRACKETS} {ESCAPES} {LONG}"


@pytest.fixture
def hostile(client: Client) -> Client:
    """One rollout that failed with such texts everywhere a task or a sandbox can put them."""
    record(client, task("t", instruction=HOSTILE, run_id="r", metadata={"note": HOSTILE}))
    step = StepReport(kind=ExecKind.EXITED, exit_code=3, stdout_tail=HOSTILE + "\n" + ESCAPES, message=HOSTILE)
    finish(client, "t.0", failed(HOSTILE), 0.0, text=HOSTILE, report={HOSTILE[:80]: HOSTILE}, steps=[step])
    return client


def plain(text: str) -> str:
    """What a person reads: without line breaks of the terminal."""
    return text.replace("\r", "").replace("\n", "")


@pytest.mark.parametrize(
    ("command", "columns", "env"),
    [
        (("show", "t", "--trajectory"), 120, {}),
        (("show", "t", "--trajectory"), 40, {"NO_COLOR": "1"}),
        (("show", "t.0"), 40, {}),
        (("status",), 40, {"NO_COLOR": "1"}),
        (("tail", "t"), 40, {}),
    ],
)
def test_nothing_of_it_reaches_a_terminal_as_a_control_sequence(
    hostile: Client, command: tuple[str, ...], columns: int, env: dict[str, str]
) -> None:
    assert hostile
    drawn = Terminal([*POLARQ, *command], columns=columns, env=env).end()
    assert drawn.code == (0 if command[0] == "status" else 1)
    assert "Traceback" not in drawn.text
    for sequence in ("\x1b]0;", "\x07", "\x1b[2J", "\x1b[1A", "\u202e"):
        assert sequence not in drawn.text
    assert len(drawn.data) < 100_000
    if env:
        assert "\x1b[3" not in drawn.text
    if command[0] == "show":
        assert BRACKETS in plain(drawn.text)
        assert SEEN_ESCAPES in plain(drawn.text)
        assert "… [+" in plain(drawn.text)


@pytest.mark.parametrize("command", [("show", "t.0"), ("show", "t", "--trajectory")])
def test_in_a_pipe_the_same_text_stands_on_whole_lines(hostile: Client, command: tuple[str, ...]) -> None:
    assert hostile
    ran = program(*command)
    assert (ran.returncode, ran.stderr) == (1, "")
    line = next(line for line in ran.stdout.splitlines() if "harness/exit_code" in line)
    assert f"{BRACKETS} {SEEN_ESCAPES} yyy" in line
    assert line.rstrip().endswith("characters]")
    assert max(map(len, ran.stdout.splitlines())) < 5000


def test_json_keeps_every_character_and_is_ascii(hostile: Client, cli: Cli) -> None:
    assert hostile
    ran = cli("show", "t", "--trajectory", "--json")
    assert ran.out.isascii()
    assert not any(ord(char) < 32 and char != "\n" for char in ran.out)
    document = ran.json
    assert document["rollouts"][0]["outcome"]["message"] == HOSTILE
    [result] = document["results"]
    assert result["harness"]["steps"][0]["stdout_tail"] == HOSTILE + "\n" + ESCAPES
    trace = result["trajectory"]["traces"][0]
    assert trace["prompt_messages"][0]["content"] == HOSTILE
    assert trace["response_messages"][0]["content"] == HOSTILE
    assert trace["logprobs"] == [-0.5, -0.25, -0.125]


def test_an_id_that_looks_like_markup_is_refused_literally(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(
        yaml.safe_dump({"task_id": "t[/x]", "instruction": "x", "agent": {"harness": "a"}}), encoding="utf-8"
    )
    ran = cli("submit", str(path))
    assert ran.code == 2
    assert "task_id" in ran.err
    ran = cli("show", f"t[/x]{ESCAPES}")
    assert ran.code == 2
    assert f"t[/x]{SEEN_ESCAPES}" in ran.err


def test_a_file_name_is_text_too(cli: Cli, tmp_path: Path) -> None:
    ran = cli("config", "check", str(tmp_path / "[bold]\x1b[2J.yaml"))
    assert ran.code == 2
    assert "[bold]\\x1b[2J.yaml" in ran.err
    assert "\x1b" not in ran.err


@pytest.mark.parametrize(
    "command", [("show", "t", "--trajectory"), ("show", "t", "--json", "--trajectory"), ("status",), ("--help",)]
)
def test_a_closed_pipe_ends_quietly(hostile: Client, command: tuple[str, ...]) -> None:
    assert hostile
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*POLARQ, *command], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert ran.stderr == b""
    assert ran.returncode == 141


def test_a_pipe_that_is_closed_while_events_are_followed_ends_quietly(hostile: Client) -> None:
    process = subprocess.Popen(
        [*POLARQ, "tail", "--json", "--after", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b'{"event_id"')
    process.stdout.close()
    deadline = time.monotonic() + 30
    number = 0
    while process.poll() is None and time.monotonic() < deadline:
        # Each event is written at once, so the next one finds the pipe closed.
        record(hostile, task(f"more-{number}"))
        number += 1
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    assert process.wait(5) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ctrl_c_ends_a_tail_with_130_and_says_how_to_go_on(hostile: Client) -> None:
    terminal = Terminal([*POLARQ, "tail", "--after", "0"], columns=200)
    terminal.read_until(b"task.completed")
    os.kill(terminal.process.pid, signal.SIGINT)
    drawn = terminal.end()
    assert drawn.code == 130
    assert "--after" in drawn.text
    assert "Traceback" not in drawn.text
    assert hostile
