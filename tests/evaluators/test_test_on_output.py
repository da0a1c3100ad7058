"""The reward comes from running the tests on what the agent did, wherever and however it did it."""

from __future__ import annotations

from typing import Any

import pytest

from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.task import Task
from polarq.errors import EvaluatorFault, InvalidTask, UnknownPlugin
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.create import create_evaluator
from tests.evaluators.conftest import CHECK, EXPECTED, FILES, FIX, GIT, QUICK, REPO, Bench

BOTH = pytest.mark.parametrize("fresh", [False, True], ids=["live", "fresh"])
PYTEST = "python -m pytest -p no:cacheprovider"


@BOTH
async def test_a_solved_task_is_one_and_says_where_it_was_graded(bench: Bench, fresh: bool) -> None:
    await bench.begin(fresh=fresh)
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.evaluator) == (1.0, "test_on_output")
    report = reward.report
    assert (report["resolved"], report["expected"], report["as_expected"]) == (True, 3, 3)
    assert report["graded_in"] == ("fresh" if fresh else "live")
    assert "+    return a + b" in (bench.runtime.host_log_dir / "eval/patch.diff").read_text()


@BOTH
async def test_a_wrong_solution_is_zero_with_the_tests_named(bench: Bench, fresh: bool) -> None:
    await bench.begin(QUICK, fresh=fresh)
    await bench.agent("printf 'def add(a, b):\\n    return 3\\n' > calc.py")
    reward = await bench.verdict()
    assert reward.outcome == 0.0
    assert set(reward.report["otherwise"]) == {key for key in EXPECTED if "test_p" in key}


@BOTH
async def test_no_change_is_zero(bench: Bench, fresh: bool) -> None:
    await bench.begin(QUICK, fresh=fresh)
    await bench.agent("python -c 'import calc'; touch ignored.txt; mkdir .pytest_cache; touch .pytest_cache/x")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["empty_generation"]) == (0.0, True)
    assert len(bench.runtimes) == 1


WAYS = {
    "tracked": FIX,
    "staged": f"{FIX}; git add calc.py",
    "committed": f"{FIX}; {GIT} commit -q -a -m done",
    "committed on a branch": f"git checkout -q -b work; {FIX}; {GIT} commit -q -a -m done; git checkout -q -b other",
    "untracked": f"git rm -q --cached calc.py; {GIT} commit -q -m x; {FIX}",
    "moved and amended": f"{FIX}; {GIT} commit -q -a --amend -m rewritten; git gc -q --prune=now",
    "with a new file": "printf 'def plus(a, b):\\n    return a + b\\n' > 'new file.py'; mv 'new file.py' helper.py;"
    "printf 'from helper import plus as add\\n' > calc.py",
    "behind a lock": f"{FIX}; touch .git/index.lock",
    "in a repository that was begun anew": f"{FIX}; rm -rf .git; {GIT} init -q; {GIT} add -A; {GIT} commit -q -m x",
    "without a repository": f"{FIX}; rm -rf .git",
    "beside an embedded repository": f"{FIX}; git init -q sub; touch sub/file",
}


@BOTH
@pytest.mark.parametrize("way", WAYS)
async def test_the_work_is_found_however_it_was_left(bench: Bench, fresh: bool, way: str) -> None:
    await bench.begin(QUICK, fresh=fresh)
    await bench.agent(WAYS[way])
    assert (await bench.verdict()).outcome == 1.0


@BOTH
async def test_a_folder_without_a_repository_is_compared_all_the_same(bench: Bench, fresh: bool) -> None:
    bench.recipe = "true"
    await bench.begin(QUICK, fresh=fresh)
    assert (await bench.verdict()).report["empty_generation"]
    await bench.agent(FIX)
    assert (await bench.verdict()).outcome == 1.0


async def test_looking_leaves_the_agents_repository_alone(bench: Bench) -> None:
    await bench.begin(QUICK)
    await bench.agent(f"{FIX}; git add calc.py; echo more > untracked")
    before = await bench.runtime.exec(
        "git status --porcelain; git log --oneline --all; ls .git", cwd=REPO, timeout_s=60
    )
    await bench.verdict()
    after = await bench.runtime.exec("git status --porcelain; git log --oneline --all; ls .git", cwd=REPO, timeout_s=60)
    assert before.stdout == after.stdout


