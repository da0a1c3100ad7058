"""Rows of data sets and lines of results: what is made of them, and what is refused in one line."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from examples import many
from examples.offline_sft import check, generate
from examples.swe_gym import run as swe_gym
from examples.swebench_verified import known, local
from examples.swebench_verified.instances import LOCAL_TESTBED, fields_of, image_of, read_rows
from examples.swebench_verified.run import REGISTRY, SEPARATOR
from polarq.contracts.swebench import SwebenchConfig
from polarq.contracts.task import Task
from polarq.errors import InvalidInput
from polarq_worker.evaluators.checks.swebench_check import skip_init

from .rig import EXAMPLES

PATCH = """\
diff --git a/tests/forms_tests/test_urls.py b/tests/forms_tests/test_urls.py
--- a/tests/forms_tests/test_urls.py
+++ b/tests/forms_tests/test_urls.py
@@ -1 +1,2 @@
 a
+b
diff --git a/tests/data.json b/tests/data.json
--- a/tests/data.json
+++ b/tests/data.json
@@ -1 +1,2 @@
 a
+b
diff --git a/tests/old.py b/tests/old.py
deleted file mode 100644
--- a/tests/old.py
+++ /dev/null
@@ -1 +0,0 @@
-a
"""
ROW: dict[str, Any] = {
    "repo": "django/django",
    "instance_id": "django__django-11099",
    "base_commit": "d26b2424437dabeeca94d7900b37d2df4410da0c",
    "patch": "the solution",
    "test_patch": PATCH,
    "problem_statement": "URLs cost ${2} too much",
    "hints_text": "a hint",
    "created_at": "2019-03-20T03:46:18Z",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_a (forms_tests.test_urls.Urls)"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
    "difficulty": "<15 min fix",
}
"""The columns of SWE-bench Verified, before swebench 5."""


def template(example: str) -> dict[str, Any]:
    asked = argparse.Namespace(task=EXAMPLES / example / "task.yaml", run_id="r", num_samples=None)
    return many.template(asked)


def task(**more: Any) -> Task:
    row = {**ROW, **more}
    image = image_of(row, REGISTRY, SEPARATOR)
    return Task.load(fields_of(row, template("swebench_verified"), image, known.of_swebench))


def config(made: Task) -> SwebenchConfig:
    assert made.evaluator is not None
    return SwebenchConfig.parse(made.evaluator.config)


@pytest.mark.parametrize("tests", ['["test_a (forms_tests.test_urls.Urls)"]', ["test_a (forms_tests.test_urls.Urls)"]])
def test_a_row_of_swebench_is_a_task(tests: str | list[str]) -> None:
    made = task(FAIL_TO_PASS=tests)
    assert made.runtime is not None
    assert made.runtime.image == "docker.io/swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (made.runtime.workdir, config(made).repo_dir) == ("/testbed", "/testbed")
    assert "URLs cost ${2} too much" in made.instruction
    assert config(made).instance.FAIL_TO_PASS == ["test_a (forms_tests.test_urls.Urls)"]
    assert config(made).parser == "parse_log_django"
    assert (config(made).test_command or "").splitlines()[-1] == (
        "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 forms_tests.test_urls"
    )
    told = made.model_dump_json()
    assert "the solution" not in told
    assert "a hint" not in told


def test_a_row_that_has_its_own_script_and_parser_keeps_them() -> None:
    script = "#!/bin/bash\n: '>>>>> Start Test Output'\n: '>>>>> End Test Output'\n"
    made = config(task(eval_script=script, log_parser="parse_log_sympy", eval_type="pass_and_fail"))
    assert (made.instance.eval_script, made.parser, made.test_command) == (script, "parse_log_sympy", None)


def test_an_old_version_is_tested_as_it_was() -> None:
    assert "--settings" not in (config(task(version="1.9")).test_command or "")


def test_a_repository_nobody_knows_is_tested_with_pytest() -> None:
    made = config(task(repo="ours/thing"))
    assert (made.test_command or "").splitlines()[-1] == "pytest -rA tests/forms_tests/test_urls.py"
    assert made.parser == "parse_log_pytest"


def test_the_parsers_are_those_of_the_package() -> None:
    skip_init("swebench.harness")
    by_name = importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    by_repository = importlib.import_module("swebench.harness.log_parsers.python").MAP_REPO_TO_PARSER_PY
    for repo, way in known.KNOWN.items():
        assert by_name[way.parser] is by_repository[repo], repo


@pytest.mark.parametrize(
    ("repo", "more", "ends", "parser"),
    [
        ("getmoto/moto", {}, "pytest -n0 -rA --color=no tests/forms_tests/test_urls.py", "parse_log_pytest"),
        ("pydantic/pydantic", {}, "--no-header tests/forms_tests/test_urls.py", "parse_log_pytest_v2"),
        ("dask/dask", {"test_cmd": "pytest -x"}, "\npytest -x tests/forms_tests/test_urls.py", "parse_log_pytest"),
        ("python/mypy", {"test_patch": "+[case one]\n+[case two]\n"}, " -k 'one or two'", "parse_log_pytest"),
    ],
)
def test_a_row_of_swe_gym_is_tested_as_its_repository_is(
    repo: str, more: dict[str, Any], ends: str, parser: str
) -> None:
    row = {**ROW, "repo": repo, "instance_id": "Owner__Thing-7", **more}
    image = image_of(row, swe_gym.REGISTRY, swe_gym.SEPARATOR)
    made = Task.load(fields_of(row, template("swe_gym"), image, swe_gym.known))
    assert made.runtime is not None
    assert made.runtime.image == "docker.io/xingyaoww/sweb.eval.x86_64.owner_s_thing-7:latest"
    assert (config(made).test_command or "").endswith(ends)
    assert config(made).parser == parser


def test_a_local_row_has_the_repository_of_the_folder(tmp_path: Path) -> None:
    made = Task.load(fields_of(ROW, template("swebench_verified"), "i", known.of_swebench, tmp_path))
    assert made.runtime is not None
    assert (made.runtime.backend, made.runtime.env) == ("local", {})
    assert made.runtime.prepare[0].source == str(tmp_path / "django__django-11099")
    assert config(made).repo_dir == LOCAL_TESTBED


def test_our_own_repositories_are_the_same_each_time(tmp_path: Path) -> None:
    first, second = (local.make(tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert set(ROW) < set(first[0])
    assert list(read_rows(tmp_path / "one/rows.jsonl").values()) == first


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({**ROW, "x": 1}) + "\n" + json.dumps({"instance_id": "a"}), r"line 2 has no column repo, base_com"),
        (f"{json.dumps(ROW)}\n\n{json.dumps(ROW)}", "line 3 has instance django__django-11099 a second time"),
        (json.dumps([ROW]), "line 1 is no JSON object"),
        ("PAR1\x00", "line 1 is no JSON object"),
        ("\n", "no rows"),
    ],
)
def test_a_wrong_file_of_rows_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(text)
    with pytest.raises(InvalidInput, match=says) as refused:
        read_rows(tmp_path / "rows")
    assert "\n" not in str(refused.value)


def test_what_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(InvalidInput, match="as JSON lines"):
        read_rows(tmp_path / "rows")
    with pytest.raises(InvalidInput, match="no such file"):
        read_rows(tmp_path / "none")


def test_ids_and_a_limit_choose() -> None:
    rows = {"a": 1, "b": 2, "c": 3}
    assert many.chosen(rows, argparse.Namespace(ids=["c", "a", "c"], limit=None)) == {"c": 3, "a": 1}
    assert many.chosen(rows, argparse.Namespace(ids=None, limit=2)) == {"a": 1, "b": 2}
    with pytest.raises(InvalidInput, match="no 'd' among the 3"):
        many.chosen(rows, argparse.Namespace(ids=["d"], limit=None))


def ended(name: str, *rewards: float | None, boundary: str = "runtime") -> many.Ended:
    failures = [{"boundary": boundary, "reason": "r", "message": "m"} for reward in rewards if reward is None]
    return many.Ended(name, f"r-{name}", list(rewards), failures)


def test_a_summary_counts_by_boundary() -> None:
    told = [
        ended("a", 0.0, 1.0), ended("b", 0.5, None), ended("c", None), ended("d", None, boundary="evaluator"),
        ended("e", None, None),
    ]  # fmt: skip
    assert many.summary(told) == "5 tasks: 1 resolved, 1 unresolved, 3 failed (runtime 2, evaluator 1)"
    assert told[2].line() == "failed     c  reward none; runtime: m"


def test_a_results_file_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    whole = json.dumps(vars(ended("a", 1.0))) + "\n"
    file.write_text(whole + whole[:20])
    assert many.read(file) == [ended("a", 1.0)]
    assert file.read_text() == whole
    file.write_text("{}\n")
    with pytest.raises(InvalidInput, match="line 1"):
        many.read(file)


CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "true"}'}}
ASKED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c", "content": ""}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([ASKED, ANSWER], ""),
        ([ASKED, {"role": "user", "content": "x"}], "message 1 comes before an answer to c"),
        ([ANSWER], "message 0 answers no call"),
        ([{"role": "assistant", "content": "x", "weight": 0}], "nothing that the policy said"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
    ],
)
def test_a_conversation_is_one(
    messages: list[dict[str, Any]], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages, "group": "g", "rollout_id": "g.0", "reward": 1.0}) + "\n")
    assert check.main(file) == int(bool(says))
    assert says in capsys.readouterr().err


SEPARATORS = "a\u2028b\u2029c\x85d\x1ce\x0cf"
"""What `str.splitlines` takes for ends of lines; JSON may have all of it in a text but the control characters."""


def json_line(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False) + "\n"


def test_a_text_with_unicode_line_separators_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": SEPARATORS}, {"role": "assistant", "content": "x"}]
    chat, tasks, dataset = (tmp_path / name for name in ("chat.jsonl", "tasks.jsonl", "rows.jsonl"))
    chat.write_text(json_line(messages=messages, group="g", rollout_id="g.0", reward=1.0), "utf-8")
    assert check.main(chat) == 0, capsys.readouterr().err
    tasks.write_text(json_line(name="n", instruction=SEPARATORS, check="true") + "\n", "utf-8")
    assert generate.read_tasks(tasks)["n"]["instruction"] == SEPARATORS
    dataset.write_text(json_line(**{**ROW, "problem_statement": SEPARATORS}), "utf-8")
    assert read_rows(dataset)[ROW["instance_id"]]["problem_statement"] == SEPARATORS


def test_tasks_that_cannot_be_told_apart_or_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json_line(name="n", instruction="i", check="true") * 2)
    with pytest.raises(InvalidInput, match="line 2 has task n a second time"):
        generate.read_tasks(file)
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match="cannot be read as text in UTF-8"):
        generate.read_tasks(file)
    with pytest.raises(SystemExit, match="cannot be read as text in UTF-8"):
        check.main(file)
    with pytest.raises(SystemExit, match="cannot be read: No such file"):
        check.main(tmp_path / "none")
