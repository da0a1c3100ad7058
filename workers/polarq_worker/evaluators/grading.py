"""One grading by tests: find the agent's work, set up the tree, run the tests, say whose doing the result is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from polarq.contracts.evaluators import TestOnOutputConfig
from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import EvaluatorFault, OutOfMemory, SandboxLost
from polarq_worker.evaluators import patches
from polarq_worker.evaluators.base import EvaluationContext, EvaluationTimedOut, fresh_sandbox
from polarq_worker.evaluators.expectations import Comparison, compare, path_of
from polarq_worker.evaluators.patches import NoPatch, Patch, apply_patch
from polarq_worker.evaluators.scaffolding import Sorted, sort_changes
from polarq_worker.evaluators.snapshot import Baseline, Change, PatchTooLarge, RepositoryLost, Snapshot, checked, take
from polarq_worker.evaluators.test_command import TestRun, run_tests
from polarq_worker.evaluators.work import Rules, WorkLost, put_back_again, sort_tree
from polarq_worker.runtimes.base import Runtime

LISTED = 50
"""Most entries of a list or map in the report; the counts beside them are whole."""
SHARE_OF_BUDGET = 0.9
"""What of the evaluation's budget the tests may use when `test_timeout` is longer."""


NOT_RUN = {126, 127}
"""What a shell answers when the command cannot be run or is not there: no test file can be the reason."""


class Verdict(Exception):
    """The outcome is known before any test ran."""

    def __init__(self, outcome: float) -> None:
        self.outcome = outcome
        super().__init__(outcome)


