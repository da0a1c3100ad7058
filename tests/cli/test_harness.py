"""`polarq harness`: what there is, what each can be told, and the page of what was found."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polarq.cli.main import main
from polarq.registry import names
from polarq.testing.conformance import table
from polarq.testing.conformance.bench import alone_in

from ..runtimes.local_here import needs_bubblewrap


def test_every_harness_is_listed_with_its_programs_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harness", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names("harnesses"))
    assert "Codex CLI" in said
    assert ">=0.171.0,<0.172.0" in said


def test_the_list_is_a_table_on_a_narrow_terminal_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["harness", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [codex] = [line.split() for line in lines if line.startswith("codex ")]
    assert codex == ["codex", "Codex", "CLI", "0.171.0", ">=0.171.0,<0.172.0"]


def test_a_harness_is_shown_with_what_a_task_can_tell_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harness", "show", "claude_code"]) == 0
    said = capsys.readouterr().out
    assert "package: @anthropic-ai/claude-code (npm)" in said
    assert "mcp servers: sse, stdio, streamable-http" in said
    assert "agent.settings.max_turns  int | None = None\n      Turns of the agent at most;" in said
    assert "agent.settings.reasoning_effort  'low' | 'medium' | 'high' | 'xhigh' | 'max' | None = None\n" in said
    assert main(["harness", "show", "shell"]) == 0
    assert "about: Harness `shell`: any command line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["show", "codx"], "harness 'codx' is not installed here"),
        (["check", "shell"], "there is no program to check"),
        (["check", "codex", "--only", "work"], "there is no check 'work' (works, unstreamed, "),
        (["check", "codex", "--dialect", "latin"], "codex does not speak latin"),
    ],
)
def test_what_cannot_be_shown_or_checked_is_one_line(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarq.bubblewrap.why_not", lambda: "")
    assert main(["harness", *words]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def finding(check: str, **fields: Any) -> dict[str, Any]:
    told = {
        "harness": "codex",
        "dialect": "openai_responses",
        "backend": "local",
        "version": "1.0",
        "date": "2026-01-02",
    }
    return {**told, "check": check, "ok": True, "detail": "", **fields}


def test_findings_become_a_table_with_notes_and_later_ones_replace_earlier_ones(tmp_path: Path) -> None:
    table.write(tmp_path, [finding("works", ok=False, detail="it ended otherwise"), finding("cut", detail="gives up")])
    table.write(tmp_path, [finding("works", date="2026-01-03")])
    table.write(tmp_path, [finding("cut", detail="gives up", backend="docker")])
    page = table.page(tmp_path)
    [docker, row] = [line for line in page.splitlines() if line.startswith("| codex")]
    assert any("| claude_code |" in line and "not run here" in line for line in page.splitlines())
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["codex", "1.0", "openai_responses", "local", "yes", ""]
    assert cells[-1] == "2026-01-03"
    assert "yes [1]" in cells
    assert "| yes [1] |" in docker
    assert [line for line in page.splitlines() if "gives up" in line] == ["1. codex, cut: gives up"]


def test_the_page_in_the_docs_is_what_its_findings_and_the_presets_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "harnesses.md").read_text("utf-8") == table.page(docs / "harnesses"), (
        "python -m polarq.testing.conformance.table docs/harnesses docs/harnesses.md"
    )


def test_a_release_that_cannot_be_installed_is_one_line_and_no_other_check_is_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needs_bubblewrap()
    # A program that no registry ships: nothing is fetched.
    assert main(["harness", "check", "swe_agent", "--version", "9.9.9", "--cache", str(tmp_path)]) == 1
    broken, summary = capsys.readouterr().out.splitlines()
    assert broken == (
        "BROKEN   openai_chat  works  it was never started, so the other checks are left out: setup action 0:"
        " exit code 1: harness swe_agent: no registry ships sweagent: it has to be in the image,"
        " in a version of at least 9.9.9"
    )
    assert summary == "swe_agent 9.9.9: 1 check, 1 broken"


@pytest.mark.parametrize("cache", ["/proc/polarq", "FILE/below"])
def test_a_folder_that_cannot_be_made_for_what_is_installed_is_one_line(
    cache: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polarq.bubblewrap.why_not", lambda: "")
    (tmp_path / "file").touch()
    folder = cache.replace("FILE", str(tmp_path / "file"))
    assert main(["harness", "check", "codex", "--cache", folder]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"polarq: nothing can be checked here: {folder.removesuffix('/below')}")


def test_who_checks_what_another_one_checks_is_told_that_he_waits(tmp_path: Path) -> None:
    told: list[Path] = []
    taken = ExitStack()

    def waits(state: Path) -> None:
        told.append(state)
        taken.close()

    with taken:
        taken.enter_context(alone_in(tmp_path / "local-codex", waits))
        with alone_in(tmp_path / "local-codex", waits):
            assert told == [tmp_path / "local-codex"]
