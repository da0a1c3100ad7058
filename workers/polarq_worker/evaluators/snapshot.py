"""Finds what an agent changed in a folder of its sandbox: tracked, untracked, staged and committed alike.

The folder is recorded in a git repository of polarq's own, before the agent and after it, and the two trees are
compared. The agent's repository, if there is one, is only read (for its objects, so that a large one is not copied): no
index, ref, hook or filter of it takes part, and it makes no difference what the agent did to them. Nested repositories
(submodules) count as the commit they are at.
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
from polarq_worker.runtimes.base import SCRATCH_DIR, ExecResult, Runtime

MAX_PATCH_BYTES = 256 * 1024 * 1024
MAX_LISTING_BYTES = 64 * 1024 * 1024
NO_GIT = 80
NO_REPOSITORY = 81
_NONE = "0" * 40
RUNNER_FILES = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "sitecustomize.py", "usercustomize.py"}
)
SHARED_CONFIGS = frozenset({"setup.cfg", "tox.ini", "pyproject.toml"})
"""Files with a section for pytest among others."""
RUNNER_MODULES = frozenset({"pytest.py", "pytest/__init__.py", "_pytest/__init__.py"})
"""What would be imported from the root in the test runner's place."""
ENTRY_POINTS = ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt")
"""In the root, where `python -m pytest` looks for plug-ins."""
_STEERING = " ".join(
    [f":(glob)**/{name}" for name in sorted(RUNNER_FILES)]
    + [f":(glob){path}" for path in sorted([*SHARED_CONFIGS, *RUNNER_MODULES, *ENTRY_POINTS])]
)
QUIET_SHELL = {"BASH_ENV": "", "ENV": ""}
"""Our own scripts print what we read: an image's shell start-up noise must not be in it."""