class Grading:
    """`outcome` is called once; `report` is the evidence, whichever way it ends."""

    def __init__(
        self, config: TestOnOutputConfig, context: EvaluationContext, *, fresh: bool, env: Mapping[str, str]
    ) -> None:
        self._config = config
        self._context = context
        self._fresh = fresh
        self._env = env
        self._deadline = time.monotonic() + context.timeout_s
        self._baseline = Baseline.model_validate(dict(context.baseline) or {"tracked": False})
        self._snapshot = Snapshot(context.runtime, config.repo_dir, env, self._baseline)
        self._rules = Rules(
            config.expected_output_json, config.exclude_patterns, keep_scaffolding=config.keep_agent_scaffolding
        )
        self.report: dict[str, Any] = {
            "resolved": False,
            "empty_generation": False,
            "failed_apply_patch": False,
            "error_eval": False,
            "test_timeout": False,
            "graded_in": "fresh" if fresh else "live",
            "expected": len(config.expected_output_json),
        }

    async def outcome(self) -> float:
        """1.0 or 0.0. Raises `Verdict` for a short cut, and `EvaluatorFault` where the environment is to blame."""
        if not self._baseline.tracked:
            return await self._untracked()
        found = await self._sorted()
        if not found.work and self._config.patch_command is None:
            raise self._nothing_done()
        runtime = await fresh_sandbox(self._context) if self._fresh else self._context.runtime
        if self._fresh:
            await self._leave_out_hidden(runtime, found)
        patch = await self._patch(found)
        if not found.work and patch is None:
            raise self._nothing_done()
        if self._fresh:
            assert patch is not None
            # They may share a network with the fresh one.
            await self._context.runtime.end_background()
            found = await self._applied(runtime, patch)
        await self._set_up(found)
        run = await self._run(runtime, found.own_tests, "eval/test")
        if not self._fresh and await self._tampered():
            run = await self._run(runtime, found.own_tests, "eval/again")
        comparison = self._compare(run)
        if self.report["resolved"]:
            return 1.0
        self._blame_the_system(run)
        if comparison.missing and not comparison.otherwise:
            await self._blame_the_tree(runtime, comparison, run, found)
        return 0.0

    def _nothing_done(self) -> Verdict:
        self.report["empty_generation"] = True
        return Verdict(0.0)

    # --- the agent's work

    async def _applied(self, runtime: Runtime, patch: Patch) -> Sorted:
        """Applies the patch to the fresh sandbox, and sorts what it changed there, from where all else is judged now.

        It came from where the agent might have put a git of its own in the other's place: what it says of itself, and
        what was left out of it, is not believed.
        """
        repo, env = self._config.repo_dir, self._env
        baseline = await take(runtime, repo, env, self._step_s())
        if not baseline.tracked:
            raise EvaluatorFault("git is needed in the fresh sandbox; install it in the image or by runtime.prepare")
        await apply_patch(runtime, repo, patch, env, self._step_s())
        self._snapshot = Snapshot(runtime, repo, env, baseline)
        try:
            return await self._sorted("left_out_of_patch")
        except Verdict:
            if self.report.get("repository_lost"):
                raise EvaluatorFault("the fresh sandbox lost what was recorded of it before the patch") from None
            raise

    async def _set_up(self, found: Sorted) -> None:
        await self._snapshot.restore(found.left_out, self._step_s())
        await self._snapshot.drop_byte_code(self._step_s())
        if not self._fresh and not self._config.keep_agent_scaffolding:
            self._list("left_out_outside", await self._snapshot.put_back_outside(self._step_s()))

    async def _sorted(self, left_out: str = "left_out") -> Sorted:
        """The changes; `left_out` is where the report says which are put back."""
        try:
            _, found = await sort_tree(self._snapshot, self._rules, self._step_s())
        except RepositoryLost:
            self.report["repository_lost"] = True
            raise Verdict(0.0) from None
        except PatchTooLarge:
            self.report["patch_too_large"] = True
            raise Verdict(0.0) from None
        self.report["changed_files"] = len(found.work)
        self._list(left_out, [change.path for change in found.left_out])
        self._list("own_tests_passed_by", found.own_tests)
        if found.removed_tests:
            self._list("removed_tests", found.removed_tests)
            raise Verdict(0.0)
        return found

    async def _tampered(self) -> bool:
        """Whether somebody changed the tests, or what steers them, while they ran; if so they are put back."""
        try:
            return bool(await put_back_again(self._snapshot, self._rules, self._step_s(), self.report))
        except WorkLost:
            self.report["repository_lost"] = True
            raise Verdict(0.0) from None

    async def _patch(self, found: Sorted) -> Patch | None:
        """The patch of the task's command, or else the tree's; None when there is neither."""
        file = self._context.runtime.host_log_dir / "eval" / "patch.diff"
        patch = None
        try:
            if self._config.patch_command is not None:
                patch = await self._printed_patch(found)
        except NoPatch as exc:
            self.report["patch_command"] = str(exc)
        if patch is None and found.work:
            try:
                await self._snapshot.write_patch(found.work, file, self._step_s())
                patch = Patch(file, patches.TREE)
            except PatchTooLarge:
                self.report["patch_too_large"] = True
                if self._fresh:
                    raise Verdict(0.0) from None
        if patch is not None:
            self.report["patch"] = {"from": patch.source, "bytes": patch.size, "log": "eval/patch.diff"}
        return patch

    async def _printed_patch(self, found: Sorted) -> Patch | None:
        """What `patch_command` prints, without what `found` leaves out; None when nothing of it remains."""
        context, config = self._context, self._config
        file = context.runtime.host_log_dir / "eval" / "patch.diff"
        await patches.print_patch(
            context.runtime,
            config.repo_dir,
            config.patch_command or "",
            self._env,
            self._baseline.head,
            file,
            self._step_s(),
        )
        paths = await patches.paths_in(context.runtime, config.repo_dir, file, self._env, self._step_s())
        # A path that the tree does not show as changed comes from somewhere else; it is sorted by its name.
        left_out = {change.path for change in found.left_out}
        unknown = [Change(path, "M", "", "", "") for path in paths]
        judged = sort_changes(
            unknown,
            config.expected_output_json,
            config.exclude_patterns,
            keep_scaffolding=config.keep_agent_scaffolding,
        )
        kept = {change.path for change in judged.work} - left_out
        if not kept:
            return None
        return Patch(file, patches.PRINTED, tuple(path for path in paths if path not in kept))

    async def _leave_out_hidden(self, runtime: Runtime, found: Sorted) -> None:
        """Named tests that only the fresh sandbox had (hidden from the agent) win over the agent's own of that name."""
        named = {path for path in map(path_of, self._config.expected_output_json) if path is not None}
        added = [change for change in found.work if change.kind == "A" and change.path in named]
        there = await self._existing(runtime, [change.path for change in added])
        if there and not self._config.keep_agent_scaffolding:
            hidden = [change for change in added if change.path in there]
            found.work = [change for change in found.work if change not in hidden]
            found.left_out += hidden
            self._list("left_out", [change.path for change in found.left_out])

    # --- the tests

    async def _untracked(self) -> float:
        if self._fresh:
            raise EvaluatorFault(
                "git is needed in the sandbox to take the agent's work to a fresh one; install it in the image or by"
                " runtime.prepare, or grade in the agent's sandbox (refresh_runtime: false)"
            )
        self.report["changes"] = "unknown: there is no git in the sandbox"
        run = await self._run(self._context.runtime, [], "eval/test")
        self._compare(run)
        if self.report["resolved"]:
            return 1.0
        self._blame_the_system(run)
        if not run.statuses and not self.report["test_timeout"]:
            raise EvaluatorFault(f"the test command told of no test at all ({run.result.why}); see log eval/test")
        return 0.0

    async def _run(self, runtime: Runtime, own_tests: Sequence[str], log: str) -> TestRun:
        config = self._config
        left = self._left()
        limit_s = min(config.test_timeout, left * SHARE_OF_BUDGET)
        run = await run_tests(
            runtime, config, self._env, own_tests=own_tests, timeout_s=limit_s, log=log, alone=self._fresh
        )
        result = run.result
        if (
            result.kind is ExecKind.TIMED_OUT
            and limit_s < config.test_timeout
            and limit_s < self._context.timeout_s / 2
        ):
            raise EvaluationTimedOut(
                f"only {limit_s:.0f} s of the evaluation's budget were left for the tests, and they took longer;"
                " raise timeouts.evaluate_s"
            )
        if result.kind is ExecKind.SANDBOX_LOST:
            raise SandboxLost(f"the test command could not be run: {result.why}")
        if result.out_of_memory and not result.ok:
            raise OutOfMemory(f"the sandbox ran out of memory while it was graded ({result.why}); see log {log}")
        if result.kind is ExecKind.COULD_NOT_START:
            raise EvaluatorFault(f"the test command could not be run: {result.why}")
        self.report.update(
            {
                "test_timeout": result.kind is ExecKind.TIMED_OUT,
                "exit_code": result.exit_code,
                "test_s": round(result.duration_s, 3),
                "seen": len(run.statuses),
                "read_from": run.read_from,
                "output_truncated": result.truncated,
                "log": log,
                **run.notes,
            }
        )
        return run

    def _compare(self, run: TestRun) -> Comparison:
        comparison = compare(self._config.expected_output_json, run.statuses)
        report = self.report
        report["resolved"] = comparison.passed and run.result.kind is not ExecKind.TIMED_OUT
        report["as_expected"] = len(comparison.as_expected)
        self._list("missing", comparison.missing)
        for key, entries in (("otherwise", comparison.otherwise), ("matched_by", comparison.matched_by)):
            if entries:
                report[key] = dict(list(entries.items())[:LISTED])
                report[f"{key}_count"] = len(entries)
        return comparison

    # --- whose doing

    def _blame_the_system(self, run: TestRun) -> None:
        """Raises `EvaluatorFault` or `OutOfMemory` for an end that nobody in the sandbox brought about."""
        if run.result.out_of_memory:  # of a command that ended well by its own account
            raise OutOfMemory("the sandbox ran out of memory while it was graded; see log eval/test")
        if run.result.signal == 9 or run.result.exit_code == 128 + 9:
            raise EvaluatorFault(
                "the tests were killed from outside (most often for want of memory); see log eval/test"
            )

    async def _blame_the_tree(self, runtime: Runtime, comparison: Comparison, run: TestRun, found: Sorted) -> None:
        """Missing tests are the agent's doing if they are there without its work, else the environment's.

        Raises `EvaluatorFault` in the second case. A test file that does not exist is one that the agent was to write;
        one that cannot be collected, in the agent's tree, is one that the agent broke.
        """
        if self.report["test_timeout"]:
            return
        broken = {path for path in map(_file_of, run.statuses) if path}
        unexplained = [test_id for test_id in comparison.missing if path_of(test_id) not in broken]
        await self._snapshot.restore(found.work, self._step_s())
        paths = sorted({path for path in map(path_of, unexplained) if path is not None})
        if run.statuses or run.result.exit_code not in NOT_RUN:
            there = set(await self._existing(runtime, paths))
            unexplained = [test_id for test_id in unexplained if path_of(test_id) in there or path_of(test_id) is None]
        if not unexplained:
            return
        before = dict(self.report)
        control = await self._run(runtime, [], "eval/control")
        self.report = before
        expected = {test_id: self._config.expected_output_json[test_id] for test_id in unexplained}
        absent = compare(expected, control.statuses).missing
        broken = {path for path in map(_file_of, control.statuses) if path}
        absent = [test_id for test_id in absent if path_of(test_id) not in broken]
        if absent:
            raise EvaluatorFault(
                f"the test command does not tell of '{absent[0]}' even on the tree as it was before the agent"
                f" ({len(absent)} of {len(self._config.expected_output_json)} expected tests; {control.result.why});"
                " see log eval/control"
            )

    async def _existing(self, runtime: Runtime, paths: Sequence[str]) -> list[str]:
        """Those of the paths that are there, relative to `repo_dir`."""
        script = 'while IFS= read -r -d "" path; do if [ -e "$path" ]; then printf "%s\\0" "$path"; fi; done'
        names = "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")
        result = await runtime.exec(
            ["bash", "-c", script],
            cwd=self._config.repo_dir,
            env=self._env,
            stdin=names,
            timeout_s=self._step_s(),
            category=ExecCategory.VERIFIER,
        )
        checked(result, "looking for test files")
        return result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] if paths else []

    # --- small parts

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _step_s(self) -> float:
        return min(self._config.apply_timeout, self._left())

    def _list(self, key: str, entries: Sequence[str]) -> None:
        if entries:
            self.report[key] = list(entries[:LISTED])
            self.report[f"{key}_count"] = len(entries)


def _file_of(test_id: str) -> str | None:
    """The test file that an id without `::` names: pytest's way to say that it could not be collected."""
    return test_id if "::" not in test_id and test_id.endswith(".py") else None
