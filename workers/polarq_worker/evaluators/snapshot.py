"""Finds what an agent changed in a folder of its sandbox: tracked, untracked, staged and committed alike.

The folder is recorded in a git repository of polarq's own, before the agent and after it, and the two trees are
compared. The agent's repository, if there is one, is only read (for its objects, so that a large one is not copied): no
index, ref, hook or filter of it takes part, and it makes no difference what the agent did to them. Nested repositories
(submodules) count as the commit they are at.

What was recorded lies where the agent can write. So it is compared in a repository made for that: of the recorded one
it has the index, where that is the very one that was recorded, and the objects that are needed, where their contents
have the ids they are called by. `Baseline`, which says what they are, never was in the sandbox.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polarq.contracts.base import Contract
from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import EvaluatorFault, SandboxLost
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.snapshot_scripts import (
    COMPARE,
    DROP_BYTE_CODE,
    NO_GIT,
    NO_REPOSITORY,
    OUTSIDE,
    PATCH,
    PUT_BACK_OUTSIDE,
    QUIET_SHELL,
    RESTORE,
    RUNNER_FILES,
    SETUP,
    SHARED_CONFIGS,
    STEERING,
    TAKE,
)
from polarq_worker.runtimes.base import SCRATCH_DIR, ExecResult, Runtime

MAX_PATCH_BYTES = 256 * 1024 * 1024
MAX_LISTING_BYTES = 64 * 1024 * 1024
_NONE = "0" * 40


class Baseline(Contract):
    """The folder before the agent. JSON, so that it can be kept beside a rollout."""

    tracked: bool
    """False: there is no git in the sandbox, so what changed cannot be told."""
    repo: str = ""
    """The folder's real path inside the sandbox."""
    snapshot: str = ""
    head: str = ""
    """The commit that the folder's own repository was at; "" when it has none."""
    tree: str = ""
    index: str = ""
    """The id that the recorded index has as a blob."""
    outside: dict[str, str] = {}
    """Path -> id of the files that may steer a test runner from folders above, or git from the folder's repository."""


@dataclass(frozen=True, slots=True)
class Change:
    """One file that is not as it was. `kind` is A (added), M (changed, its type too), or D (deleted)."""

    path: str
    kind: str
    old_id: str
    new_mode: str
    new_id: str


class RepositoryLost(Exception):
    """What was recorded before the agent is gone or damaged: only the agent can have done that."""


class PatchTooLarge(Exception):
    """The agent's changes are more than can be taken to another sandbox."""


async def take(runtime: Runtime, folder: str, env: Mapping[str, str], timeout_s: float) -> Baseline:
    """Records the folder. Raises `EvaluatorFault`, above all when it is not there."""
    layout = runtime.layout
    ours = [f"/{name}/" for name in (SCRATCH_DIR, "artifacts", "logs")] + ["/instruction.txt"]
    variables = {
        **await _top(runtime, timeout_s),
        "SNAPSHOT": f"{layout.session_dir}/{SCRATCH_DIR}/snapshot",
        "OURS": "\n".join(ours) if await _is_session(runtime, folder, timeout_s) else "",
    }
    result = await _git(runtime, folder, env, TAKE, variables, timeout_s)
    if result.kind is ExecKind.COULD_NOT_START:
        raise EvaluatorFault(f"evaluator.config.repo_dir: {result.message}; runtime.prepare has to make it")
    if result.exit_code == NO_GIT:
        return Baseline(tracked=False)
    checked(result, "recording the folder before the agent")
    repo, snapshot, head, tree, index, *outside = result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return Baseline(
        tracked=True, repo=repo, snapshot=snapshot, head=head, tree=tree, index=index, outside=_by_path(outside)
    )