async def test_bytes_modes_links_and_line_ends_reach_the_fresh_sandbox(bench: Bench) -> None:
    bench.files |= {
        ".gitattributes": "*.txt text eol=crlf\n*.dat filter=lfs\n",
        "crlf.txt": "one\r\ntwo\r\n",
        "ends.txt": "one\r\ntwo\r\n",
        "old.bin": b"\0\1\2",
        "tests/test_calc.py": "import os, calc\n"
        "def test_add():\n    assert os.access('tool', os.X_OK)\n"
        "    assert open('crlf.txt', 'rb').read() == b'one\\r\\ntwo\\r\\nthree\\r\\n'\n"
        "    assert open('ends.txt', 'rb').read() == b'one\\ntwo\\n'\n"
        "    assert open('new.bin', 'rb').read() == bytes(range(256))\n"
        "    assert open('x.dat').read() == 'data\\n'\n"
        "    assert os.readlink('link') == 'calc.py'\n"
        "    assert not os.path.exists('old.bin')\n"
        "    assert os.path.exists('caf\\xe9/ta\"b\\t')\n",
    }
    await bench.begin({"expected_output_json": {"tests/test_calc.py::test_add": "PASSED"}}, fresh=True)
    await bench.agent(
        "touch tool; chmod +x tool; printf 'three\\r\\n' >> crlf.txt; echo data > x.dat",
        "ln -s calc.py link; rm old.bin; printf 'one\\ntwo\\n' > ends.txt",
        "python -c \"open('new.bin', 'wb').write(bytes(range(256)))\"",
        "mkdir caf\u00e9; touch 'caf\u00e9/ta\"b\t'",
    )
    reward = await bench.verdict()
    assert reward.outcome == 1.0, reward


async def test_a_file_that_is_tracked_though_ignored_counts(bench: Bench) -> None:
    bench.files |= {"ignored_too.txt": "first\n"}
    bench.recipe = f"{GIT} init -q && {GIT} add -A && {GIT} add -f ignored_too.txt && {GIT} commit -q -m first"
    await bench.begin(QUICK, fresh=True)
    await bench.agent("echo second > ignored_too.txt")
    assert (await bench.verdict()).report["changed_files"] == 1


async def test_a_folder_inside_a_repository_is_graded_by_itself(bench: Bench) -> None:
    bench.recipe = f"cd .. && {GIT} init -q && {GIT} add repo && {GIT} commit -q -m first"
    for more in ({}, {"patch_command": "git add -A && git diff --cached --binary"}):
        other = Bench(bench.folder / f"sub{len(more)}")
        other.folder.mkdir()
        other.recipe = bench.recipe
        await other.begin({**QUICK, **more}, fresh=True)
        await other.agent(FIX)
        reward = await other.verdict()
        await other.end()
        assert (reward.outcome, reward.report["patch"]["from"]) == (1.0, "patch_command" if more else "the tree")


async def test_what_the_recipe_left_untracked_is_not_the_agents(bench: Bench) -> None:
    bench.recipe += "; echo made > untracked.txt; echo also > ignored.txt"
    await bench.begin(QUICK, fresh=True)
    assert (await bench.verdict()).report["empty_generation"]
    await bench.agent(FIX, "echo changed > untracked.txt")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["changed_files"]) == (1.0, 2)


async def test_a_repository_in_the_session_folder_itself_does_not_count_polarqs_files(bench: Bench) -> None:
    bench.files = {}
    bench.recipe = (
        f"cd /; cd \"$OLDPWD/..\" && printf 'def add(a, b):\\n    return a - b\\n' > calc.py && {GIT} init -q"
    )
    await bench.begin(
        {"repo_dir": "/polar/session", "test_command": "echo PASSED x", "expected_output_json": {"x": "PASSED"}}
    )
    await bench.runtime.put_bytes(b"x", "/polar/session/.polarq/instruction.txt")
    await bench.runtime.exec("echo x > logs/agent/log; echo x > artifacts/a", cwd="/polar/session", timeout_s=60)
    assert (await bench.verdict()).report["empty_generation"]
    await bench.runtime.exec(FIX, cwd="/polar/session", timeout_s=60)
    assert (await bench.verdict()).outcome == 1.0


# --- E03: nothing tested


