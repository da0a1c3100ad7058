"""Carries out a sandbox's recipe: a harness's set-up, `runtime.prepare`, or `eval_prepare` for a fresh one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polarq.contracts.rollout import ExecKind, StepReport
from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import PrepareAction
from polarq.errors import DiskFull, RuntimeFault
from polarq_worker.outcomes import is_full
from polarq_worker.runtimes.base import ExecResult, Runtime
from polarq_worker.runtimes.create import below


class PrepareFailed(RuntimeFault):
    """An action failed. `index` is its place in the recipe, `reports` what was done, the failure included."""

    def __init__(
        self,
        message: str,
        *,
        index: int,
        reports: Sequence[StepReport],
        timed_out: bool = False,
        disk_full: bool = False,
    ) -> None:
        self.index = index
        self.reports = tuple(reports)
        self.timed_out = timed_out
        """The whole budget was used up, or the action's own `timeout_s` at its last attempt."""
        self.disk_full = disk_full
        """It left no room on the sandbox's disk, or found none."""
        super().__init__(message)


async def prepare(
    runtime: Runtime,
    actions: Sequence[PrepareAction],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    upload_roots: Sequence[str],
    category: ExecCategory = ExecCategory.PREPARE,
) -> list[StepReport]:
    """Does the actions in order, in `timeout_s` seconds together; one report each. Raises `PrepareFailed` at the first
    that fails. An exec action runs in its `cwd`, else in the session directory; its output is logged as `prepare.NN`
    (by `category`).
    """
    deadline = time.monotonic() + timeout_s
    reports: list[StepReport] = []
    for index, action in enumerate(actions):
        if action.type == "exec":
            result = await _run(runtime, action, index, env, deadline, category)
            reports.append(result.report(_log(category, index)))
            problem = "" if result.ok else result.why
            late, full = result.kind is ExecKind.TIMED_OUT, False
        else:
            report, problem, late, full = await _upload(runtime, action, deadline, upload_roots)
            reports.append(report)
        if problem:
            full = full or await asyncio.to_thread(is_full, runtime.root)
            named = action.command if action.type == "exec" else f"{action.source} to {action.target}"
            # A harness's own step says by itself what it is.
            what = "" if category is ExecCategory.SETUP else f" ({action.type}: {_short(named or '')})"
            message = f"{category} action {index}{what}: {problem}"
            raise PrepareFailed(message, index=index, reports=reports, timed_out=late, disk_full=full)
    return reports


async def _run(
    runtime: Runtime,
    action: PrepareAction,
    index: int,
    env: Mapping[str, str],
    deadline: float,
    category: ExecCategory,
) -> ExecResult:
    log = _log(category, index)
    attempt = 1
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        result = await runtime.exec(
            action.command or "",
            cwd=action.cwd or runtime.layout.session_dir,
            env={**env, **(action.env or {})},
            timeout_s=left if action.timeout_s is None else min(left, action.timeout_s),
            log=log if attempt == 1 else f"{log}.attempt{attempt}",
            category=category,
        )
        wait_s = action.retry_backoff_seconds
        no_more_time = time.monotonic() + wait_s >= deadline
        if result.ok or result.kind is ExecKind.SANDBOX_LOST or attempt == action.max_attempts or no_more_time:
            return result
        await asyncio.sleep(wait_s)
        attempt += 1


async def _upload(
    runtime: Runtime, action: PrepareAction, deadline: float, upload_roots: Sequence[str]
) -> tuple[StepReport, str, bool, bool]:
    """(report, problem or "", whether the budget ran out, whether there was no room)"""
    began = time.monotonic()
    left = max(deadline - began, 0.0)
    limit_s = left if action.timeout_s is None else min(left, action.timeout_s)
    kind, problem, full = ExecKind.EXITED, "", False
    try:
        async with asyncio.timeout(limit_s):
            source = _source(action, upload_roots)
            copy = runtime.put_file if action.type == "upload_file" else runtime.put_dir
            await copy(source, action.target or "")
    except TimeoutError:
        kind, problem = ExecKind.TIMED_OUT, f"timed out after {limit_s:.1f} s"
    except RuntimeFault as exc:
        kind, problem, full = ExecKind.COULD_NOT_START, str(exc), isinstance(exc, DiskFull)
    report = StepReport(
        kind=kind,
        exit_code=0 if kind is ExecKind.EXITED else None,
        duration_s=time.monotonic() - began,
        message=problem,
    )
    return report, problem, kind is ExecKind.TIMED_OUT, full


def _source(action: PrepareAction, upload_roots: Sequence[str]) -> Path:
    source = Path(action.source or "")
    if not below(str(source), upload_roots):
        raise RuntimeFault(f"'{source}' is not below a folder of security.upload_roots of the topology")
    if action.type == "upload_file" and not source.is_file():
        raise RuntimeFault(f"there is no file '{source}' on this node")
    if action.type == "upload_dir" and not source.is_dir():
        raise RuntimeFault(f"there is no folder '{source}' on this node")
    return source


def _log(category: ExecCategory, index: int) -> str:
    return f"{category}.{index:02d}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else f"{line[:77]}..."
