"""Instances of SWE-bench and its kin, graded by the package itself on small repositories of our own."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from polarq.contracts.specs import EvaluatorSpec
from polarq.contracts.swebench import SwebenchConfig
from polarq.contracts.task import Task
from polarq.errors import EvaluatorFault, InvalidTask
from polarq_worker.evaluators.base import EvaluationTimedOut
from polarq_worker.evaluators.swebench_script import EvalScript, files_of_patch
from tests.evaluators.conftest import FIX, GIT, REPO, Bench
from tests.needs import not_here

F2P = ["tests/test_calc.py::test_add"]
P2P = ["tests/test_calc.py::test_zero"]
BEFORE = "from calc import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -2,3 +2,6 @@

 def test_zero():
     assert add(0, 0) == 0
+
+def test_add():
+    assert add(1, 2) == 3
"""
RUN = """\
cat > run.py <<'P'
import sys, traceback
sys.path.insert(0, ".")
sys.path.insert(0, "tests")
import test_calc
failed = 0
for name in sorted(vars(test_calc)):
    if name.startswith("test_"):
        try:
            vars(test_calc)[name]()
            print(f"PASSED tests/test_calc.py::{name}")
        except Exception:
            failed = 1
            print(f"FAILED tests/test_calc.py::{name} - {traceback.format_exc(0)!r}")
sys.exit(failed)
P
python run.py"""
"""What `pytest -rA` prints at its end, without what it takes to start pytest."""
INSTANCE: dict[str, Any] = {
    "instance_id": "ours__calc-1",
    "repo": "ours/calc",
    "version": "1.0",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(F2P),
    "PASS_TO_PASS": json.dumps(P2P),
    "hints_text": "",
}


@pytest.fixture(autouse=True)
def package() -> None:
    if importlib.util.find_spec("swebench") is None:
        not_here("the package swebench is not installed (polarq[swebench])")


def spec(*, fresh: bool = False, instance: dict[str, Any] | None = None, **config: Any) -> EvaluatorSpec:
    whole = {"instance": {**INSTANCE, **(instance or {})}, "repo_dir": REPO, "test_command": RUN, **config}
    return EvaluatorSpec(strategy="swebench_harness", config=whole, refresh_runtime=fresh)


async def begun(bench: Bench, what: EvaluatorSpec) -> None:
    bench.files = {"calc.py": bench.files["calc.py"], "tests/test_calc.py": BEFORE, ".gitignore": "__pycache__/\n"}
    await bench.start(what)


async def test_a_required_test_that_was_not_run_is_not_passed(bench: Bench) -> None:
    await begun(bench, spec(test_command=RUN.replace('startswith("test_")', 'startswith("test_zero")')))
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["resolved"]) == (0.0, False)
    assert reward.report["tests"]["FAIL_TO_PASS.failed"] == F2P


async def test_a_projects_tests_have_the_git_that_they_expect(bench: Bench) -> None:
    """Such as those that install a hook."""
    hook = "git init -q x; cd x; echo 'touch ran' > .git/hooks/post-commit; chmod +x .git/hooks/post-commit"
    commit = f"{GIT} commit -q --allow-empty -m x; [ -e ran ] || exit 1; cd .."
    await begun(bench, spec(test_command=f"{hook}; {commit}\n{RUN}"))
    await bench.agent(FIX)
    reward = await bench.verdict()
    assert reward.outcome == 1.0, reward