def task(config: dict[str, Any]) -> Task:
    return Task.load(
        {
            "instruction": "x",
            "agent": {"harness": "mini_swe_agent"},
            "evaluator": {"strategy": "test_on_output", "config": {"test_command": "true", **config}},
        }
    )


@pytest.mark.parametrize("empty", [{}, "{}", {"a": "SKIPPED"}, "[]", {" ": "PASSED"}, {"a": "OK"}, "{"])
def test_an_expectation_that_tests_nothing_is_refused_at_submit(empty: object) -> None:
    with pytest.raises(InvalidTask, match=r"evaluator: config\.expected_output_json"):
        task({"expected_output_json": empty})


def test_an_unknown_key_of_the_config_is_refused_at_submit() -> None:
    with pytest.raises(InvalidTask, match=r"config: unknown key 'test_timout', did you mean 'test_timeout'"):
        task({"expected_output_json": {"a": "PASSED"}, "test_timout": 3})
    with pytest.raises(InvalidTask, match="unknown key 'test_command'"):
        Task.load(
            {
                "instruction": "x",
                "agent": {"harness": "mini_swe_agent"},
                "evaluator": {"strategy": "session_completed", "config": {"test_command": "true"}},
            }
        )


def test_a_map_or_its_json_text_are_the_same() -> None:
    assert task({"expected_output_json": '{"a::b": "passed"}'}).evaluator is not None
    assert task({"expected_output_json": {"a::b": "PASSED"}}).evaluator is not None


@BOTH
@pytest.mark.parametrize(
    "command",
    [
        "true",
        f"{PYTEST} tests/nothing_here.py",
        f"{PYTEST} -k no_such_test",
        "no-such-program",
        "cat tests | no-such",
        "exit 3",
    ],
)
async def test_a_command_that_tests_nothing_gives_no_reward(bench: Bench, fresh: bool, command: str) -> None:
    await bench.begin({"test_command": command}, fresh=fresh)
    await bench.agent(FIX)
    with pytest.raises(
        EvaluatorFault, match=r"does not tell of 'tests/test_calc\.py::test_add' even on the tree as it was"
    ):
        await bench.verdict()


async def test_an_expected_test_that_never_was_is_no_reward(bench: Bench) -> None:
    await bench.begin({"expected_output_json": {**EXPECTED, "tests/test_calc.py::test_typo": "PASSED"}})
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match=r"'tests/test_calc.py::test_typo' even .* \(1 of 4 expected tests"):
        await bench.verdict()


@BOTH
async def test_removed_tests_are_failed_tests(bench: Bench, fresh: bool) -> None:
    await bench.begin(QUICK, fresh=fresh)
    await bench.agent(FIX, "rm tests/test_calc.py")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["removed_tests"]) == (0.0, ["tests/test_calc.py"])


@BOTH
@pytest.mark.parametrize(
    "breakage",
    [
        "echo 'def add(:' > calc.py",
        "rm calc.py",
        "printf 'import os\\nos._exit(0)\\n' > calc.py",
        "printf 'raise SystemExit(0)\\n' > calc.py",
        "printf 'import os, signal\\nos.kill(os.getpid(), signal.SIGSEGV)\\n' > calc.py",
    ],
)
async def test_code_that_keeps_the_tests_from_running_is_zero(bench: Bench, fresh: bool, breakage: str) -> None:
    await bench.begin(fresh=fresh)
    await bench.agent(breakage)
    reward = await bench.verdict()
    assert reward.outcome == 0.0, reward


async def test_a_test_that_the_agent_was_to_write_and_did_not_is_zero(bench: Bench) -> None:
    await bench.begin({"expected_output_json": {**EXPECTED, "tests/test_new.py::test_more": "PASSED"}})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["missing"]) == (0.0, ["tests/test_new.py::test_more"])
    await bench.agent("echo 'def test_more(): pass' > tests/test_new.py", FIX)
    assert (await bench.verdict()).outcome == 1.0


# --- E08: the agent's own scaffolding

SCAFFOLDING = (
    "echo 'import nosuchmodule' > conftest.py",
    "printf '[pytest]\\naddopts = -x --maxfail=1 -p no:terminal\\n' > pytest.ini",
    "touch tests/__init__.py",
    "printf 'def test_mine(): assert 0\\n' > test_mine.py; printf 'import nothing_at_all\\n' > tests/test_other.py",
)


