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
from polarq_worker.runtimes.base import SCRATCH_DIR, ExecResult, Runtime

MAX_PATCH_BYTES = 256 * 1024 * 1024
MAX_LISTING_BYTES = 64 * 1024 * 1024
NO_GIT = 80
NO_REPOSITORY = 81
_NONE = "0" * 40
RUNNER_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml"})
SHARED_CONFIGS = frozenset({"setup.cfg", "tox.ini", "pyproject.toml"})
"""Files with a section for pytest among others, which it reads from any folder on the way to a test."""
START_UP_MODULES = ("sitecustomize", "usercustomize")
"""What every Python imports as it starts, from wherever its path leads."""
RUNNER_MODULES = ("pytest", "_pytest", "pluggy", "iniconfig")
"""What would be imported from the root in the test runner's place."""
MODULE_FORMS = ("{}.py", "{}.pyc", "{}.*so", "{}/__init__.py", "{}/__init__.pyc", "{}/__init__.*so")
"""Where Python finds a module: as source, byte code or machine code, alone or as a package."""
ENTRY_POINTS = ("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt")
"""In the root, where `python -m pytest` looks for plug-ins."""
_STEERING = " ".join(
    [f":(glob)**/{name}" for name in sorted(RUNNER_FILES | SHARED_CONFIGS)]
    + [f":(glob)**/{form.format(name)}" for name in START_UP_MODULES for form in MODULE_FORMS]
    + [f":(glob){form.format(name)}" for name in RUNNER_MODULES for form in MODULE_FORMS]
    + [f":(glob){path}" for path in ENTRY_POINTS]
)
PLAIN_GIT = {
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.hooksPath",
    "GIT_CONFIG_VALUE_0": "/dev/null",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}
"""For a script that has tests checked out: git starts nothing of the repository's, and takes no object for another."""
QUIET_SHELL = {"BASH_ENV": "", "ENV": ""}
"""Our own scripts print what we read: an image's shell start-up noise must not be in it."""

