"""Takes from a repository, before an agent sees it, whatever lies after its checked-out commit.

A task of the kind "fix this issue" is made by checking out the commit before the fix, and clones bring the fix along:
in other branches, tags, reflogs, or as a loose object that `git fsck --lost-found` names. What stays is the checked-out
commit with all that it was made of, its branch, the index and the working tree. All tags go: that one is at an older
commit says nothing of when it was made, or what it tells. Submodules and other repositories below are treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polarq.contracts.evaluators import repository_of
from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import ExecCategory, ScrubbedHistory
from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq.errors import RuntimeFault
from polarq_worker.runtimes.base import Runtime

_VERSION = 1
"""Of what is done: another one makes another recipe."""
_FIELDS = 5
_NO_GIT = 80
_NO_REPOSITORY = 81

_SCRUB = r"""
set -uf
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0 LC_ALL=C
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_NAMESPACE
unset GIT_CONFIG_COUNT GIT_CONFIG_PARAMETERS GIT_COMMON_DIR GIT_EXTERNAL_DIFF
if ! command -v git >/dev/null; then [ -e .git ] && exit 80; exit 81; fi
ours() { git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor= -c gc.auto=0 \
    -c core.logAllRefUpdates=false -c protocol.allow=never -c core.pager=cat "$@"; }
at() { local dir=$1; shift; ours --git-dir="$dir" "$@"; }
all() { at "$1" cat-file --batch-all-objects --batch-check='%(objectname) %(objecttype)' | sort; }
beyond() {  # what no commit, tree or index entry that stays needs
    all "$1" | cut -d' ' -f1 > "$list.all" && at "$1" rev-list --objects --indexed-objects "$2" > "$list.reach" &&
        cut -c1-"${#2}" "$list.reach" | sort -u > "$list.kept" && comm -23 "$list.all" "$list.kept"
}
said() { printf '%s\0%s\0%s\0%s\0%s\0' "$1" "$2" "$3" "$4" "$5"; }

scrub() {  # name of the repository, its git directory
    local dir=$2 head branch refs before after file left stayed=0
    if ! head="$(at "$dir" rev-parse -q --verify 'HEAD^{commit}')"; then
        said "$1" "" 0 0 "it has no commit checked out"; return
    fi
    case "$(cd "$dir" && pwd -P)/" in "$POLARQ_WITHIN"/*) ;; *)
        said "$1" "$head" 0 0 "it is the machine's own, and not the sandbox's: nothing is taken from it"; return ;;
    esac
    if [ "$(at "$dir" rev-parse --git-common-dir)" != "$(at "$dir" rev-parse --git-dir)" ]; then
        said "$1" "$head" 0 0 "it is a linked working tree, whose repository is elsewhere"; return
    fi
    if [ -e "$dir/reftable" ]; then said "$1" "$head" 0 0 "it keeps its refs in a reftable"; return; fi
    if ls "$dir/objects/pack" 2>/dev/null | grep -q '[.]promisor$'; then
        said "$1" "$head" 0 0 "it is a partial clone, which fetches what it lacks"; return
    fi
    branch="$(at "$dir" symbolic-ref -q HEAD || true)"
    refs="$(at "$dir" for-each-ref --format='%(refname)' 2>/dev/null | grep -cvFx "$branch")"
    before="$(all "$dir" | grep -c ' commit$')"
    rm -rf "$dir/refs" "$dir/packed-refs" "$dir/packed-refs.lock" "$dir/logs" "$dir/worktrees" "$dir/lost-found" \
        "$dir/rr-cache" "$dir/svn" "$dir/rebase-merge" "$dir/rebase-apply" "$dir/sequencer" "$dir/info/grafts" \
        "$dir/info/refs" "$dir/objects/info/packs" "$dir/objects/info/commit-graph" "$dir/objects/info/commit-graphs" \
        "$dir/FETCH_HEAD" "$dir/ORIG_HEAD" "$dir/MERGE_HEAD" "$dir/MERGE_MSG" "$dir/MERGE_MODE" "$dir/AUTO_MERGE" \
        "$dir/CHERRY_PICK_HEAD" "$dir/REVERT_HEAD" "$dir/REBASE_HEAD" "$dir/SQUASH_MSG" "$dir/COMMIT_EDITMSG"
    find "$dir" -maxdepth 1 \( -name 'BISECT_*' -o -name '*.bundle' \) -exec rm -rf {} +
    find "$dir/objects/pack" -maxdepth 1 \( -name '*.keep' -o -name 'multi-pack-index*' -o -name '*.bitmap' \) \
        -exec rm -f {} + 2>/dev/null
    mkdir -p "$dir/refs/heads" "$dir/refs/tags"
    if [ -n "$branch" ]; then at "$dir" update-ref "$branch" "$head" || stayed=1; fi
    for file in $(ours config -f "$dir/config" --name-only --get-regexp '^(remote|branch|svn-remote|bundle)[.]' \
            2>/dev/null | sed 's/[.][^.]*$//' | sort -u | tr ' \n' '\001\n'); do
        ours config -f "$dir/config" --remove-section "$(printf %s "$file" | tr '\001' ' ')" 2>/dev/null
    done
    left="$(beyond "$dir" "$head")" || stayed=1
    if [ -n "$left" ] || [ -s "$dir/objects/info/alternates" ]; then
        at "$dir" repack -a -d -n -q 2>"$list.error" && rm -f "$dir/objects/info/alternates" \
            "$dir/objects/info/http-alternates" && at "$dir" prune --expire=now 2>"$list.error" || stayed=1
        find "$dir/objects" \( -name 'tmp_*' -o -name 'incoming-*' \) -exec rm -rf {} + 2>/dev/null
        left="$(beyond "$dir" "$head")" || stayed=1
    fi
    if [ "$(id -u)" = 0 ]; then chown -R --reference="$dir" "$dir/refs" "$dir/objects" 2>/dev/null; fi
    after="$(all "$dir" | grep -c ' commit$')"
    if [ $stayed != 0 ] || [ -n "$left" ] || [ "$(at "$dir" rev-parse -q --verify HEAD)" != "$head" ]; then
        said "$1" "$head" "$refs" "$((before - after))" \
            "something of it stayed ($(printf %s "$left" | grep -c .) objects) $(head -n 1 "$list.error" 2>/dev/null)"
        return
    fi
    said "$1" "$head" "$refs" "$((before - after))" ""
}

list="$(mktemp -d "${TMPDIR:-/tmp}/polarq.XXXXXX")/list" || exit 83
trap 'rm -rf "${list%/list}"' EXIT
top="$(ours rev-parse --show-toplevel 2>/dev/null)" || exit 81
main="$(ours rev-parse --absolute-git-dir)"
scrub "" "$main"
{
    find "$top" -xdev -mindepth 2 -name .git -print0 -prune
    if [ -d "$main/modules" ]; then find "$main/modules" -name HEAD -type f -not -path '*/logs/*' -print0; fi
} > "$list.nested"
seen="|$main|"
while IFS= read -r -d '' found; do
    if [ "${found##*/}" = HEAD ]; then dir="${found%/HEAD}"; name="$dir"; [ -d "$dir/objects" ] || continue
    else name="${found%/.git}"; dir="$(ours -C "$name" rev-parse --absolute-git-dir 2>/dev/null)" || continue; fi
    case "$seen" in *"|$dir|"*) continue ;; esac
    seen="$seen$dir|"
    scrub "${name#"$top"}" "$dir"
