"""Rows as data sets have them, and logs as test runners write them, read by the package's own parsers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from polarq.contracts.swebench import SwebenchConfig, SweInstance
from polarq.errors import EvaluatorFault, InvalidTask
from polarq_worker.evaluators.checks import swebench_check
from polarq_worker.evaluators.swebench_script import END, START, EvalScript
from tests.evaluators.conftest import FIX, Bench
from tests.evaluators.test_swebench_harness import TEST_PATCH, begun, spec
from tests.needs import not_here

SWE_BENCH = {
    "repo": "django/django",
    "instance_id": "django__django-11099",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "patch": "diff --git a/x b/x\n",
    "test_patch": TEST_PATCH,
    "problem_statement": "UsernameValidator allows trailing newline",
    "hints_text": "",
    "created_at": "2019-03-20T03:46:18Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": '["test_help_text (auth_tests.test_validators.UserAttributeSimilarityValidatorTest)"]',
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
    "difficulty": "<15 min fix",
}
SWE_BENCH_5 = {
    **SWE_BENCH,
    "eval_script": f"#!/bin/bash\nset -uxo pipefail\n: '{START}'\n./tests/runtests.py\n: '{END}'\n",
    "log_parser": "parse_log_django",
    "eval_type": "pass_and_fail",
}
SWE_GYM = {
    "instance_id": "getmoto__moto-5752",
    "repo": "getmoto/moto",
    "base_commit": "b2300f1eae1323e3e8bc45f97e530ce129dff12e",
    "version": 4.0,
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": ["tests/test_ssm/test_ssm_boto3.py::test_describe_parameters_tags"],
    "PASS_TO_PASS": ["tests/test_ssm/test_ssm_boto3.py::test_put_parameter[a b]"],
}
MULTI_SWE = {
    "org": "cli",
    "repo": "cli",
    "number": 10388,
    "base": {"label": "cli:trunk", "ref": "trunk", "sha": "0f4dd0a"},
    "fix_patch": "",
    "test_patch": TEST_PATCH,
    "f2p_tests": {"TestNewCmdView": {"run": "PASS", "test": "FAIL", "fix": "PASS"}},
    "s2p_tests": {"TestSkipped": {"run": "PASS", "test": "SKIP", "fix": "PASS"}},
    "n2p_tests": {"TestNewCmdView/new": {"run": "NONE", "test": "NONE", "fix": "PASS"}},
    "p2p_tests": {"TestList": {"run": "PASS", "test": "PASS", "fix": "PASS"}},
}


def config(row: dict[str, Any], **more: Any) -> SwebenchConfig:
    return SwebenchConfig.parse({"instance": row, **more})


def test_rows_of_each_data_set_are_read() -> None:
    old = config(SWE_BENCH, test_command="./tests/runtests.py", log_parser="parse_log_django")
    assert old.instance.FAIL_TO_PASS == ["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]
    assert "git -c safe.directory='*' checkout d26b2424437dabeeca94d7900b37d2df4410da0c -- " in EvalScript(old).text
    new = config(SWE_BENCH_5)
    assert (new.parser, new.kind) == ("parse_log_django", "pass_and_fail")
    assert "./tests/runtests.py" in EvalScript(new).text
    gym = config(SWE_GYM, test_command="pytest -rA")
    assert (gym.parser, gym.instance.version) == ("parse_log_pytest", "4.0")
    multi = config(MULTI_SWE, test_command="go test -v ./...", log_parser="parse_log_gotest").instance
    assert (multi.instance_id, multi.repo, multi.base_commit) == ("cli__cli-10388", "cli/cli", "0f4dd0a")
    assert multi.FAIL_TO_PASS == ["TestNewCmdView", "TestSkipped", "TestNewCmdView/new"]
    assert multi.PASS_TO_PASS == ["TestList"]
    assert json.loads(json.dumps(multi.model_dump()))["number"] == 10388
    assert SweInstance.model_validate(multi.model_dump()).FAIL_TO_PASS == multi.FAIL_TO_PASS


@pytest.mark.parametrize("row", [{**MULTI_SWE, "f2p_tests": {}, "s2p_tests": None, "n2p_tests": {}, "p2p_tests": {}}])
def test_a_row_whose_maps_name_no_test_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InvalidTask, match="both empty"):
        config(row, test_command="x")


PYTEST = """\
============================= test session starts ==============================
collected 3 items

tests/test_a.py .F.                                                      [100%]
==================================== PASSES ====================================
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::TestIt::test_two[x-1]
{last} tests/test_a.py::test_three{why}
"""
DJANGO = """\
Creating test database for alias 'default'...
test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests) ... ok
test_help_text (auth_tests.test_validators.UserTest) ... {last}
test_skipped (auth_tests.test_validators.UserTest) ... skipped 'no crypt'

----------------------------------------------------------------------
Ran 3 tests in 0.025s
"""
SYMPY = """\
============================= test process starts ==============================
executable:         /opt/miniconda3/bin/python  (3.9.19-final-0) [CPython]
sympy/core/tests/test_basic.py[2]
test_structure ok
test_equality {last}
test_matches_basic ok                                                        [{end}]
"""
GO = """\
=== RUN   TestList
--- PASS: TestList (0.00s)
=== RUN   TestNewCmdView
    --- PASS: TestNewCmdView/new (0.00s)
--- {last}: TestNewCmdView (0.01s)
ok  	github.com/cli/cli/v2/pkg/cmd	0.015s
"""
CARGO = """\
running 2 tests
test io::reads_all ... ok
test io::writes_all ... {last}

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out
"""
JEST = """\
PASS packages/core/test.js
  sums
    \u2713 adds two numbers (3 ms)
    {last} adds three numbers (1 ms)

