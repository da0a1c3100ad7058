"""A repository's future, hidden from the agent: by whatever way one may look for it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.contracts.sandbox import ScrubbedHistory
from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq_worker.history import HistoryNotScrubbed, ScrubHistory, of_task
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.local import LocalRuntime
from tests.needs import not_here
from tests.runtimes.local_here import settings

LONG_S = 300.0
REPO = "/polar/session/repo"
SECRET = "the fix of the issue"
MADE = r"""
set -e
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b
export GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b main repo; cd repo
echo one > file; git add .; git commit -qm one; git tag v1
echo two >> file; git add .; git commit -qm two; git tag -a v2 -m "release two"
base=$(git rev-parse HEAD)
"""
FUTURE = (
    "echo 'the fix of the issue' > fix; git add .; git commit -qm 'the fix'; git tag v3; fixed=$(git rev-parse HEAD)"
)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    made = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="history", root=tmp_path / "root")
    await made.start()
    yield made
    await made.stop()


async def run(runtime: LocalRuntime, script: str) -> str:
    result = await runtime.exec(script, timeout_s=LONG_S)
    assert result.ok, result.why
    return result.stdout_text


async def scrubbed(runtime: LocalRuntime, script: str, *, asked_for: bool = False) -> list[ScrubbedHistory]:
    """What is found in the repository that the script made, in `repo`; it leaves the fix's id in `fixed`."""
    await run(runtime, f"{MADE}{script}\necho $fixed > ../fixed; git rev-parse HEAD > ../head")
    return await ScrubHistory(REPO, asked_for).carry_out(runtime, {}, LONG_S)


async def nothing_of_the_fix(runtime: LocalRuntime) -> None:
    fixed = (await run(runtime, "cat fixed")).strip()
    looks = """
    cd repo; git status --short; git log --all --format=%H%s; git reflog --all; git stash list; git tag; git branch -a
    git fsck --full --lost-found --unreachable --dangling 2>&1; git for-each-ref; git notes list 2>/dev/null
    git cat-file --batch-all-objects --batch-check --unordered | while read id type rest; do
        git cat-file -p $id 2>/dev/null; done
    for pack in .git/objects/pack/*.idx; do [ -e "$pack" ] && git verify-pack -v "$pack"; done
    find .git -type f | xargs cat 2>/dev/null | tr -d '\\0'
    for name in @{-1} FETCH_HEAD ORIG_HEAD MERGE_HEAD stash@{0} v3 origin/main main@{1}; do
        git show --end-of-options "$name" 2>/dev/null; done
    true"""
    seen = await run(runtime, looks)
    assert fixed
    assert fixed not in seen
    assert SECRET not in seen
    assert "the fix" not in seen
    assert not (await runtime.exec(["git", "-C", "repo", "cat-file", "-e", fixed], timeout_s=LONG_S)).ok
    head = (await run(runtime, "cat head")).strip()
    assert (await run(runtime, "cd repo; git rev-parse HEAD; git log --format=%s HEAD")).splitlines() == [
        head,
        "two",
        "one",
    ]
    assert (await runtime.exec("cd repo; git fsck --full --strict && git diff --quiet HEAD", timeout_s=LONG_S)).ok


HIDDEN = {
    "another branch": "git checkout -qb next; FUTURE; git checkout -q main",
    "a tag alone": "git checkout -q --detach; FUTURE; git checkout -q main",
    "a loose object": "FUTURE; git tag -d v3 >/dev/null; git reset -q --hard $base; "
    "git reflog expire --all --expire=now",
    "the reflog": "FUTURE; git tag -d v3 > /dev/null; git reset -q --hard $base",
    "a pack": "FUTURE; git repack -adq; git reset -q --hard $base",
    "packs that are kept": "FUTURE; git repack -adq; for p in .git/objects/pack/*.pack; do touch ${p%pack}keep; done; "
    "git pack-refs --all; git reset -q --hard $base",
    "the stash": "echo 'the fix of the issue' >> file; git stash -q; fixed=$(git rev-parse stash@{0})",
    "a note": "git notes add -m 'the fix of the issue' $base; fixed=$(git rev-parse refs/notes/commits)",
    "a replacement": "FUTURE; git reset -q --hard $base; git replace $base~1 $fixed",
    "a detached head, packed refs": "FUTURE; git pack-refs --all; git checkout -q --detach $base",
    "remotes": "FUTURE; git clone -q --bare . ../other.git; git reset -q --hard $base; git tag -d v3 >/dev/null; "
    "git remote add origin ../other.git; git fetch -q origin; rm -rf ../other.git",
    "FETCH_HEAD and ORIG_HEAD": "FUTURE; git reset -q --hard $base; git fetch -q . v3; "
    "git update-ref ORIG_HEAD $fixed; git tag -d v3 >/dev/null; echo $fixed > .git/MERGE_HEAD",
    "a bundle and a second index": "FUTURE; git bundle create -q .git/all.bundle --all; git reset -q --hard $base",
    "commit graph and bitmaps": "FUTURE; git repack -adbq; git commit-graph write --reachable; "
    "git multi-pack-index write; git reset -q --hard $base",
    "a namespace of refs": "FUTURE; git reset -q --hard $base; git update-ref refs/pull/12/head $fixed; git tag -d v3",
    "another working tree": "git worktree add -q ../wt -b side; (cd ../wt; FUTURE); "
    "fixed=$(git rev-parse v3); rm -rf ../wt",
}


