"""The table of findings in the docs: python -m polarq.testing.conformance.table FOLDER FILE.

FOLDER holds what runs of the suite wrote (`write`), a file per program, dialect and backend; FILE is made anew of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from polarq.registry import names, plugin
from polarq.testing.conformance.checks import CHECKS
from polarq.testing.conformance.found import Finding
from polarq.testing.conformance.scenario import load, shipped

HEAD = """# Agent programs

Each program below was installed at the version shown and run by polarq's conformance suite (`polarq harness check`,
`make test-harnesses`): unmodified, in a sandbox without a network, through the real proxy, against a scripted model.
`polarq harness show NAME` says what a task can tell it.

This file is made by `make test-harnesses`; [how to add a program](adding-a-harness.md) is another page.
"""


def told(finding: Finding, *, harness: str, dialect: str, backend: str) -> dict[str, Any]:
    """A finding as it is written down, today's."""
    return {
        "harness": harness,
        "dialect": dialect,
        "backend": backend,
        "check": finding.check,
        "ok": finding.ok,
        "refused": finding.refused,
        "detail": finding.detail,
        "version": finding.version,
        "date": datetime.now(UTC).date().isoformat(),
    }


def write(folder: Path, findings: Sequence[Mapping[str, Any]]) -> None:
    """Keeps the findings of one program in one dialect and backend, beside those of other checks of earlier runs."""
    first = findings[0]
    file = folder / f"{first['harness']}-{first['dialect']}-{first['backend']}.json"
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text("utf-8")) if file.exists() else []
    found = {one["check"]: one for one in [*known, *findings]}
    file.write_text(json.dumps([found[check] for check in CHECKS if check in found], indent=1) + "\n", "utf-8")


def page(folder: Path) -> str:
    """The whole page, as Markdown."""
    rows: list[list[str]] = []
    notes: dict[str, int] = {}
    """Each with its number; one that several rows say stands once."""

    def noted(text: str) -> str:
        return f" [{notes.setdefault(text, len(notes) + 1)}]"

    for file in sorted(folder.glob("*.json")):
        findings = {one["check"]: one for one in json.loads(file.read_text("utf-8"))}
        newest = max(findings.values(), key=lambda one: one["date"])
        version = next((one["version"] for one in findings.values() if one["version"]), "")
        cells = [newest["harness"], version, newest["dialect"], newest["backend"]]
        for check in CHECKS:
            finding = findings.get(check)
            mark = "" if finding is None else _mark(finding)
            if finding is not None and finding["detail"]:
                mark += noted(f"{newest['harness']}, {check}: {finding['detail']}")
            cells.append(mark)
        rows.append([*cells, newest["date"]])
    seen = {row[0] for row in rows}
    for name, version, dialects in _presets():
        if name in seen:
            continue
        where = "not run here"
        if name in shipped() and (why := load(name).not_run):
            where += noted(f"{name}: {why}")
        rows.append([name, version, ", ".join(dialects), where, *("" for _ in CHECKS), ""])
    rows.sort(key=lambda row: row[0])
    head = ["harness", "version", "dialect", "sandbox", *CHECKS, "date"]
    lines = [_row(head), _row("---" for _ in head), *map(_row, rows)]
    numbered = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([HEAD, *lines, "", *numbered, *([""] if numbered else []), LEGEND])


def _presets() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(name, default version, dialects) of all that are installed."""
    for name in names("harnesses"):
        found = plugin("harnesses", name)
        if hasattr(found, "program"):
            yield name, found.program.versions.default, found.dialects


LEGEND = """What the columns mean stands in `polarq/testing/conformance/checks.py`. An empty cell was not run. A note
with `yes` says how the program differs from most; that is what the suite expects of it. `refused`: the program does
not support it, and a task that asks for it is refused when it is submitted, with that line. Servers of `mcp_http` are
beyond the sandbox: it alone runs with the machine's network.
"""


def _mark(finding: Mapping[str, Any]) -> str:
    return "refused" if finding.get("refused") else "yes" if finding["ok"] else "**no**"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m polarq.testing.conformance.table")
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    given.file.write_text(page(given.folder), "utf-8")


if __name__ == "__main__":
    main()