@BOTH
async def test_an_honest_agents_scaffolding_does_not_take_part(bench: Bench, fresh: bool) -> None:
    await bench.begin(fresh=fresh)
    await bench.agent(FIX, *SCAFFOLDING)
    reward = await bench.verdict()
    assert reward.outcome == 1.0, reward
    assert sorted(reward.report["left_out"]) == ["conftest.py", "pytest.ini", "tests/__init__.py"]
    assert sorted(reward.report["own_tests_passed_by"]) == ["test_mine.py", "tests/test_other.py"]


@BOTH
async def test_a_task_may_want_the_agents_scaffolding(bench: Bench, fresh: bool) -> None:
    await bench.begin(
        {"keep_agent_scaffolding": True, "expected_output_json": {"tests/test_calc.py::test_add": "PASSED"}},
        fresh=fresh,
    )
    rule = "def pytest_collection_modifyitems(items): items[:] = [i for i in items if i.name == 'test_add']"
    await bench.agent(FIX, f'echo "{rule}" > conftest.py')
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["seen"]) == (1.0, 1)


EXCUSE = "printf 'def pytest_runtest_makereport(item, call):\\n    call.excinfo = None\\n'"
PLUGIN = (
    "mkdir plug-1.dist-info; printf 'Metadata-Version: 2.1\\nName: plug\\nVersion: 1\\n' > plug-1.dist-info/METADATA;"
    "printf '[pytest11]\\nplug = plug\\n' > plug-1.dist-info/entry_points.txt"
)


@BOTH
@pytest.mark.parametrize(
    "cheat",
    [
        "sed -i 's/== 3/== -1/; s/== len(p)/!= None/' tests/test_calc.py",
        "printf 'def pytest_runtest_makereport(item, call):\\n    call.excinfo = None\\n' > conftest.py",
        "printf 'print(\"PASSED tests/test_calc.py::test_add\")\\n' > pytest.py",
        "echo 'def add(a, b): return 3' > tests/calc.py; rm tests/calc.py; chmod +x calc.py",
        f"{EXCUSE} > conftest.py; echo conftest.py >> .gitignore",
        f"mkdir -p x; {EXCUSE} > x/conftest.py; {EXCUSE} > tests/conftest.py; echo 'tests/*' > tests/.gitignore",
        f"{EXCUSE} > plug.py; printf '[pytest]\\naddopts = -p plug\\n' > pytest.ini; echo pytest.ini >> .gitignore",
        f"{EXCUSE} > plug.py; printf '[pytest]\\naddopts = -p plug\\n' > tox.ini; echo tox.ini >> .gitignore",
        f"{EXCUSE} > plug.py; {PLUGIN}",
        f"{EXCUSE} > plug.py; {PLUGIN}; echo '*.dist-info' >> .gitignore",
    ],
)
async def test_changing_the_tests_instead_of_the_code_is_zero(bench: Bench, fresh: bool, cheat: str) -> None:
    await bench.begin(fresh=fresh)
    await bench.agent(cheat, "echo '# work' >> calc.py")
    assert (await bench.verdict()).outcome == 0.0


async def test_what_supports_the_tests_is_as_it_was(bench: Bench) -> None:
    bench.files |= {"tests/report.py": "import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n"}
    await bench.begin({"test_command": f"python tests/report.py {PYTEST} -rA"})
    lines = "".join(f"PASSED {test_id}\\n" for test_id in EXPECTED)
    await bench.agent(f'printf \'print("""{lines}""")\' > tests/report.py', "echo '# work' >> calc.py")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["left_out"]) == (0.0, ["tests/report.py"])