_SETUP = """
set -euf
export GIT_DIR="$SNAPSHOT" GIT_WORK_TREE="$(pwd -P)" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE || true
record() {
    git add -A --ignore-errors . >/dev/null 2>"$SNAPSHOT/add.stderr" || true
    # What steers a test runner does so whatever .gitignore says of it.
    git ls-files -z -o -i --exclude-standard -- $STEERING |
        xargs -0 -r git --literal-pathspecs add -f --ignore-errors -- >/dev/null 2>>"$SNAPSHOT/add.stderr" || true
    git write-tree
}
"""
_TAKE = """
command -v git >/dev/null || exit 80
repo="$(pwd -P)"
case "$SNAPSHOT/" in "$repo"/*) SNAPSHOT="$(mktemp -d "${TMPDIR:-/tmp}/polarq.XXXXXX")/snapshot" ;; esac
mkdir -p "$(dirname "$SNAPSHOT")"
theirs() { env -u GIT_DIR -u GIT_WORK_TREE GIT_CEILING_DIRECTORIES="$(dirname "$repo")" \
    git -c safe.directory='*' "$@" 2>/dev/null || true; }
head="$(theirs rev-parse -q --verify 'HEAD^{commit}')"
objects="$(theirs rev-parse --git-path objects)"
exclude="$(theirs rev-parse --git-path info/exclude)"
export GIT_DIR="$SNAPSHOT"
git -c init.defaultBranch=main init -q --template=
git config gc.auto 0
git config core.compression 1
git config core.fileMode true
mkdir -p "$SNAPSHOT/info" "$SNAPSHOT/objects/info"
# Bytes as they are: no line ends, filters or keywords of the folder's own .gitattributes.
echo '* -text -filter -ident -working-tree-encoding' > "$SNAPSHOT/info/attributes"
if [ -n "$exclude" ] && [ -f "$exclude" ]; then cat "$exclude" > "$SNAPSHOT/info/exclude"; fi
printf '%s\\n' "$OURS" >> "$SNAPSHOT/info/exclude"
if [ -n "$head" ]; then
    # By link where that costs nothing, so that the objects outlive the agent's repository; by reference in any case.
    if [ "$(stat -f -c %T "$SNAPSHOT")" != overlayfs ]; then
        cp -al "$objects/." "$SNAPSHOT/objects" 2>/dev/null || true
    fi
    (cd "$objects" && pwd -P) > "$SNAPSHOT/objects/info/alternates"
    # Files that are tracked count even where .gitignore names them.
    git read-tree "$head"
fi
tree="$(record)"
printf '%s\\0%s\\0%s\\0%s\\0' "$repo" "$SNAPSHOT" "$head" "$tree"
"""
_COMPARE = """
git cat-file -e "$BASE^{tree}" 2>/dev/null || exit 81
if ! end="$(record)"; then
    # A full disk is not the agent's doing; objects that are not there any more are.
    echo probe > "$SNAPSHOT/probe"
    exit 81
fi
missing="$(git diff-tree -r --no-renames --raw "$BASE" "$end" | grep -v '^:160000' | cut -d' ' -f3 \
    | grep -v '^0*$' | git cat-file --batch-check | grep -c ' missing$' || true)"
[ "${missing:-0}" = 0 ] || exit 81
printf '%s\\0' "$end"
git diff-tree -r -z --no-renames --raw "$BASE" "$end"
"""
_PATCH = """
export GIT_INDEX_FILE="$SNAPSHOT/patch.index"
git read-tree "$BASE"
git update-index -z --index-info
git diff --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color "$BASE" "$(git write-tree)" \
    > "$SNAPSHOT/patch.diff"
"""
_RESTORE = """
export GIT_INDEX_FILE="$SNAPSHOT/restore.index"
git read-tree "$BASE"
git checkout-index -f -q -z --stdin
"""
_DROP_BYTE_CODE = """
export GIT_INDEX_FILE="$SNAPSHOT/restore.index"
git read-tree "$BASE"
find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf -- {} +
git ls-files -z -- ':(glob)**/__pycache__/**' | git checkout-index -f -q -z --stdin
"""


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
        "SNAPSHOT": f"{layout.session_dir}/{SCRATCH_DIR}/snapshot",
        "OURS": "\n".join(ours) if await _is_session(runtime, folder, timeout_s) else "",
    }
    result = await _git(runtime, folder, env, _TAKE, variables, timeout_s)
    if result.kind is ExecKind.COULD_NOT_START:
        raise EvaluatorFault(f"evaluator.config.repo_dir: {result.message}; runtime.prepare has to make it")
    if result.exit_code == NO_GIT:
        return Baseline(tracked=False)
    _checked(result, "recording the folder before the agent")
    repo, snapshot, head, tree = result.stdout.decode("utf-8", "surrogateescape").split("\0")[:4]
    return Baseline(tracked=True, repo=repo, snapshot=snapshot, head=head, tree=tree)