Tests:       2 total
"""
PHPUNIT = """\
PHPUnit 10.5.11 by Sebastian Bergmann and contributors.

Builder (Illuminate\\Tests\\Builder)
 \u2714 Basic select
 {last} Basic table wrapping
"""
TAP = "TAP version 13\nok 1 reads\n{last} 2 writes\n# tests 2\n"
MAVEN = """\
+ mvnd test -B -pl gson -Dtest=com.google.gson.JsonTest#testA
[INFO] BUILD SUCCESS
+ mvnd test -B -pl gson -Dtest=com.google.gson.JsonTest#testB
[INFO] BUILD {last}
"""
LOGS: dict[str, tuple[str, list[str], list[str], dict[str, str], dict[str, str]]] = {
    "parse_log_pytest": (
        PYTEST, ["tests/test_a.py::test_three"], ["tests/test_a.py::TestIt::test_two[x-1]"],
        {"last": "PASSED", "why": ""}, {"last": "FAILED", "why": " - AssertionError: assert 1 == 2"},
    ),
    "parse_log_pytest_v2": (
        PYTEST.replace("PASSED", "\x1b[32mPASSED\x1b[0m"), ["tests/test_a.py::test_three"],
        ["tests/test_a.py::test_one"], {"last": "PASSED", "why": ""}, {"last": "ERROR", "why": " - ImportError: x"},
    ),
    "parse_log_django": (
        DJANGO, ["test_help_text (auth_tests.test_validators.UserTest)"],
        ["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"], {"last": "ok"}, {"last": "FAIL"},
    ),
    "parse_log_sympy": (
        SYMPY, ["test_equality"], ["test_structure"], {"last": "ok", "end": "OK"}, {"last": "F", "end": "FAIL"},
    ),
    "parse_log_gotest": (
        GO, ["TestNewCmdView"], ["TestList", "TestNewCmdView/new"], {"last": "PASS"}, {"last": "FAIL"},
    ),
    "parse_log_cargo": (CARGO, ["io::writes_all"], ["io::reads_all"], {"last": "ok"}, {"last": "FAILED"}),
    "parse_log_jest": (JEST, ["adds three numbers"], ["adds two numbers"], {"last": "\u2713"}, {"last": "\u2715"}),
    "parse_log_phpunit": (
        PHPUNIT, ["Builder > Basic table wrapping"], ["Builder > Basic select"], {"last": "\u2714"}, {"last": "\u2718"},
    ),
    "parse_log_tap": (TAP, ["writes"], ["reads"], {"last": "ok"}, {"last": "not ok"}),
    "parse_log_maven": (
        MAVEN, ["com.google.gson.JsonTest#testB"], ["com.google.gson.JsonTest#testA"], {"last": "SUCCESS"},
        {"last": "FAILURE"},
    ),
}  # fmt: skip
"""parser -> (log, FAIL_TO_PASS, PASS_TO_PASS, how it ends solved, how it ends otherwise)"""
EACH = """import contextlib, json, runpy, sys
check = runpy.run_path(sys.argv[1])["check"]
with contextlib.redirect_stdout(sys.stderr):
    found = [check(request) for request in json.load(sys.stdin)]
json.dump(found, sys.stdout)"""


def requests() -> list[dict[str, Any]]:
    """Each log solved, with its last test failed, and cut before it."""
    found = []
    for parser, (log, fails, passes, solved, failed) in LOGS.items():
        instance = {
            "instance_id": "x-1", "repo": "x/x", "version": "1", "FAIL_TO_PASS": fails, "PASS_TO_PASS": passes,
            "log_parser": parser, "eval_type": "pass_and_fail",
        }  # fmt: skip
        cut = log[: log.index("{last}")].rpartition("\n")[0]
        texts = (log.format(**solved), log.format(**failed), cut.replace("{why}", ""))
        found += [{"instance": instance, "patch": "x", "log": f"{START}\n{text}\n{END}\n"} for text in texts]
    return found


@pytest.fixture
def package() -> None:
    if importlib.util.find_spec("swebench") is None:
        not_here("the package swebench is not installed (polarq[swebench])")


@pytest.mark.usefixtures("package")
def test_logs_of_each_kind_of_runner_are_graded_by_the_packages_parsers() -> None:
    run = [sys.executable, "-c", EACH, swebench_check.__file__]
    said = subprocess.run(run, input=json.dumps(requests()), capture_output=True, text=True, check=True, timeout=120)
    resolved = [report.get("resolved") for report in json.loads(said.stdout)]
    assert dict(zip(LOGS, zip(*[iter(resolved)] * 3, strict=True), strict=True)) == dict.fromkeys(
        LOGS, (True, False, False)
    )


NEW_FILE = (
    "printf 'def plus(a, b):\\n    return a + b\\n' > helper.py; printf 'from helper import plus as add\\n' > calc.py"
)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
async def test_work_in_a_file_that_was_never_added_and_a_test_runners_settings_beside_it(bench: Bench) -> None:
    await begun(bench, spec(fresh=True, exclude_patterns=["*.log"]))
    await bench.agent(NEW_FILE, "echo x > a.log; printf '[pytest]\\naddopts = --nosuch\\n' > tox.ini")
    reward = await bench.verdict(600)
    assert (reward.outcome, reward.report["changed_files"]) == (1.0, 2), reward
    assert sorted(reward.report["left_out"]) == ["tox.ini"]


@pytest.mark.usefixtures("package")
async def test_a_patch_that_does_not_apply_to_the_fresh_tree_is_a_fault(bench: Bench) -> None:
    bench.eval_recipe = "echo 'something else' > calc.py"
    await begun(bench, spec(fresh=True))
    await bench.agent(FIX)
    with pytest.raises(EvaluatorFault, match="does not apply to the fresh sandbox"):
        await bench.verdict()