async def test_planted_byte_code_is_not_run(bench: Bench) -> None:
    bench.files |= {"tests/check.py": "import tests.judge\n", "tests/judge.py": CHECK, "tests/__init__.py": ""}
    await bench.begin({"test_command": "python -c 'import tests.judge'"})
    lines = "".join(f"PASSED {test_id}\n" for test_id in EXPECTED)
    await bench.runtime.put_bytes(f"print({lines!r})\n".encode(), f"{REPO}/liar.py")
    plant = (
        "import importlib.util, py_compile; py_compile.compile('liar.py', importlib.util.cache_from_source("
        "'tests/judge.py'), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    await bench.agent(f'python -c "{plant}"')
    assert (await bench.verdict()).outcome == 0.0


async def test_byte_code_that_came_with_the_task_stays(bench: Bench) -> None:
    bench.files |= {"tests/__pycache__/data.bin": "as it came\n"}
    bench.recipe = f"{GIT} init -q && {GIT} add -A -f && {GIT} commit -q -m first"
    await bench.begin({"test_command": "grep -q came tests/__pycache__/data.bin && python tests/check.py"})
    await bench.agent(FIX, "echo other > tests/__pycache__/data.bin")
    assert (await bench.verdict()).outcome == 1.0


async def test_excluded_tests_are_as_they_were_where_the_agent_worked(bench: Bench) -> None:
    await bench.begin({**QUICK, "exclude_patterns": ["tests"]})
    lines = "".join(f"PASSED {test_id}\\n" for test_id in EXPECTED)
    await bench.agent(f'printf \'print("""{lines}""")\' > tests/check.py', "echo '# work' >> calc.py")
    assert (await bench.verdict()).outcome == 0.0


async def test_what_the_task_excludes_and_was_there_is_as_it_was(bench: Bench) -> None:
    bench.files["run.sh"] = "python tests/check.py\n"
    await bench.begin({"test_command": "sh run.sh", "exclude_patterns": ["*.sh"]})
    await bench.agent("echo true > run.sh; echo true > more.sh", FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["left_out"]) == (1.0, ["run.sh"])


async def test_a_package_that_is_made_of_named_tests_unseen_takes_no_part(bench: Bench) -> None:
    bench.files |= {
        f"suite/{path[6:]}": CHECK.replace("tests/", "suite/") for path in FILES if path.startswith("tests/")
    }
    expected = {test_id.replace("tests/", "suite/"): status for test_id, status in EXPECTED.items()}
    command = "PYTHONPATH=. python -c 'import suite.check'"
    await bench.begin({"test_command": command, "expected_output_json": expected})
    await bench.agent("echo 'raise SystemExit' > suite/__init__.py; echo __init__.py >> .gitignore", FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["left_out"]) == (1.0, ["suite/__init__.py"])


PYPROJECT = '[project]\nname = "calc"\nversion = "1"\n'


@BOTH
async def test_a_shared_configuration_file_counts_unless_its_pytest_section_changed(bench: Bench, fresh: bool) -> None:
    bench.files |= {"pyproject.toml": PYPROJECT, "setup.cfg": "[metadata]\nname = calc\n"}
    await bench.begin(fresh=fresh)
    await bench.agent(
        FIX,
        'sed -i \'s/"1"/"2"/\' pyproject.toml',
        "printf '[tool:pytest]\\naddopts = --no-such-option\\n' >> setup.cfg",
    )
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["left_out"], reward.report["changed_files"]) == (1.0, ["setup.cfg"], 2)


async def test_a_hidden_test_wins_over_the_agents_file_of_that_name(bench: Bench) -> None:
    hidden = {"tests/test_hidden.py::test_h": "PASSED"}
    bench.eval_recipe = (
        f"{bench.recipe}; printf 'from calc import add\\ndef test_h(): assert add(2, 2) == 4\\n' > tests/test_hidden.py"
    )
    await bench.begin({"expected_output_json": hidden}, fresh=True)
    await bench.agent("printf 'def test_h(): pass\\n' > tests/test_hidden.py; echo '# work' >> calc.py")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["left_out"]) == (0.0, ["tests/test_hidden.py"])
    await bench.agent(FIX)
    assert (await bench.verdict()).outcome == 1.0


# --- patches


@BOTH
async def test_polars_patch_command_finds_committed_work_too(bench: Bench, fresh: bool) -> None:
    await bench.begin({**QUICK, "patch_command": "git add -A && git diff --cached --binary"}, fresh=fresh)
    await bench.agent(FIX, f"{GIT} commit -q -a -m done", "echo more > notes.txt", *SCAFFOLDING)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["patch"]["from"]) == (1.0, "patch_command"), reward
    log = await bench.runtime.exec("git log --oneline | wc -l", cwd=REPO, timeout_s=60)
    assert log.stdout_text.strip() == "2"


