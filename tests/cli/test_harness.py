"""`polarq harness`: what there is, what each can be told, and the page of what was found."""

from __future__ import annotations

import json
from contextlib import ExitStack
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polarq import registry
from polarq.cli.main import main
from polarq.contracts.specs import AgentSpec
from polarq.errors import UnknownPlugin
from polarq.registry import names
from polarq.testing.conformance import table
from polarq.testing.conformance.bench import alone_in
from polarq_worker.harnesses.codex import CodexHarness
from polarq_worker.harnesses.preset import Preset

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
    about = capsys.readouterr().out
    assert "about: Harness `shell`: any command line (`agent.custom_shell: {command, cwd, env}`)" in about
    assert "settings: {instruction_on_stdin: true}" in about


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


def given(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    """Installs harnesses beside those of polarq, by name and `module:Class`."""
    more = [EntryPoint(name, value, "polarq.harnesses") for name, value in plugins.items()]
    ours = list(entry_points(group="polarq.harnesses"))
    monkeypatch.setattr("polarq.registry.entry_points", lambda group: [*ours, *more])
    # The registry looks once: its answer is kept beside, and not instead.
    monkeypatch.setattr("polarq.registry._installed", registry._installed.__wrapped__)


class Untold(Preset):
    """A preset that was begun."""

    name: ClassVar[str] = "untold"
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat",)


class Elsewhere(CodexHarness):
    """Whose scenario file is no file."""

    conformance: ClassVar[Path | None] = Path(__file__).parent


def test_a_harness_that_cannot_be_used_is_listed_with_the_reason_and_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, untold=f"{__name__}:Untold", gone="no_such_module:Harness")
    assert main(["harness", "list"]) == 1
    said = capsys.readouterr()
    rows = {line.split()[0]: line for line in said.out.splitlines() if line}
    assert "cannot be used" in rows["untold"]
    assert "cannot be used" in rows["gone"]
    assert "Codex CLI" in rows["codex"]
    assert "polarq: harness 'untold': its class Untold does not say title, program\n" in said.err
    assert "polarq: harness 'gone' needs module 'no_such_module', which is not installed on this node\n" in said.err
    assert main(["harness", "list", "--json"]) == 1
    listed = {one["harness"]: one for one in json.loads(capsys.readouterr().out)["harnesses"]}
    assert listed["untold"]["problem"] == "harness 'untold': its class Untold does not say title, program"
    assert "problem" not in listed["codex"]


@pytest.mark.parametrize("word", ["show", "check"])
def test_a_class_that_does_not_say_all_of_itself_is_one_line(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, untold=f"{__name__}:Untold")
    assert main(["harness", word, "untold"]) == 2
    assert capsys.readouterr().err == "polarq: harness 'untold': its class Untold does not say title, program\n"
    with pytest.raises(UnknownPlugin, match="class Untold does not say title, program"):
        Untold(AgentSpec(harness="untold"))


def test_a_scenario_file_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("polarq.bubblewrap.why_not", lambda: "")
    given(monkeypatch, elsewhere=f"{__name__}:Elsewhere")
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "list").write_text("[]", "utf-8")
    for file, problem in (
        (tmp_path, f"{tmp_path} cannot be read: Is a directory"),
        (tmp_path / "no", f"there is no file {tmp_path / 'no'}; is it in the package's data?"),
        (tmp_path / "latin", f"{tmp_path / 'latin'} is not UTF-8 text (byte 0)"),
        (tmp_path / "list", "it has to be a mapping"),
    ):
        monkeypatch.setattr(Elsewhere, "conformance", file)
        assert main(["harness", "check", "elsewhere"]) == 2
        assert capsys.readouterr().err == f"polarq: conformance scenario of harness 'elsewhere': {problem}\n"
