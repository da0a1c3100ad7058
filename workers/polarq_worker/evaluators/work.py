"""Sets a sandbox up to be graded: the agent's work in `repo_dir`, and the tests as they were before the agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from polarq.errors import EvaluatorFault
from polarq_worker.evaluators import patches
from polarq_worker.evaluators.base import EvaluationContext, fresh_sandbox
from polarq_worker.evaluators.patches import Patch, apply_patch
from polarq_worker.evaluators.scaffolding import (
    Sorted,
    changes_pytest_section,
    shadowed,
    sort_changes,
    steers_by_content,
)
from polarq_worker.evaluators.snapshot import Baseline, Change, PatchTooLarge, RepositoryLost, Snapshot, take
from polarq_worker.runtimes.base import Runtime

LISTED = 50


@dataclass(frozen=True)
class Rules:
    """By which an agent's changes are sorted; `tests` are ids that name the tests which decide."""

    tests: Collection[str]
    exclude: Collection[str]
    keep_scaffolding: bool


@dataclass(frozen=True)
class Graded:
    """Where to grade; `report` is evidence. `nothing`: why there is no work of the agent's in it; blank where there
    is."""

    runtime: Runtime
    report: dict[str, Any]
    nothing: str
    without_work: Callable[[], Awaitable[None]]
    """Puts the agent's work back, too: the tree is as it was before it."""
    put_back_again: Callable[[], Awaitable[list[str]]]
    """Asked when the tests have been run and nothing of the agent's runs any more: the files that were as before the
    agent, and that somebody has changed since. They are put back; where there are any, the run says nothing."""


class WorkLost(Exception):
    """The agent has seen to it that its work cannot be told; `report` is what is known."""

    def __init__(self, why: str, report: dict[str, Any]) -> None:
        self.report = {**report, "why": why}
        super().__init__(why)


async def set_up(
    context: EvaluationContext,
    repo_dir: str,
    env: Mapping[str, str],
    *,
    fresh: bool,
    tests: Collection[str] = (),
    exclude: Collection[str] = (),
    keep_scaffolding: bool = False,
    even_without_work: bool = True,
    step_s: float,
) -> Graded:
    """`tests` are the test files that decide, as `path::`; with none, all test files keep their first version. Not
    `even_without_work`: nothing is set up where the agent changed nothing.

    Raises `WorkLost`, `EvaluatorFault`, `RuntimeFault`.
    """
    baseline = Baseline.model_validate(dict(context.baseline) or {"tracked": False})
    if not baseline.tracked:
        raise EvaluatorFault(f"git is needed in the sandbox to tell what the agent changed in {repo_dir}; install it")
    report: dict[str, Any] = {"graded_in": "fresh" if fresh else "live", "changed_files": 0}
    runtime = context.runtime
    tree = Snapshot(runtime, repo_dir, env, baseline)
    file = runtime.host_log_dir / "eval" / "patch.diff"
    rules = Rules(tests, exclude, keep_scaffolding)
    found, nothing = Sorted(), ""
    try:
        found = await _sorted(tree, rules, step_s)
        _list(report, "left_out", [change.path for change in found.left_out])
        report["changed_files"] = len(found.work)
        if found.work:
            await tree.write_patch(found.work, file, step_s)
            report["patch"] = {"bytes": file.stat().st_size, "log": "eval/patch.diff"}
        else:
            nothing = "the agent changed nothing"
    except RepositoryLost:
        raise WorkLost("what was recorded of the repository before the agent is gone", report) from None
    except PatchTooLarge:
        raise WorkLost("the agent's changes are too large", report) from None
    if fresh and (not nothing or even_without_work):
        runtime = await fresh_sandbox(context)
        await context.runtime.end_background()
        # What the patch says of itself came from the agent's sandbox, and is judged again in the other.
        tree = Snapshot(runtime, repo_dir, env, await take(runtime, repo_dir, env, step_s))
        if not nothing:
            await apply_patch(runtime, repo_dir, Patch(file, patches.TREE), env, step_s)
        found = await _sorted(tree, rules, step_s)
    try:
        await tree.restore(found.left_out, step_s)
        await tree.drop_byte_code(step_s)
        if not fresh and not keep_scaffolding:
            _list(report, "left_out_outside", await tree.put_back_outside(step_s))
    except RepositoryLost:
        raise WorkLost("what was recorded of the repository before the agent is gone", report) from None
    return Graded(
        runtime,
        report,
        nothing,
        lambda: tree.restore(found.work, step_s),
        lambda: put_back_again(tree, rules, step_s, report),
    )


async def sort_tree(tree: Snapshot, rules: Rules, step_s: float) -> tuple[list[Change], Sorted]:
    """(all changes, what becomes of them). Raises `RepositoryLost`, `PatchTooLarge`, `EvaluatorFault`."""
    changes = await tree.changes(step_s)
    found = sort_changes(changes, rules.tests, rules.exclude, keep_scaffolding=rules.keep_scaffolding)
    if not rules.keep_scaffolding:
        await _leave_out_shadows(tree, found, rules, step_s)
        for change in [change for change in found.work if steers_by_content(change.path, rules.tests)]:
            before, after = [await tree.text_of(one, step_s) for one in (change.old_id, change.new_id)]
            if changes_pytest_section(change.path, before, after):
                found.work.remove(change)
                found.left_out.append(change)
    return changes, found


async def _leave_out_shadows(tree: Snapshot, found: Sorted, rules: Rules, step_s: float) -> None:
    """What the agent put where it would be imported in the place of a test's file, or of one beside it."""
    hidden = shadowed(found.work, rules.tests)
    there = await tree.existed(sorted(set(hidden.values())), step_s) if hidden else set()
    shadows = [change for change in found.work if hidden.get(change.path) in there]
    found.work = [change for change in found.work if change not in shadows]
    found.own_tests = [path for path in found.own_tests if hidden.get(path) not in there]
    found.left_out += shadows


async def put_back_again(tree: Snapshot, rules: Rules, step_s: float, report: dict[str, Any]) -> list[str]:
    """See `Graded.put_back_again`. Raises `WorkLost`, `EvaluatorFault`."""
    try:
        found = await _sorted(tree, rules, step_s)
        outside = [] if rules.keep_scaffolding else await tree.put_back_outside(step_s)
        paths = [*sorted(change.path for change in found.left_out), *outside]
        if paths:
            await tree.restore(found.left_out, step_s)
            await tree.drop_byte_code(step_s)
    except (RepositoryLost, PatchTooLarge):
        raise WorkLost("what was recorded of the repository was spoilt while it was graded", report) from None
    if paths:
        _list(report, "graded_again", paths)
    return paths


async def _sorted(tree: Snapshot, rules: Rules, step_s: float) -> Sorted:
    """A test file that the agent deleted is put back as any other."""
    changes, found = await sort_tree(tree, rules, step_s)
    found.left_out += [change for change in changes if change.path in set(found.removed_tests)]
    return found


def _list(report: dict[str, Any], key: str, entries: list[str]) -> None:
    if entries:
        report |= {key: entries[:LISTED], f"{key}_count": len(entries)}