@pytest.mark.parametrize("way", HIDDEN)
async def test_a_future_commit_is_gone(runtime: LocalRuntime, way: str) -> None:
    found = await scrubbed(runtime, HIDDEN[way].replace("FUTURE", FUTURE))
    assert [(entry.repository, entry.problem) for entry in found] == [(REPO, "")]
    await nothing_of_the_fix(runtime)


async def test_objects_borrowed_from_another_repository_are_copied_and_the_rest_is_not_seen(
    runtime: LocalRuntime,
) -> None:
    script = f"{FUTURE}; cd ..; mv repo origin; git clone -q --shared origin repo; cd repo; git reset -q --hard $base"
    (found,) = await scrubbed(runtime, script)
    assert found.problem == ""
    await run(runtime, "rm -rf origin")
    await nothing_of_the_fix(runtime)


async def test_a_shallow_clone_stays_one(runtime: LocalRuntime) -> None:
    script = f"git checkout -qb next; {FUTURE}; cd ..; mv repo full; "
    script += (
        "git clone -q --depth 2 --no-single-branch file://$PWD/full repo; cd repo; git checkout -q main; rm -rf ../full"
    )
    (found,) = await scrubbed(runtime, script)
    assert found.problem == ""
    assert found.commits_removed >= 1
    await nothing_of_the_fix(runtime)


async def test_submodules_are_scrubbed_too(runtime: LocalRuntime) -> None:
    script = f"{FUTURE}; git reset -q --hard $base; cd ..; mv repo inner; git init -q -b main repo; cd repo; " + (
        "git -c protocol.file.allow=always submodule --quiet add -b main ../inner sub 2>/dev/null; "
        "git -C sub checkout -q $base; git add .; git commit -qm outer; rm -rf ../inner; mkdir -p own; "
        "git -C own init -q -b main; cp sub/file own/; git -C own add .; git -C own commit -qm x; git -C own tag t"
    )
    found = await scrubbed(runtime, script)
    assert {entry.repository: entry.problem for entry in found} == {REPO: "", f"{REPO}/sub": "", f"{REPO}/own": ""}
    fixed = (await run(runtime, "cat fixed")).strip()
    assert not (await runtime.exec(["git", "-C", "repo/sub", "cat-file", "-e", fixed], timeout_s=LONG_S)).ok
    assert (
        await run(runtime, "git -C repo/sub log --format=%s; git -C repo/own tag; git -C repo status --short own")
    ) == ("two\none\n?? own/\n")


async def test_working_tree_and_index_stay_as_they_are(runtime: LocalRuntime) -> None:
    script = f"""{FUTURE}; git reset -q --hard $base; echo staged > new; git add new; echo changed >> file
    echo u > untracked; git status --short > ../before"""
    (found,) = await scrubbed(runtime, script)
    assert found.problem == ""
    assert found.refs_removed == 3
    assert found.commits_removed == 1
    assert await run(runtime, "cd repo; git status --short; git show :new") == (
        await run(runtime, "cat before") + "staged\n"
    )


async def test_whose_a_repository_is_stays_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        not_here("files of another user need root")
    host = Host(settings=settings("none"))
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="owned", root=tmp_path / "root", host=host)
    await runtime.start()
    try:
        script = f"{FUTURE}; git reset -q --hard $base; chown -R 4321:4321 ."
        await run(runtime, f"{MADE}{script}")
        (found,) = await ScrubHistory(REPO, False).carry_out(runtime, {}, LONG_S)
        assert (found.problem, found.commits_removed) == ("", 1)
        assert await run(runtime, "find repo ! -uid 4321") == ""
    finally:
        await runtime.stop()


