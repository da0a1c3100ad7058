"""What the demo tells: its steps while it runs, then the table, where things lie, and what to type next."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarq.cli.outcome import ExitCode, complain
from polarq.cli.picture import Picture, counts_text, number, print_rollouts
from polarq.cli.terminal import Screen, print_json, seconds, shown
from polarq.contracts.task import Task


@dataclass(slots=True)
class Report:
    """What happened. `spent_s` is seconds per part of the demo."""

    home: Path
    keep: bool
    picture: Picture | None = None
    spent_s: dict[str, float] = field(default_factory=dict)

    @property
    def results(self) -> Path:
        return self.home / "results"

    @property
    def logs(self) -> Path:
        return self.home / "logs"


class Story:
    """Tells it to a person, or (quiet) only at the end as JSON."""

    def __init__(self, screen: Screen, report: Report, *, quiet: bool) -> None:
        self.screen = screen
        self.report = report
        self.quiet = quiet
        self._began = time.monotonic()
        self._say(("polarq demo", "bold"), ": one real rollout batch on this machine, no GPU")

    def _say(self, *parts: str | tuple[str, str]) -> None:
        if not self.quiet:
            self.screen.say(*parts)
            self.screen.file.flush()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes the seconds of a part."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.report.spent_s[name] = time.monotonic() - began

    @contextmanager
    def part(self, name: str, title: str) -> Iterator[Callable[[str], None]]:
        """One part that is started. The block says what it is."""
        facts: list[str] = []
        with self.timed(name):
            yield facts.append
        self.tell(title, "; ".join(facts), self.report.spent_s[name])

    def tell(self, title: str, fact: str, spent_s: float | None = None) -> None:
        """One line of what is there now."""
        spent = "" if spent_s is None else f"  {seconds(spent_s)} s"
        self._say("  ", ("✔ ", "green"), (title.ljust(10), "bold"), shown(fact), (spent, "dim"))

    def tell_submitted(self, task: Task) -> None:
        self.tell("task", f"submit_rollout.delay(task): {task.num_samples} samples of {task.agent.harness}")

    def tell_results(self) -> None:
        """The table, what the rewards are, and where everything lies."""
        picture = self.report.picture
        if self.quiet or picture is None:
            return
        self.screen.say("")
        print_rollouts(self.screen, picture.rows)
        rewards = ", ".join(number(row.reward) for row in picture.rows if row.reward is not None)
        verdict = f". Rewards {rewards}, each by running the tests." if rewards else ""
        self._say(counts_text(picture.counts), verdict)
        self._say("")
        self._say(("trajectories ", "bold"), shown(self.report.results))
        self._say(("logs         ", "bold"), shown(self.report.logs))

    def tell_kept(self, topology: Path) -> None:
        """What works in another terminal now."""
        picture = self.report.picture
        assert picture is not None
        me, config = spelling(), f"-c {topology}"
        self._say("")
        self._say(("still running; Ctrl-C ends it.", "bold"), " In another terminal:")
        for line in (
            f"{me} status {config}",
            f"{me} show {picture.rows[0].rollout_id} --trajectory {config}",
            f"{me} tail {config}",
            f"{me} submit {_task_file()} {config}",
        ):
            self._say("  ", shown(line))

    def end(self, code: ExitCode) -> None:
        """After everything was stopped."""
        report = self.report
        report.spent_s["total_s"] = time.monotonic() - self._began
        if self.quiet:
            print_json(self._document(code))
            return
        self._say((f"everything is stopped; {seconds(report.spent_s['total_s'])} s in all", "dim"))
        if report.picture is None or report.keep:
            return
        me, first = spelling(), report.results / f"{report.picture.rows[0].rollout_id}.json"
        self._say("")
        self._say(("next", "bold"))
        for what, line in (
            ("every token of the first rollout", f"python3 -m json.tool {first} | less"),
            ("the same, left running for polarq status, show, tail and submit", f"{me} demo --keep"),
            ("a deployment of your own", f"{me} config reference --yaml > topology.yaml && {me} doctor"),
        ):
            self._say("  ", (f"# {what}", "dim"))
            self._say("  ", shown(line))

    def warn(self, text: str) -> None:
        complain(text)

    def _document(self, code: ExitCode) -> dict[str, Any]:
        report = self.report
        picture = report.picture
        return {
            "exit_code": int(code),
            "state_dir": str(report.home),
            "results_dir": str(report.results),
            "logs_dir": str(report.logs),
            "seconds": {name: round(value, 3) for name, value in report.spent_s.items()},
            "task": None if picture is None else picture.json(),
        }


def spelling() -> str:
    """How this program is called from the reader's shell."""
    beside = Path(sys.executable).with_name("polarq")
    if not beside.exists():
        return f"{sys.executable} -m polarq.cli"
    if (found := shutil.which("polarq")) and Path(found).samefile(beside):
        return "polarq"
    return min(os.path.relpath(beside), str(beside), key=len)


def _task_file() -> Path:
    from polarq.testing.calculator import TASK_FILE

    return TASK_FILE