_SETUP = """
set -euf
[ -z "${JUDGING:-}" ] || [ -f "$JUDGING/HEAD" ] || exit 81
export GIT_DIR="${JUDGING:-$SNAPSHOT}" GIT_WORK_TREE="$(pwd -P)" GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1
unset GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE GIT_COMMON_DIR || true
new_repository() {
    git -c init.defaultBranch=main init -q --template=
    git config gc.auto 0
    git config core.compression 1
    git config core.fileMode true
    mkdir -p "$GIT_DIR/info"
    # Bytes as they are: no line ends, filters or keywords of the folder's own .gitattributes.
    echo '* -text -filter -ident -working-tree-encoding' > "$GIT_DIR/info/attributes"
}
record() {
    # 1: there are files that cannot be read; more: nothing was recorded.
    git add -A --ignore-errors . >/dev/null 2>"$GIT_DIR/add.stderr" || [ $? = 1 ] || return 1
    # What steers a test runner does so whatever .gitignore says of it.
    {
        git ls-files -z -o -i --exclude-standard -- $STEERING
        # In folders that are looked at: there are thousands in an environment that is ignored as a whole.
        git ls-files -z -o -i --exclude-standard --directory -- ':(glob)**/__init__.py' | sed -z '/\\/$/d'
    } | xargs -0 -r git --literal-pathspecs add -f --ignore-errors -- >/dev/null 2>>"$GIT_DIR/add.stderr" || true
}
"""
_OUTSIDE = """
folder="$(pwd -P)"
told() {
    if [ -e "$1" ] || [ -L "$1" ]; then
        printf '%s %s\\0' "$(git hash-object $KEEP --no-filters -- "$1" 2>/dev/null || echo unreadable)" "$1"
    fi
}
for file in config config.worktree info/attributes info/grafts; do told "$folder/.git/$file"; done
set +f
for file in "$folder"/.git/hooks/*; do told "$file"; done
set -f
[ "$TOP" = / ] || case "$folder/" in "$TOP"/*) ;; *) exit ;; esac
while [ "$folder" != / ] && [ "$folder" != "$TOP" ]; do
    folder="$(dirname "$folder")"
    for name in $ABOVE; do told "${folder%/}/$name"; done
done
"""
_PUT_BACK_OUTSIDE = """
while IFS= read -r -d "" line; do
    file="${line#* }"
    chmod u+w "$(dirname "$file")" 2>/dev/null || true
    mkdir -p "$(dirname "$file")"
    rm -rf -- "$file"
    if [ "${line%% *}" != none ]; then
        git --git-dir="$SNAPSHOT" cat-file blob "${line%% *}" > "$file" 2>/dev/null || exit 81
        [ "$(git hash-object --no-filters -- "$file")" = "${line%% *}" ] || exit 81
        case "$file" in */hooks/*) chmod a+x "$file" ;; esac
    fi
done
"""
_TAKE = (
    """
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
new_repository
mkdir -p "$SNAPSHOT/objects/info"
if [ -n "$exclude" ] && [ -f "$exclude" ]; then cat "$exclude" > "$SNAPSHOT/info/exclude"; fi
printf '%s\\n' "$OURS" >> "$SNAPSHOT/info/exclude"
if [ -n "$head" ]; then
    # By link where that costs nothing, so that the objects outlive the agent's repository; by reference in any case.
    if [ "$(stat -f -c %T "$SNAPSHOT")" != overlayfs ]; then
        cp -al "$objects/." "$SNAPSHOT/objects" 2>/dev/null || true
    fi
    # Another evaluator's record, of another folder, may be there already.
    (cd "$objects" && pwd -P) >> "$SNAPSHOT/objects/info/alternates"
    # Files that are tracked count even where .gitignore names them.
    git read-tree "$head"
fi
record || { tail -n 1 "$GIT_DIR/add.stderr" >&2; exit 1; }
tree="$(git write-tree)"
index="$(git hash-object --stdin < "$GIT_DIR/index")"
printf '%s\\0%s\\0%s\\0%s\\0%s\\0' "$repo" "$SNAPSHOT" "$head" "$tree" "$index"
KEEP=-w
"""
    + _OUTSIDE
)
_COMPARE = """
theirs="$SNAPSHOT/objects"
[ -d "$theirs" ] && command -v git >/dev/null || exit 81
chmod u+rwx "$(dirname "$SNAPSHOT")" 2>/dev/null || true
set +f; rm -rf -- "$SNAPSHOT".judging.*; set -f
spoilt() {
    # A full disk is not the agent's doing.
    head -c 65536 /dev/zero > "$SNAPSHOT.judging.probe"
    exit 81
}
GIT_DIR="$(mktemp -d "$SNAPSHOT.judging.XXXXXX")" || spoilt
new_repository
cat "$SNAPSHOT/info/exclude" > "$GIT_DIR/info/exclude" 2>/dev/null || true
# Objects by what is in them: index-pack gives each the id that it ought to have.
take_over() {
    sort -u > "$GIT_DIR/wanted"
    git cat-file --batch-check < "$GIT_DIR/wanted" | sed -n 's/ missing$//p' > "$GIT_DIR/missing"
    [ -s "$GIT_DIR/missing" ] || return 0
    GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" git pack-objects -q --stdout < "$GIT_DIR/missing" |
        git index-pack --stdin >/dev/null
    [ -z "$(git cat-file --batch-check < "$GIT_DIR/missing" | sed -n '/ missing$/p')" ]
}
{ echo "$BASE"; GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" git ls-tree -r -d "$BASE"; } 2>/dev/null |
    sed -n -e '1p' -e 's/^[0-9]* tree \\([0-9a-f]*\\)[[:space:]].*/\\1/p' | take_over 2>/dev/null || spoilt
git read-tree "$BASE" 2>/dev/null || spoilt
# With what it says of files, those that are as they were need not be read.
if [ "$(git hash-object --stdin < "$SNAPSHOT/index" 2>/dev/null || true)" = "$INDEX" ]; then
    cp -p "$SNAPSHOT/index" "$GIT_DIR/index"
fi
# Nobody keeps his work from being looked at; what was there before him keeps its mode in another sandbox only.
find . -name .git -prune -o -type d ! -perm -700 -exec chmod u+rwx {} \\; 2>/dev/null || true
find . -name .git -prune -o -type f ! -perm -400 -exec chmod u+r {} + 2>/dev/null || true
GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs" record || spoilt
# A pipe and its like are to git as if they were what they stand in the place of.
{ find . -name .git -prune -o ! -type d ! -type f ! -type l -print0 2>/dev/null || true; } |
    git update-index -z --force-remove --stdin
git diff-index --cached --raw --no-renames "$BASE" > "$GIT_DIR/raw"
{
    sed -n 's/^:1[02]0[0-9]* [0-9]* \\([0-9a-f]*\\) .*/\\1/p' "$GIT_DIR/raw"
    sed -n 's/^:[0-9]* 1[02]0[0-9]* [0-9a-f]* \\([0-9a-f]*\\) .*/\\1/p' "$GIT_DIR/raw"
} | take_over 2>/dev/null || spoilt
printf '%s\\0' "$GIT_DIR"
git diff-index --cached --raw -z --no-renames "$BASE"
"""
_PATCH = """
export GIT_INDEX_FILE="$GIT_DIR/patch.index"
git read-tree "$BASE"
git update-index -z --index-info
git diff --binary --cached --full-index --no-renames --no-ext-diff --no-textconv --no-color "$BASE" \
    > "$GIT_DIR/patch.diff"
"""
_RESTORE = """
export GIT_INDEX_FILE="$GIT_DIR/restore.index"
git read-tree "$BASE"
git checkout-index -f -q -z --stdin
"""
_DROP_BYTE_CODE = """
export GIT_INDEX_FILE="$GIT_DIR/restore.index"
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
    result = await _git(runtime, folder, env, _TAKE, variables, timeout_s)
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
        result = await self._run(_COMPARE, timeout_s, max_output_bytes=MAX_LISTING_BYTES)
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
        checked(await self._run(_PATCH, timeout_s, stdin=_bytes(entries)), "writing the agent's patch")
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
            checked(await self._run(_RESTORE, timeout_s, stdin=_bytes(others)), "restoring the tests")

    async def put_back_outside(self, timeout_s: float) -> list[str]:
        """Puts back what is in `Baseline.outside`, and answers with the paths that had changed. Raises
        `RepositoryLost`, `EvaluatorFault`."""
        top, before, git = await _top(self._runtime, timeout_s), self.baseline.outside, f"{self.baseline.repo}/.git/"
        found = checked(await self._run(_OUTSIDE, timeout_s, top), "looking for what steers tests from outside")
        now = _by_path(found.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1])
        changed = sorted(path for path in {*now, *before} if now.get(path) != before.get(path))
        if not any(path.startswith(git) for path in now):  # nothing of a repository that is gone comes back
            changed = [path for path in changed if not path.startswith(git)]
        if changed:
            lines = "".join(f"{before.get(path, 'none')} {path}\0" for path in changed)
            result = await self._run(_PUT_BACK_OUTSIDE, timeout_s, stdin=_bytes(lines))
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
            checked(await self._run(_DROP_BYTE_CODE, timeout_s), "removing byte code")

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
        _SETUP + script,
        cwd=folder,
        env={**env, **QUIET_SHELL, "STEERING": _STEERING, **variables},
        stdin=stdin,
        timeout_s=timeout_s,
        max_output_bytes=max_output_bytes,
        category=ExecCategory.REPOSITORY,
    )


async def _top(runtime: Runtime, timeout_s: float) -> dict[str, str]:
    """Variables of `_OUTSIDE`: all folders above belong to the sandbox where it has a root of its own."""
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