async def test_settings_of_the_repository_run_nothing(runtime: LocalRuntime) -> None:
    script = f"""{FUTURE}; git reset -q --hard $base
    printf '#!/bin/sh\\ntouch %s/ran\\n' "$(dirname "$PWD")" > ../evil; chmod +x ../evil
    for key in core.fsmonitor core.pager core.editor core.sshCommand gc.recentObjectsHook core.alternateRefsCommand; do
        git config $key "$(dirname "$PWD")/evil"; done
    mkdir -p .git/hooks; for hook in reference-transaction post-rewrite pre-auto-gc post-index-change; do
        cp ../evil .git/hooks/$hook; done; rm -f ../ran"""
    (found,) = await scrubbed(runtime, script)
    assert found.problem == ""
    assert await run(runtime, "ls") == "artifacts\nevil\nfixed\nhead\nlogs\nrepo\n"


async def test_a_repository_that_cannot_be_scrubbed_is_named_and_refused_where_the_task_insists(
    runtime: LocalRuntime,
) -> None:
    script = f"{FUTURE}; git reset -q --hard $base; git config core.repositoryFormatVersion 1; "
    script += "git config extensions.preciousObjects true"
    (found,) = await scrubbed(runtime, script)
    assert found.problem
    with pytest.raises(HistoryNotScrubbed, match=r"runtime\.scrub_history: the history of .*repo cannot be scrubbed"):
        await ScrubHistory(REPO, True).carry_out(runtime, {}, LONG_S)
    with pytest.raises(HistoryNotScrubbed, match="there is no repository"):
        await ScrubHistory("/polar/session/artifacts", True).carry_out(runtime, {}, LONG_S)
    assert await ScrubHistory("/polar/session/artifacts", False).carry_out(runtime, {}, LONG_S) == []


@pytest.mark.parametrize(
    ("runtime_keys", "evaluator", "expected"),
    [
        ({}, None, None),
        ({}, {"strategy": "session_completed"}, None),
        ({}, {"strategy": "mine", "config": {"repo_dir": "/r"}}, ScrubHistory("/r", False)),
        ({"scrub_history": True}, {"strategy": "mine", "config": {"repo_dir": "/r"}}, ScrubHistory("/r", True)),
        ({"scrub_history": False}, {"strategy": "mine", "config": {"repo_dir": "/r"}}, None),
        ({"scrub_history": True, "workdir": "/w"}, None, ScrubHistory("", True)),
    ],
)
def test_it_is_done_where_the_evaluator_names_a_repository_or_the_task_asks(
    runtime_keys: dict[str, object], evaluator: dict[str, object] | None, expected: ScrubHistory | None
) -> None:
    task = Task.parse(
        {
            "instruction": "x",
            "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
            "runtime": {"backend": "local", **runtime_keys},
            "evaluator": evaluator,
        }
    )
    assert task.runtime is not None
    assert of_task(task, task.runtime) == expected


@pytest.mark.parametrize("way", ["named", "link", "git"])
async def test_a_repository_of_the_machine_itself_keeps_what_it_has(way: str, tmp_path: Path) -> None:
    host = Host(settings=settings("none"))
    runtime = LocalRuntime(RuntimeSpec(backend="local"), runtime_id="history", root=tmp_path / "root", host=host)
    await runtime.start()
    try:
        mine = tmp_path / "mine"
        mine.mkdir()
        await run(runtime, f"cd {mine}\n{MADE}")
        before = await run(runtime, f"git -C {mine}/repo for-each-ref")
        if way == "link":
            await run(runtime, f"ln -s {mine}/repo repo")
        elif way == "git":
            await run(runtime, f"mkdir repo; ln -s {mine}/repo/.git repo/.git")
        [entry] = await ScrubHistory(f"{mine}/repo" if way == "named" else REPO, False).carry_out(runtime, {}, LONG_S)
        assert "the machine's own" in entry.problem
        assert await run(runtime, f"git -C {mine}/repo for-each-ref") == before != ""
        await run(runtime, f"rm -rf repo; cp -r {mine}/repo repo")
        [own] = await ScrubHistory(REPO, False).carry_out(runtime, {}, LONG_S)
        assert (own.problem, own.refs_removed) == ("", 2)
    finally:
        await runtime.stop()