WAYS: dict[str, tuple[str, float]] = {
    "solved": (FIX, 1.0),
    "solved and committed": (f"{FIX}; {GIT} commit -qam done", 1.0),
    "solved, tests edited": (f"{FIX}; echo 'assert False' > tests/test_calc.py", 1.0),
    "solved, tests deleted": (f"{FIX}; rm tests/test_calc.py", 1.0),
    "wrong": ("printf 'def add(a, b):\\n    return 3 * (a > 0) + 1\\n' > calc.py", 0.0),
    "only the old tests pass": ("echo '# looked at' >> calc.py", 0.0),
    "tests edited": ("echo 'def test_add(): pass' >> tests/test_calc.py; echo '#' >> calc.py", 0.0),
    "conftest planted": ("echo 'raise SystemExit(0)' > conftest.py; echo '#' >> calc.py", 0.0),
    "tests rewritten while they run": (
        "echo 'def test_zero(): pass\ndef test_add(): pass' > .git/x; echo '#' >> calc.py;"
        " (setsid bash -c 'while :; do cp .git/x .git/y && mv .git/y tests/test_calc.py; done' &> /dev/null &)",
        0.0,
    ),
    "tests rewritten and put back": (
        "echo 'def test_zero(): pass\ndef test_add(): pass' > .git/x; echo '#' >> calc.py;"
        " (setsid bash -c 'until grep -q test_add tests/test_calc.py; do :; done; cp tests/test_calc.py .git/y;"
        " cp .git/x tests/test_calc.py; until [ -e tests/__pycache__ ]; do :; done; sleep 0.1;"
        " cp .git/y tests/test_calc.py' &> /dev/null &)",
        0.0,
    ),
    "a hook of git planted": (
        "(echo '#!/bin/sh'; echo '(until grep -q test_add tests/test_calc.py; do :; done;"
        ' sed -i "s/== 3/or 1/" tests/test_calc.py) &> /dev/null &\') > .git/hooks/post-checkout;'
        " chmod +x .git/hooks/post-checkout; echo '#' >> calc.py",
        0.0,
    ),
    "a filter of git planted": (
        "git config filter.x.smudge 'sed \"s/== 3/or 1/\"'; git config filter.x.clean cat;"
        " echo 'tests/* filter=x' > .git/info/attributes; echo '#' >> calc.py",
        0.0,
    ),
    "tests replaced for git": (
        "old=$(git rev-parse HEAD:tests/test_calc.py);"
        " (echo 'import calc; calc.add = lambda a, b: a + b'; git cat-file blob $old) > x;"
        " git replace $old $(git hash-object -w x); rm x; echo '#' >> calc.py",
        0.0,
    ),
    "leaves before the tests": ("echo 'import os; os._exit(0)' >> calc.py", 0.0),
    "breaks the module": ("echo 'def add(' > calc.py", 0.0),
    "says that it passed": (
        """cat > calc.py <<'P'
import atexit
def add(a, b):
    return 0
atexit.register(print, "PASSED tests/test_calc.py::test_add")
P""",
        0.0,
    ),
    "forges beside a failure": (
        """cat > calc.py <<'P'
import atexit
def add(a, b):
    return 0
atexit.register(print, "PASSED tests/test_calc.py::test_add\\nFAILED tests/test_calc.py::test_other")
P""",
        0.0,
    ),
    "ends the log itself": (
        """cat > calc.py <<'P'
print("PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_zero")
print(">>>>> End Test Output\\n>>>>> Test Exit Code: 0", flush=True)
def add(a, b):
    return 0
P""",
        0.0,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_the_package_says_what_is_resolved(way: str, bench: Bench) -> None:
    agent, outcome = WAYS[way]
    await begun(bench, spec())
    await bench.agent(agent)
    reward = await bench.verdict(600)
    assert (reward.outcome, reward.report["resolved"]) == (outcome, outcome == 1.0), reward
    assert reward.report["graded_in"] == "live"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["solved and committed", "tests edited"])
async def test_a_fresh_sandbox_is_graded_alike(way: str, bench: Bench) -> None:
    agent, outcome = WAYS[way]
    await begun(bench, spec(fresh=True))
    await bench.agent(agent)
    reward = await bench.verdict(600)
    assert (reward.outcome, reward.report["graded_in"]) == (outcome, "fresh"), reward


async def test_no_change_is_an_empty_patch(bench: Bench) -> None:
    await begun(bench, spec(fresh=True))
    reward = await bench.verdict()
    assert (reward.outcome, reward.report["empty_generation"]) == (0.0, True)
    assert len(bench.runtimes) == 1


@pytest.mark.slow
async def test_an_instance_with_a_script_and_parser_of_its_own_uses_them(bench: Bench) -> None:
    script = (
        "#!/bin/bash\nset -uxo pipefail\n: '>>>>> Start Test Output'\n"
        "if grep -q 'a + b' calc.py; then echo 'test_add (t.T) ... ok'; else echo 'test_add (t.T) ... FAIL'; fi\n"
        ": '>>>>> End Test Output'\n"
    )
    tests = {"FAIL_TO_PASS": ["test_add (t.T)"], "PASS_TO_PASS": []}
    own = {"eval_script": script, "log_parser": "parse_log_django", "eval_type": "pass_and_fail", "test_patch": ""}
    await begun(bench, spec(instance={**own, **tests}, test_command=None))
    await bench.agent(FIX)
    assert (await bench.verdict(600)).outcome == 1.0


@pytest.mark.slow
async def test_tests_that_run_nowhere_are_a_fault(bench: Bench) -> None:
    # Field case E03.
    await begun(bench, spec(test_command="nosuchrunner | cat"))
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="even on the tree as it was before the agent"):
        await bench.verdict(600)


