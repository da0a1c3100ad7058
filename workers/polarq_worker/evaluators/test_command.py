"""Runs a task's test command and reads how each test ended."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarq.contracts.evaluators import TestOnOutputConfig
from polarq.contracts.sandbox import ExecCategory
from polarq_worker.evaluators.answers import NoAnswer, read_file
from polarq_worker.evaluators.expectations import is_full
from polarq_worker.evaluators.statuses import Statuses, from_output, from_report, worst
from polarq_worker.runtimes.base import ExecResult, Runtime

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
MAX_REPORT_BYTES = 64 * 1024 * 1024
READ_S = 60.0
MAX_IGNORED = 500
PYTEST_USAGE_ERROR = 4


@dataclass(frozen=True)
class TestRun:
    """One run: how the command ended, and the tests it told of."""

    __test__ = False

    result: ExecResult
    statuses: Statuses
    read_from: str
    notes: dict[str, Any] = field(default_factory=dict)


async def run_tests(
    runtime: Runtime,
    config: TestOnOutputConfig,
    env: Mapping[str, str],
    *,
    own_tests: Sequence[str],
    timeout_s: float,
    log: str,
    alone: bool,
) -> TestRun:
    """Runs `test_command` in `repo_dir`. pytest is asked, by its environment, for a report of its own (a summary can be
    cut, wrapped or switched off) and to pass by the test files `own_tests`.

    What an agent left running in the sandbox serves the tests until they end (`alone`: there is no such thing); then it
    is killed, where the backend can, before anything is read.
    """
    if config.report_path is not None:
        return await _with_named_report(runtime, config, env, own_tests, timeout_s, log, alone=alone)
    report = f"{runtime.layout.eval_log_dir}/junit-{secrets.token_hex(8)}.xml"
    asked = ["-rfEsxXp", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    result = await _run(runtime, config, env, [*asked, *_ignores(own_tests)], timeout_s, log)
    if result.exit_code == PYTEST_USAGE_ERROR and not _from_text(config, result):
        # A pytest that does not know these options refuses to start: once more, without asking.
        result = await _run(runtime, config, env, _ignores(own_tests), max(timeout_s - result.duration_s, 0.0), log)
        return await _read(runtime, config, result, None)
    return await _read(runtime, config, result, report)


async def _with_named_report(
    runtime: Runtime,
    config: TestOnOutputConfig,
    env: Mapping[str, str],
    own_tests: Sequence[str],
    timeout_s: float,
    log: str,
    *,
    alone: bool,
) -> TestRun:
    path = config.report_path or ""
    # What lies there now is not this run's.
    await runtime.exec(
        ["rm", "-f", "--", path], cwd=config.repo_dir, env=env, timeout_s=READ_S, category=ExecCategory.VERIFIER
    )
    result = await _run(runtime, config, env, _ignores(own_tests), timeout_s, log)
    await runtime.end_background()
    statuses, problem = await _from_report(runtime, config.repo_dir, path)
    if statuses is not None and not alone:
        # Somebody who was left running may have written there in time; what is printed comes through a pipe.
        statuses = worst([*statuses.items(), *_from_text(config, result).items()])
    if statuses is not None:
        return TestRun(result, statuses, "report_path")
    fallback = _from_text(config, result)
    return TestRun(result, fallback, "output", {"report_problem": f"report_path: {problem}"})


async def _run(
    runtime: Runtime,
    config: TestOnOutputConfig,
    env: Mapping[str, str],
    pytest_options: Sequence[str],
    timeout_s: float,
    log: str,
) -> ExecResult:
    options = " ".join([env.get("PYTEST_ADDOPTS", ""), *map(shlex.quote, pytest_options)]).strip()
    return await runtime.exec(
        config.test_command,
        cwd=config.repo_dir,
        env={**env, **({"PYTEST_ADDOPTS": options} if options else {})},
        timeout_s=timeout_s,
        log=log,
        max_output_bytes=MAX_OUTPUT_BYTES,
        category=ExecCategory.VERIFIER,
    )


async def _read(runtime: Runtime, config: TestOnOutputConfig, result: ExecResult, report: str | None) -> TestRun:
    printed = _from_text(config, result)
    await runtime.end_background()
    if report is not None:
        reported, _ = await _from_report(runtime, config.repo_dir, report)
        if reported:
            # Both: one command may run pytest twice, or something else beside it.
            return TestRun(result, worst([*printed.items(), *reported.items()]), "report and output")
    return TestRun(result, printed, "output")


def _from_text(config: TestOnOutputConfig, result: ExecResult) -> Statuses:
    known: Collection[str] = {test_id for test_id in config.expected_output_json if is_full(test_id)}
    return from_output(f"{result.stdout_text}\n{result.stderr_text}", known)


async def _from_report(runtime: Runtime, folder: str, path: str) -> tuple[Statuses | None, str]:
    """(statuses, "") or (None, why not)"""
    try:
        data = await read_file(runtime, path, MAX_REPORT_BYTES, cwd=folder)
        return (None, f"there is no file {path}") if data is None else (from_report(data), "")
    except (NoAnswer, ValueError) as exc:
        return None, str(exc)


def _ignores(own_tests: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in own_tests[:MAX_IGNORED]]