done < "$list.nested"
"""


@dataclass(frozen=True, slots=True)
class ScrubHistory:
    """A finish step of a recipe."""

    repository: str
    """A folder of the sandbox, in the repository or its top; empty: where commands run that name no folder."""
    asked_for: bool
    """By the task itself: where it fails, so does the rollout."""

    @property
    def identity(self) -> str:
        return f"scrub_history {_VERSION} {self.repository} {self.asked_for}"

    async def carry_out(self, runtime: Runtime, env: Mapping[str, str], timeout_s: float) -> list[ScrubbedHistory]:
        """One entry per repository that was found. Raises `HistoryNotScrubbed`."""
        found = await self._scrubbed(runtime, env, timeout_s)
        if any(entry.problem for entry in found) and runtime.spec.user is not None:
            # The repository may be of the image's own user.
            again = await self._scrubbed(runtime, env, timeout_s, user="0")
            found = again or found
        problem = next((entry for entry in found if entry.problem), None)
        if self.asked_for and (problem is not None or not found):
            why = "there is no repository" if problem is None else problem.problem
            where = self.repository if problem is None else problem.repository
            raise HistoryNotScrubbed(f"runtime.scrub_history: the history of {where} cannot be scrubbed: {why}")
        return found

    async def _scrubbed(
        self, runtime: Runtime, env: Mapping[str, str], timeout_s: float, user: str | None = None
    ) -> list[ScrubbedHistory]:
        result = await runtime.exec(
            _SCRUB,
            cwd=self.repository or None,
            user=user,
            env={**env, "BASH_ENV": "", "ENV": "", "POLARQ_WITHIN": _own_folder(runtime)},
            timeout_s=timeout_s,
            max_output_bytes=4 << 20,
            category=ExecCategory.REPOSITORY,
        )
        if result.kind is ExecKind.SANDBOX_LOST:
            raise RuntimeFault(result.why)
        if result.kind is ExecKind.COULD_NOT_START or result.exit_code == _NO_REPOSITORY:
            return []
        if result.exit_code == _NO_GIT:
            problem = "there is no git in the sandbox; install it in the image or by runtime.prepare"
            return [ScrubbedHistory(repository=self.repository, head="", problem=problem)]
        if not result.ok:
            return [ScrubbedHistory(repository=self.repository, head="", problem=result.why)]
        fields = result.stdout_text.split("\0")[:-1]
        rows = [fields[start : start + _FIELDS] for start in range(0, len(fields), _FIELDS)]
        return [
            ScrubbedHistory(
                repository=f"{self.repository or '.'}{name}",
                head=head,
                refs_removed=int(refs),
                commits_removed=int(commits),
                problem=problem.strip(),
            )
            for name, head, refs, commits, problem in rows
        ]


def _own_folder(runtime: Runtime) -> str:
    """Below which all is the sandbox's own; blank: everything. One that has the machine's files may be given a
    repository that somebody works in."""
    return str(runtime.root) if Path(runtime.layout.session_dir).is_relative_to(runtime.root) else ""


class HistoryNotScrubbed(RuntimeFault):
    """The task insists on it."""

    reason = "history_not_scrubbed"


def of_task(task: Task, spec: RuntimeSpec) -> ScrubHistory | None:
    """What is to be done in the sandboxes of a task: on where it is asked for, or its evaluator names a repository."""
    named = repository_of(task.evaluator) if task.evaluator is not None else None
    if spec.scrub_history is False or (spec.scrub_history is None and not isinstance(named, str)):
        return None
    return ScrubHistory(named if isinstance(named, str) else "", asked_for=spec.scrub_history is True)