async def test_a_patch_can_come_from_elsewhere(bench: Bench) -> None:
    await bench.begin({**QUICK, "patch_command": 'cat "$ARTIFACTS_DIR/answer.diff"'}, fresh=True)
    diff = (
        "--- a/calc.py\\n+++ b/calc.py\\n@@ -1,2 +1,2 @@\\n def add(a, b):\\n-    return a - b\\n+    return a + b\\n"
    )
    assert (await bench.verdict()).report["empty_generation"]
    await bench.agent(f"printf -- '{diff}' > ../artifacts/answer.diff")
    assert (await bench.verdict()).outcome == 1.0


@pytest.mark.parametrize("command", ["exit 9", "echo this is no patch", "true"])
async def test_where_the_patch_command_finds_nothing_the_tree_counts(bench: Bench, command: str) -> None:
    await bench.begin({**QUICK, "patch_command": command}, fresh=True)
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["patch"]["from"]) == (1.0, "the tree")
    assert reward.report["patch_command"].startswith("patch_command: ")


@BOTH
async def test_excluded_paths_are_no_work(bench: Bench, fresh: bool) -> None:
    await bench.begin({**QUICK, "exclude_patterns": ["node_modules", "*.log", "docs/api"]}, fresh=fresh)
    await bench.agent("mkdir -p node_modules/x docs/api; touch node_modules/x/y a.log docs/api/z")
    assert (await bench.verdict()).report["empty_generation"]


async def test_a_fresh_tree_that_is_another_is_a_fault(bench: Bench) -> None:
    bench.eval_recipe = "echo 'something else' > calc.py"
    await bench.begin(QUICK, fresh=True)
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="does not apply to the fresh sandbox"):
        await bench.verdict()


@BOTH
async def test_an_agent_that_destroys_the_record_gets_zero(bench: Bench, fresh: bool) -> None:
    await bench.begin(QUICK, fresh=fresh)
    await bench.agent(FIX, "cd .. && rm -rf .polarq repo")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["repository_lost"]) == (0.0, True)


async def test_a_missing_folder_is_said_before_the_agent_runs(bench: Bench) -> None:
    with pytest.raises(EvaluatorFault, match=r"repo_dir: there is no folder '/no/such/folder'"):
        await bench.begin({"repo_dir": "/no/such/folder"})


async def test_without_git_only_the_agents_own_sandbox_can_be_graded(bench: Bench) -> None:
    bench.recipe = (
        'mkdir ../bin; for p in bash cat rm env python pwd dirname; do ln -s "$(command -v $p)" ../bin/$p; done'
    )
    await bench.begin(QUICK, env={"PATH": f"{bench.session}/bin"})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["changes"]) == (1.0, "unknown: there is no git in the sandbox")
    other = Bench(bench.folder / "other")
    other.folder.mkdir()
    other.recipe = bench.recipe
    await other.begin(env={"PATH": f"{other.session}/bin"}, fresh=True)
    with pytest.raises(EvaluatorFault, match="git is needed in the sandbox"):
        await other.verdict()
    await other.end()


# --- the run


async def test_code_that_hangs_is_zero(bench: Bench) -> None:
    await bench.begin({"test_timeout": 3})
    await bench.agent("printf 'import time\\ntime.sleep(1000)\\n' > calc.py")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["test_timeout"], reward.report["resolved"]) == (0.0, True, False)


async def test_code_that_hangs_after_the_tests_is_zero(bench: Bench) -> None:
    await bench.begin({"test_timeout": 5, "test_command": f"{PYTEST} -rA"})
    await bench.agent(
        FIX, "printf 'import threading, time\\nthreading.Thread(target=time.sleep, args=[1000]).start()\\n' >> calc.py"
    )
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["test_timeout"], reward.report["as_expected"]) == (0.0, True, 3)


async def test_a_budget_that_others_used_up_is_no_zero(bench: Bench) -> None:
    bench.eval_recipe = f"sleep 2; {bench.recipe}"
    await bench.begin({"test_command": "sleep 1000"}, fresh=True)
    await bench.agent(FIX)
    with pytest.raises(EvaluationTimedOut, match=r"timeouts\.evaluate_s"):
        await bench.verdict(timeout_s=3.5)


async def test_tests_that_were_killed_from_outside_are_a_fault(bench: Bench) -> None:
    await bench.begin({"test_command": "kill -9 $$"})
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="killed from outside"):
        await bench.verdict()