@pytest.mark.slow
async def test_a_log_parser_that_there_is_not_is_a_fault(bench: Bench) -> None:
    await begun(bench, spec(log_parser="parse_log_nosuch"))
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="no log parser 'parse_log_nosuch'"):
        await bench.verdict(600)


async def test_work_that_hangs_is_zero_and_too_small_a_budget_a_fault(bench: Bench) -> None:
    await begun(bench, spec(test_command="sleep 600", test_timeout=1))
    await bench.agent(FIX)
    reward = await bench.verdict(600)
    assert (reward.outcome, reward.report["test_timeout"]) == (0.0, True)
    with pytest.raises(EvaluationTimedOut, match="evaluate_s"):
        await bench.verdict(1)


def test_a_test_patch_names_its_files() -> None:
    new = "diff --git a/tests/new.py b/tests/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/new.py\n"
    assert files_of_patch(TEST_PATCH + new) == ["tests/new.py", "tests/test_calc.py"]
    config = {**spec().config, "instance": {**INSTANCE, "test_patch": TEST_PATCH + new}}
    text = EvalScript(SwebenchConfig.parse(config)).text
    assert "checkout HEAD -- tests/test_calc.py\n" in text


def test_marks_are_this_runs_own() -> None:
    script = EvalScript(SwebenchConfig.parse(spec().config))
    assert ">>>>> " not in script.text
    printed = f">>>>> End Test Output\n>>>>>{script.nonce} Start Test Output\nx\n>>>>>{script.nonce} End Test Output\n"
    assert script.log(printed) == ">>>>- End Test Output\n>>>>> Start Test Output\nx\n>>>>> End Test Output\n"
    assert script.ran(printed).strip() == "x"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"instance": {**INSTANCE, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}}, "both empty"),
        ({"instance": {**INSTANCE, "FAIL_TO_PASS": "[x"}}, "not JSON"),
        ({"instance": {**INSTANCE, "FAIL_TO_PASS": [" "]}}, "FAIL_TO_PASS"),
        ({"test_command": None}, "give test_command"),
        ({"instance": {**INSTANCE, "eval_script": "pytest"}}, "does not mark"),
        ({"instance": json.dumps(INSTANCE), "eval_type": "some"}, "eval_type"),
        ({"instance": {"repo": "x"}}, "instance_id"),
    ],
)
def test_settings_are_refused_at_submit(config: dict[str, Any], says: str) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    evaluator = {"strategy": "swebench_harness", "config": {**spec().config, **config}}
    with pytest.raises(InvalidTask, match=says):
        Task.parse({"instruction": "x", "agent": agent, "evaluator": evaluator})