class Snapshot:
    """The recorded folder, to compare with and to go back to."""

    def __init__(self, runtime: Runtime, folder: str, env: Mapping[str, str], baseline: Baseline) -> None:
        self._runtime = runtime
        self._folder = folder
        self._env = env
        self.baseline = baseline

    async def changes(self, timeout_s: float) -> list[Change]:
        """All that differs now. Raises `RepositoryLost`, `PatchTooLarge`, `EvaluatorFault`."""
        result = await self._run(_COMPARE, timeout_s, max_output_bytes=MAX_LISTING_BYTES)
        gone = result.kind is ExecKind.COULD_NOT_START and "no folder" in result.message
        if gone or result.exit_code == NO_REPOSITORY:
            raise RepositoryLost
        _checked(result, "comparing the folder with what it was before the agent")
        if result.truncated:
            raise PatchTooLarge
        fields = result.stdout.decode("utf-8", "surrogateescape").split("\0")[1:-1]
        return [_change(meta, path) for meta, path in zip(fields[::2], fields[1::2], strict=True)]

    async def write_patch(self, changes: Sequence[Change], target: Path, timeout_s: float) -> None:
        """The given changes as a patch, in a file on the host. Raises `PatchTooLarge`, `EvaluatorFault`."""
        entries = "".join(f"{change.new_mode} {change.new_id}\t{change.path}\0" for change in changes)
        _checked(await self._run(_PATCH, timeout_s, stdin=_bytes(entries)), "writing the agent's patch")
        size = await self._run('stat -c %s "$SNAPSHOT/patch.diff"', timeout_s)
        if int(_checked(size, "writing the agent's patch").stdout_text) > MAX_PATCH_BYTES:
            raise PatchTooLarge
        target.parent.mkdir(parents=True, exist_ok=True)
        await self._runtime.get_file(f"{self.baseline.snapshot}/patch.diff", target, MAX_PATCH_BYTES)

    async def restore(self, changes: Sequence[Change], timeout_s: float) -> None:
        """Puts the given files back as they were. Raises `EvaluatorFault`."""
        await self._undisturbed(lambda: self._restore(changes, timeout_s))

    async def _undisturbed(self, work: Callable[[], Awaitable[None]]) -> None:
        """Where somebody whom the agent left running is at the same files, so that nothing can be done with them, he is
        ended first: else he could make a fault of every verdict."""
        try:
            await work()
        except EvaluationTimedOut:
            raise
        except EvaluatorFault:
            await self._runtime.end_background()
            await work()

    async def _restore(self, changes: Sequence[Change], timeout_s: float) -> None:
        added = "".join(f"{change.path}\0" for change in changes if change.kind == "A")
        if added:
            removed = await self._run("xargs -0 -r rm -f --", timeout_s, stdin=_bytes(added))
            _checked(removed, "removing the agent's scaffolding")
        others = "".join(f"{change.path}\0" for change in changes if change.kind != "A")
        if others:
            _checked(await self._run(_RESTORE, timeout_s, stdin=_bytes(others)), "restoring the tests")

    async def drop_byte_code(self, timeout_s: float) -> None:
        """What was there before the agent stays: Python runs a cached file in the place of its source, whatever is in
        it. Raises `EvaluatorFault`."""

        async def drop() -> None:
            _checked(await self._run(_DROP_BYTE_CODE, timeout_s), "removing byte code")

        await self._undisturbed(drop)

    async def text_of(self, object_id: str, timeout_s: float) -> str:
        """A file's text, of either side of a change; "" for the side on which it is not. Raises `EvaluatorFault`."""
        if object_id == _NONE:
            return ""
        result = await self._run(f"git cat-file blob {shlex.quote(object_id)}", timeout_s)
        return _checked(result, "reading a changed file").stdout_text

    async def _run(
        self, script: str, timeout_s: float, *, stdin: bytes | None = None, max_output_bytes: int = 1 << 20
    ) -> ExecResult:
        variables = {"SNAPSHOT": self.baseline.snapshot, "BASE": self.baseline.tree}
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
        _SETUP + script,
        cwd=folder,
        env={**env, **QUIET_SHELL, "STEERING": _STEERING, **variables},
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        category=ExecCategory.REPOSITORY,
    )


async def _is_session(runtime: Runtime, folder: str, timeout_s: float) -> bool:
    """Whether the folder is the session directory itself, which has files of polarq's in it."""
    ours = ExecCategory.REPOSITORY
    result = await runtime.exec(["pwd", "-P"], cwd=folder, timeout_s=timeout_s, category=ours)
    session = await runtime.exec(["pwd", "-P"], cwd=runtime.layout.session_dir, timeout_s=timeout_s, category=ours)
    return result.stdout == session.stdout


def _checked(result: ExecResult, what: str) -> ExecResult:
    if result.kind is ExecKind.TIMED_OUT:
        raise EvaluationTimedOut(f"{what}: {result.why}")
    if result.kind is ExecKind.SANDBOX_LOST:
        raise SandboxLost(f"{what}: {result.why}")
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