async def test_a_service_that_the_agent_left_is_alive_for_the_tests(bench: Bench) -> None:
    test = (
        "import pathlib\n"
        "def test_up():\n"
        "    pid = pathlib.Path('pid').read_text().strip()\n"
        "    assert pathlib.Path(f'/proc/{pid}').exists()\n"
    )
    bench.files |= {"tests/test_calc.py": test, ".gitignore": ""}
    await bench.begin({"expected_output_json": {"tests/test_calc.py::test_up": "PASSED"}})
    await bench.agent("setsid sleep 1000 & echo $! > pid")
    assert (await bench.verdict()).outcome == 1.0


async def test_noise_of_the_shell_disturbs_nothing(bench: Bench, tmp_path: Any) -> None:
    (tmp_path / "noise.sh").write_text("echo motd one; echo motd two >&2\n")
    bench.env = {"BASH_ENV": str(tmp_path / "noise.sh")}
    await bench.begin(QUICK, fresh=True)
    await bench.agent(FIX)
    assert (await bench.verdict()).outcome == 1.0


@pytest.mark.parametrize(
    ("command", "read_from"),
    [
        (f"{PYTEST} -q", "report and output"),
        (f"{PYTEST} -rA -p no:junitxml", "output"),
        (f"{PYTEST} -v --color=yes -n2", "report and output"),
        ("env -u PYTEST_ADDOPTS python -m pytest -rA", "output"),
        (f"{PYTEST} -q --junitxml=mine.xml", "report and output"),
    ],
)
async def test_exact_ids_are_read_from_whatever_there_is(bench: Bench, command: str, read_from: str) -> None:
    await bench.begin({"test_command": command})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert reward.outcome == 1.0, reward
    if "mine.xml" not in command:
        assert reward.report["read_from"] == read_from


async def test_a_named_report_is_believed_and_an_old_one_is_not(bench: Bench) -> None:
    bench.files |= {".gitignore": "*.xml\n"}
    await bench.begin({"test_command": f"{PYTEST} -q --junitxml=out.xml", "report_path": "out.xml"})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["read_from"]) == (1.0, "report_path")
    await bench.agent("printf 'import os\\nos._exit(0)\\n' > calc.py")
    reward = await bench.verdict()
    assert reward.outcome == 0.0


async def test_the_tasks_own_pytest_options_stay(bench: Bench) -> None:
    await bench.begin({"test_command": "python -m pytest"}, env={"PYTEST_ADDOPTS": "-p no:cacheprovider -k 'test_add'"})
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="test_p"):
        await bench.verdict()


@pytest.mark.parametrize("short", [{"test_add": "PASSED"}, {"tests/test_calc.py::test_p[2": "PASSED"}])
async def test_short_ids_of_old_data_sets_are_matched_and_told(bench: Bench, short: dict[str, str]) -> None:
    await bench.begin({"expected_output_json": short})
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert reward.outcome == 1.0
    assert list(reward.report["matched_by"]) == list(short)


async def test_hundreds_of_tests_give_a_small_report(bench: Bench) -> None:
    many = {f"tests/test_calc.py::test_many[{'x' * 80}-{n}]": "PASSED" for n in range(400)}
    bench.files |= {
        "tests/test_calc.py": "import pytest\nfrom calc import add\n"
        f"@pytest.mark.parametrize('n', [f\"{'x' * 80}-{{n}}\" for n in range(400)])\n"
        "def test_many(n): assert add(1, 1) == 2\n"
    }
    await bench.begin({"expected_output_json": many})
    await bench.agent("echo '# work' >> calc.py")
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["otherwise_count"], len(reward.report["otherwise"])) == (0.0, 400, 50)
    await bench.agent(FIX)
    assert (await bench.verdict()).outcome == 1.0


def test_an_unknown_evaluator_is_answered_with_what_is_there() -> None:
    with pytest.raises(
        UnknownPlugin, match=r"evaluator 'test_on_outpt' is not installed here \(installed: .*test_on_output"
    ):
        create_evaluator(EvaluatorSpec(strategy="test_on_outpt"), [])
    with pytest.raises(UnknownPlugin, match="allowed_modules"):
        create_evaluator(EvaluatorSpec(strategy="somewhere.else:Evaluator"), [])
