"""`polarq doctor`: looks at every part of a deployment from this machine, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polarq.cli.checks.base import Check, Deployment, Finding, Verdict, fail, ok
from polarq.cli.options import Config, Json
from polarq.cli.outcome import ExitCode, command
from polarq.cli.terminal import Screen, print_json, shown
from polarq.errors import InvalidTopology
from polarq.settings import Settings
from polarq.topology.load import load_topology, topology_file

STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@command
def doctor(config: Config = None, as_json: Json = False) -> ExitCode:
    """Check Redis, proxies, inference, clock, disk and runtimes. Exit 1 if something will not work."""
    screen = Screen()
    findings = []
    for finding in _findings(config):
        findings.append(finding)
        if not as_json:
            _print(screen, finding)
    failed = sum(finding.verdict is Verdict.FAIL for finding in findings)
    warned = sum(finding.verdict is Verdict.WARN for finding in findings)
    if as_json:
        told = [{"part": f.part, "verdict": f.verdict.value, "fact": f.fact, "advice": f.advice} for f in findings]
        print_json({"ok": not failed, "failed": failed, "warnings": warned, "findings": told})
    else:
        screen.say(f"{len(findings)} checks, {failed} failed, {warned} warnings")
    return ExitCode.FAILED if failed else ExitCode.OK


def _findings(config: Path | None) -> Iterator[Finding]:
    settings = Settings.from_env()
    path = topology_file(config, settings)
    try:
        topology = load_topology(config, settings)
    except InvalidTopology as exc:
        for problem in exc.problems:
            yield fail("topology", f"{exc.what}: {problem}", "correct it; polarq config check names every mistake")
        return
    yield ok("topology", f"{path} is good" if path else "there is no file; the defaults hold")
    deployment = Deployment(topology, settings)
    for check in _checks():
        yield from check(deployment)


def _checks() -> tuple[Check, ...]:
    # Here, so that no other command waits for what only these load.
    from polarq.cli.checks.host import check_disk, check_proxy_variables, check_runtimes
    from polarq.cli.checks.ledger import check_redis
    from polarq.cli.checks.serving import check_inference, check_proxies

    return check_redis, check_proxies, check_inference, check_disk, check_runtimes, check_proxy_variables


def _print(screen: Screen, finding: Finding) -> None:
    screen.say(
        (finding.verdict.value.ljust(4), STYLES[finding.verdict]),
        "  ",
        (shown(finding.part), "bold"),
        "  ",
        shown(finding.fact),
    )
    if finding.advice:
        screen.say(("      -> ", "dim"), shown(finding.advice))
    screen.file.flush()
