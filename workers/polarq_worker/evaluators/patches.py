"""Takes an agent's work to a sandbox that it never saw: a patch of the tree, or what the task's command prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory
from polarq.errors import EvaluatorFault, RuntimeFault
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.snapshot import MAX_PATCH_BYTES
from polarq_worker.evaluators.snapshot_scripts import QUIET_SHELL
from polarq_worker.runtimes.base import SCRATCH_DIR, ExecResult, Runtime

_OURS = ExecCategory.REPOSITORY
_GLOB = re.compile(r"([*?\[\]\\])")

_APPLY_TREE = """
set -eu
export GIT_DIR="$POLARQ_SCRATCH/apply" GIT_WORK_TREE="$(pwd -P)" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
[ -d "$GIT_DIR" ] || git -c init.defaultBranch=main init -q --template=
mkdir -p "$GIT_DIR/info"
echo '* -text -filter -ident -working-tree-encoding' > "$GIT_DIR/info/attributes"
exec git apply "$@"
"""
"""With a repository of its own: bytes are written as they are, whatever the folder's repository and attributes say."""
_APPLY_PRINTED = """
exec git -c safe.directory='*' apply "$@"
"""
"""In the folder's own repository: a printed patch names paths from its top, wherever in it the folder is."""
_PRINT = """
now="$(git rev-parse -q --verify HEAD 2>/dev/null || true)"
if [ -n "$POLARQ_HEAD" ] && [ -n "$now" ] && [ "$now" != "$POLARQ_HEAD" ]; then
    # Commands of old tasks compare with HEAD; what the agent committed is its work all the same.
    git reset -q --soft "$POLARQ_HEAD" && trap 'git reset -q --soft "$now"' EXIT
fi
{
%s
} > "$POLARQ_PATCH"
"""


TREE = "the tree"
PRINTED = "patch_command"


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch on the host; `source` is `TREE` or `PRINTED`. `without` are paths in it that are not applied."""

    file: Path
    source: str
    without: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return self.file.stat().st_size


class NoPatch(Exception):
    """The task's command failed, or printed nothing; the text says which."""


async def print_patch(
    runtime: Runtime, folder: str, command: str, env: Mapping[str, str], head: str, target: Path, timeout_s: float
) -> None:
    """Runs the task's `patch_command` and fetches what it prints. Raises `NoPatch`, `EvaluationTimedOut`."""
    inside = f"{runtime.layout.session_dir}/{SCRATCH_DIR}/patch_command.diff"
    variables = {"POLARQ_PATCH": inside, "POLARQ_HEAD": head}
    script = f'mkdir -p "$(dirname "$POLARQ_PATCH")"\n{_PRINT % command}'
    result = await runtime.exec(
        script, cwd=folder, env={**env, **variables}, timeout_s=timeout_s, log="eval/patch", category=_OURS
    )
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"patch_command: {result.why}; see apply_timeout, timeouts.evaluate_s")
    if not result.ok:
        raise NoPatch(f"patch_command: {result.why}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        await runtime.get_file(inside, target, MAX_PATCH_BYTES)
    except RuntimeFault as exc:
        raise NoPatch(f"patch_command: {exc}") from None
    if not target.read_bytes().strip():
        raise NoPatch("patch_command: it printed nothing")


async def paths_in(runtime: Runtime, folder: str, patch: Path, env: Mapping[str, str], timeout_s: float) -> list[str]:
    """The paths that a patch touches, as git reads them. Raises `NoPatch` when it is no patch."""
    inside = await _bring(runtime, patch)
    result = await _git_apply(runtime, folder, _APPLY_PRINTED, ["--numstat", "-z", inside], env, timeout_s)
    if not result.ok:
        raise NoPatch(f"patch_command: what it printed is no patch: {result.why}")
    entries = result.stdout.decode("utf-8", "surrogateescape").split("\0")
    return [entry.split("\t", 2)[2] for entry in entries if entry.count("\t") >= 2]


async def apply_patch(runtime: Runtime, folder: str, patch: Patch, env: Mapping[str, str], timeout_s: float) -> None:
    """Raises `EvaluatorFault`: the patch was made against this very tree, so it is the tree that is another."""
    inside = await _bring(runtime, patch.file)
    options = ["--exclude=" + _GLOB.sub(r"\\\1", path) for path in patch.without]
    script = _APPLY_PRINTED if patch.source == PRINTED else _APPLY_TREE
    arguments = ["--whitespace=nowarn", "--binary", *options, inside]
    result = await _git_apply(runtime, folder, script, arguments, env, timeout_s)
    if not result.ok and not patch.without:
        fuzzy = ["patch", "--batch", "--fuzz=5", "-p1", "-i", inside]
        second = await runtime.exec(fuzzy, cwd=folder, env=env, timeout_s=timeout_s, log="eval/apply", category=_OURS)
        if second.ok:
            return
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(
            f"applying the agent's patch to the fresh sandbox: {result.why}; see apply_timeout, timeouts.evaluate_s"
        )
    if not result.ok:
        raise EvaluatorFault(
            f"the agent's patch does not apply to the fresh sandbox ({result.why}); its recipe must make the same tree"
            " in repo_dir as the agent's had"
        )


async def _bring(runtime: Runtime, patch: Path) -> str:
    inside = f"{runtime.layout.session_dir}/{SCRATCH_DIR}/patch.diff"
    await runtime.put_file(patch, inside)
    return inside


async def _git_apply(
    runtime: Runtime, folder: str, script: str, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> ExecResult:
    scratch = {"POLARQ_SCRATCH": f"{runtime.layout.session_dir}/{SCRATCH_DIR}"}
    return await runtime.exec(
        ["bash", "-c", script, "bash", *arguments],
        cwd=folder,
        env={**env, **QUIET_SHELL, **scratch},
        timeout_s=timeout_s,
        max_output_bytes=16 << 20,
        category=_OURS,
    )