class Snapshot:
    """The recorded folder, to compare with and to go back to."""

    def __init__(self, runtime: Runtime, folder: str, env: Mapping[str, str], baseline: Baseline) -> None:
        self._runtime = runtime
        self._folder = folder
        self._env = env
        self.baseline = baseline
        self._judging = ""
        """The repository made by the last look at what changed; all else is done with it."""

    async def changes(self, timeout_s: float) -> list[Change]:
        """All that differs now, recorded anew. Raises `RepositoryLost`, `PatchTooLarge`, `EvaluatorFault`."""
        try:
            return await self._changes(timeout_s)
        except EvaluationTimedOut:
            raise
        except EvaluatorFault:
            await self._runtime.end_background()
            return await self._changes(timeout_s)

    async def _changes(self, timeout_s: float) -> list[Change]:
        self._judging = ""
        result = await self._run(COMPARE, timeout_s, max_output_bytes=MAX_LISTING_BYTES)
        if result.kind is ExecKind.COULD_NOT_START and "no folder" in result.message:
            raise RepositoryLost
        checked(result, "comparing the folder with what it was before the agent")
        if result.truncated:
            raise PatchTooLarge
        self._judging, *fields = result.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
        return [_change(meta, path) for meta, path in zip(fields[::2], fields[1::2], strict=True)]

    async def write_patch(self, changes: Sequence[Change], target: Path, timeout_s: float) -> None:
        """The given changes as a patch, in a file on the host. Raises `PatchTooLarge`, `RepositoryLost`,
        `EvaluatorFault`."""
        await self._undisturbed(lambda: self._write_patch(changes, target, timeout_s), timeout_s)

    async def _write_patch(self, changes: Sequence[Change], target: Path, timeout_s: float) -> None:
        entries = "".join(f"{change.new_mode} {change.new_id}\t{change.path}\0" for change in changes)
        checked(await self._run(PATCH, timeout_s, stdin=_bytes(entries)), "writing the agent's patch")
        size = await self._run('stat -c %s "$GIT_DIR/patch.diff"', timeout_s)
        if int(checked(size, "writing the agent's patch").stdout_text) > MAX_PATCH_BYTES:
            raise PatchTooLarge
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._runtime.get_file(f"{self._judging}/patch.diff", target, MAX_PATCH_BYTES)

    async def restore(self, changes: Sequence[Change], timeout_s: float) -> None:
        """Puts the given files back as they were. Raises `RepositoryLost`, `EvaluatorFault`."""
        await self._undisturbed(lambda: self._restore(changes, timeout_s), timeout_s)

    async def _undisturbed(self, work: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """As `changes`: where somebody whom the agent left running is at the same files, so that nothing can be done
        with them, he is ended first: else he could make a fault of every verdict."""
        try:
            await work()
        except EvaluationTimedOut:
            raise
        except EvaluatorFault:
            await self._runtime.end_background()
            await self._changes(timeout_s)
            await work()

    async def _restore(self, changes: Sequence[Change], timeout_s: float) -> None:
        added = "".join(f"{change.path}\0" for change in changes if change.kind == "A")
        if added:
            removed = await self._run("xargs -0 -r rm -rf --", timeout_s, stdin=_bytes(added))
            checked(removed, "removing the agent's scaffolding")
        others = "".join(f"{change.path}\0" for change in changes if change.kind != "A")
        if others:
            checked(await self._run(RESTORE, timeout_s, stdin=_bytes(others)), "restoring the tests")

    async def put_back_outside(self, timeout_s: float) -> list[str]:
        """Puts back what is in `Baseline.outside`, and answers with the paths that had changed. Raises
        `RepositoryLost`, `EvaluatorFault`."""
        top, before, git = await _top(self._runtime, timeout_s), self.baseline.outside, f"{self.baseline.repo}/.git/"
        found = checked(await self._run(OUTSIDE, timeout_s, top), "looking for what steers tests from outside")
        now = _by_path(found.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1])
        changed = sorted(path for path in {*now, *before} if now.get(path) != before.get(path))
        if not any(path.startswith(git) for path in now):  # nothing of a repository that is gone comes back
            changed = [path for path in changed if not path.startswith(git)]
        if changed:
            lines = "".join(f"{before.get(path, 'none')} {path}\0" for path in changed)
            result = await self._run(PUT_BACK_OUTSIDE, timeout_s, stdin=_bytes(lines))
            checked(result, "putting back what steers tests from outside")
        return changed

    async def existed(self, paths: Sequence[str], timeout_s: float) -> set[str]:
        """Those of the paths at which a file was before the agent. Raises `EvaluatorFault`."""
        names = _bytes("".join(f"{path}\0" for path in paths))
        found = await self._run('xargs -0 -r git ls-tree -r -z --name-only "$BASE" --', timeout_s, stdin=names)
        return set(checked(found, "looking for what was there").stdout.decode("utf-8", "surrogateescape").split("\0"))

    async def drop_byte_code(self, timeout_s: float) -> None:
        """What was there before the agent stays: Python runs a cached file in the place of its source, whatever is in
        it. Raises `RepositoryLost`, `EvaluatorFault`."""

        async def drop() -> None:
            checked(await self._run(DROP_BYTE_CODE, timeout_s), "removing byte code")

        await self._undisturbed(drop, timeout_s)

    async def text_of(self, object_id: str, timeout_s: float) -> str:
        """A file's text, of either side of a change; "" for the side on which it is not. Raises `EvaluatorFault`."""
        if object_id == _NONE:
            return ""
        result = await self._run(f"git cat-file blob {shlex.quote(object_id)}", timeout_s)
        return checked(result, "reading a changed file").stdout_text

    async def _run(
        self,
        script: str,
        timeout_s: float,
        more: Mapping[str, str] | None = None,
        *,
        stdin: bytes | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        known = self.baseline
        variables = {"SNAPSHOT": known.snapshot, "BASE": known.tree, "INDEX": known.index, "JUDGING": self._judging}
        variables |= more or {}
        return await _git(self._runtime, self._folder, self._env, script, variables, timeout_s, stdin, max_output_bytes)


async def _git(
    runtime: Runtime,
    folder: str,
    env: Mapping[str, str],
    script: str,
    variables: Mapping[str, str],
    timeout_s: float,
    stdin: bytes | None = None,
    max_output_bytes: int = 1 << 20,
) -> ExecResult:
    return await runtime.exec(
        SETUP + script,
        cwd=folder,
        env={**env, **QUIET_SHELL, "STEERING": STEERING, **variables},
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        category=ExecCategory.REPOSITORY,
    )


async def _top(runtime: Runtime, timeout_s: float) -> dict[str, str]:
    """Variables of `OUTSIDE`: all folders above belong to the sandbox where it has a root of its own."""
    ours = ExecCategory.REPOSITORY
    top = await runtime.exec(["pwd", "-P"], cwd=runtime.layout.session_dir, timeout_s=timeout_s, category=ours)
    session = checked(top, "looking for the session's folder").stdout_text.rstrip("\n")
    return {
        "TOP": session if runtime.isolation == "none" else "/",
        "ABOVE": " ".join(sorted(RUNNER_FILES | SHARED_CONFIGS)),
        "KEEP": "",
    }


def _by_path(lines: Sequence[str]) -> dict[str, str]:
    return {path: one for one, _, path in (line.partition(" ") for line in lines)}


async def _is_session(runtime: Runtime, folder: str, timeout_s: float) -> bool:
    """Whether the folder is the session directory itself, which has files of polarq's in it."""
    ours = ExecCategory.REPOSITORY
    result = await runtime.exec(["pwd", "-P"], cwd=folder, timeout_s=timeout_s, category=ours)
    session = await runtime.exec(["pwd", "-P"], cwd=runtime.layout.session_dir, timeout_s=timeout_s, category=ours)
    return result.stdout == session.stdout


def checked(result: ExecResult, what: str) -> ExecResult:
    """A result that is one. Raises `EvaluationTimedOut`, `SandboxLost`, `RepositoryLost`, `EvaluatorFault`."""
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"{what}: {result.why}; see apply_timeout, timeouts.evaluate_s")
    if result.kind is ExecKind.SANDBOX_LOST:
        raise SandboxLost(f"{what}: {result.why}")
    if result.exit_code == NO_REPOSITORY:
        raise RepositoryLost
    if not result.ok:
        raise EvaluatorFault(f"{what}: {result.why}")
    return result


def _change(meta: str, path: str) -> Change:
    """`:<old mode> <new mode> <old id> <new id> <status>` (git-diff-tree(1), raw format)"""
    _, new_mode, old_id, new_id, status = meta.split()
    deleted = status == "D"
    kind = status if status in {"A", "D"} else "M"
    return Change(path, kind, old_id, "0" if deleted else new_mode, _NONE if deleted else new_id)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
