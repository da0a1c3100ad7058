"""What a task may look like, and how a bad one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarq.contracts import Task, split_rollout_id
from polarq.errors import InvalidTask

SMALL: dict[str, Any] = {
    "task_id": "t",
    "instruction": "fix it",
    "agent": {"harness": "mini_swe_agent"},
    "runtime": {"backend": "local"},
}

POLAR_FULL: dict[str, Any] = {
    "task_id": "swe-1",
    "instruction": "Fix the bug.",
    "num_samples": 4,
    "timeout_seconds": 1200.0,
    "runtime": {
        "backend": "docker",
        "image": "polar-calculator:latest",
        "prepare": [
            {"type": "exec", "command": "npm i -g @openai/codex", "max_attempts": 3, "retry_backoff_seconds": 2},
            {"type": "upload_file", "source": "/data/a.py", "target": "/polar/session/a.py"},
            {"type": "upload_dir", "source": "/data/repo", "target": "/testbed"},
        ],
        "eval_prepare": None,
        "env": {"A": "b"},
        "network": "host",
        "workdir": "/testbed",
        "cpus": 2,
        "memory_mb": 4096,
        "gpus": 0,
        "allow_internet": False,
        "internet_volumes": ["/run/proxy.sock:/run/proxy.sock"],
        "direct_exec_init_command": None,
        "kwargs": {"volumes": ["/opt/node:/opt/node:ro"]},
    },
    "agent": {
        "harness": "codex",
        "model_name": "openai/gpt-5.5",
        "settings": {"reasoning_effort": "high"},
        "env": {},
        "mcp_servers": [{"name": "x", "transport": "sse", "url": "http://127.0.0.1:1/"}],
        "skills_path": "/skills",
    },
    "builder": {"strategy": "prefix_merging", "config": {"end_of_turn_token_id": 2}},
    "evaluator": {"strategy": "harbor", "config": {"tests_dir": "/t"}, "env": {}, "refresh_runtime": True},
    "callback_url": "http://127.0.0.1:9000/callback/task_result",
    "metadata": {"group_id": 7, "policy_version": 3, "agent_timeout": 300},
    "dispatch_priority": 100,
    "early_stop_min_usable_sessions": 3,
}


def test_a_task_of_polars_runs_unchanged() -> None:
    task = Task.load(POLAR_FULL)
    dumped = task.model_dump(mode="json")
    for key, value in POLAR_FULL.items():
        if key not in {"runtime", "agent", "evaluator"}:
            assert dumped[key] == value, key
    assert task.runtime is not None
    assert task.runtime.kwargs == {"volumes": ["/opt/node:/opt/node:ro"]}
    assert task.budgets().agent_s == 300


def test_the_older_lines_name_for_samples_is_understood() -> None:
    assert Task.load({**SMALL, "num_rollouts": 3}).num_samples == 3
    with pytest.raises(InvalidTask, match="'num_rollouts' and 'num_samples' are the same; give one"):
        Task.load({**SMALL, "num_rollouts": 3, "num_samples": 3})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"instructions": "x"}, "unknown key 'instructions', did you mean 'instruction'?"),
        ({"agent": {"harnes": "codex"}}, "agent: unknown key 'harnes', did you mean 'harness'?"),
        (
            {"runtime": {"backend": "local", "prepare": [{"typ": "exec"}]}},
            "runtime.prepare.0: unknown key 'typ', did you",
        ),
        ({"num_samples": 0}, "num_samples: Input should be greater than or equal to 1"),
        ({"num_samples": 10**9}, "num_samples: Input should be less than or equal to 4096"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds: "),
        ({"timeout_seconds": float("nan")}, "timeout_seconds: "),
        ({"timeout_seconds": 1e12}, "timeout_seconds: Input should be less than or equal to"),
        ({"task_id": "../../etc"}, "task_id: String should match pattern"),
        ({"task_id": "t[/x]"}, "task_id: String should match pattern"),
        ({"instruction": ""}, "instruction: String should have at least 1 character"),
        ({"instruction": "a\0b"}, "instruction: has a NUL byte"),
        ({"instruction": "a\ud800b"}, "instruction: "),
        ({"runtime": {"backend": "docker"}}, "runtime: backend 'docker' needs 'image'"),
        ({"agent": {"harness": "shell"}}, "agent: harness 'shell' needs 'custom_shell'"),
        ({"agent": {}}, "agent: give exactly one of 'harness' and 'import_path'"),
        ({"early_stop_min_usable_sessions": 2}, "early_stop_min_usable_sessions (2) is more than num_samples (1)"),
        ({"metadata": {"loss": float("nan")}}, "metadata: cannot be written as JSON"),
        ({"metadata": {"agent_timeout": True}}, "'metadata.agent_timeout' must be a positive finite number"),
        ({"metadata": {"x": ["a\ud800"]}}, "metadata: cannot be written as JSON: "),
        ({"metadata": {"x": object()}}, "metadata: cannot be written as JSON: "),
        (
            {"agent": {"harness": "pi", "settings": {"config": {"a": [float("nan")]}}}},
            "agent: settings.config.a.0: cannot be written as JSON: nan",
        ),
        (
            {"agent": {"harness": "pi", "settings": {"config": {"a": object()}}}},
            "agent: settings.config.a: cannot be written as JSON: Unable to serialize unknown type",
        ),
        (
            {"agent": {"harness": "pi", "settings": {"config": {"a": b"\xff"}}}},
            "agent: settings.config.a: cannot be written as JSON: ",
        ),
        ({"builder": {"config": {"a": float("inf")}}}, "builder.config: cannot be written as JSON: "),
        ({"evaluator": {"strategy": "x", "config": {"a": object()}}}, "evaluator.config: cannot be written as JSON: "),
        ({"callback_url": "ftp://x/"}, "callback_url: must be an http or https address"),
        ({"callback_url": "http://a:b@x/"}, "callback_url: must not hold a user name or password"),
        ({"placement": {"policy": "pinned"}}, "placement: 'node_id' goes with policy 'pinned'"),
        ({"agent": {"harness": "codex", "env": {"A=B": "c"}}}, "agent.env: 'A=B' is not a usable environment variable"),
        (
            {"agent": {"harness": "codex", "env": {"A": "\ud800"}}},
            "agent: env.A: is not valid Unicode text (lone surrogate at 0)",
        ),
        ({"runtime": {"backend": "local", "workdir": "/a\0"}}, "runtime: workdir: has a NUL byte"),
        ({"agent": {"harness": "codex", "model_name": "a\0"}}, "agent: model_name: has a NUL byte"),
        ({"agent": {"harness": "codex", "settings": {"config": {"a": ["\0"]}}}}, "settings.config.a.0: has a NUL byte"),
        (
            {"agent": {"harness": "codex", "settings": {"b\ud800": 1}}},
            "agent: a key of settings: is not valid Unicode text (lone surrogate at 1)",
        ),
        (
            {"agent": {"harness": "shell", "custom_shell": {"command": "true\0"}}},
            "agent: custom_shell.command: has a NUL byte",
        ),
        (
            {"agent": {"harness": "codex", "mcp_servers": [{"name": "a", "command": "x", "args": ["\0"]}]}},
            "agent: mcp_servers.0.args.0: has a NUL byte",
        ),
        (
            {"agent": {"harness": "codex", "mcp_servers": [{"name": "a", "command": "x"}] * 2}},
            "agent: mcp_servers: two are called 'a'",
        ),
        (
            {"evaluator": {"strategy": "script", "config": {"command": "tr\0ue"}}},
            "evaluator: config.command: has a NUL byte",
        ),
        (
            {"evaluator": {"strategy": "composite", "config": {"parts": [{"config": {"repo_dir": "/a\0"}}]}}},
            "evaluator: config.parts.0.config.repo_dir: has a NUL byte",
        ),
    ],
)
def test_a_bad_task_is_refused_with_one_line_that_names_the_key(change: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        Task.load({**SMALL, **change})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(InvalidTask) as caught:
        Task.load({**SMALL, "num_samples": 0, "timeout_seconds": -1, "task_id": "/"})
    assert len(caught.value.problems) == 3


def test_an_instruction_of_two_megabytes_is_fine() -> None:
    text = "ä" * (1024 * 1024)
    assert Task.load({**SMALL, "instruction": text}).instruction == text


def test_upload_sources_of_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    action = {"type": "upload_dir", "source": "repo", "target": "/polar/session/repo"}
    path = tmp_path / "task.json"
    path.write_text(json.dumps({**SMALL, "runtime": {"backend": "local", "prepare": [action]}}))
    task = Task.load(path)
    assert task.runtime is not None
    assert task.runtime.prepare[0].source == str(tmp_path / "repo")


def test_ids_that_yaml_reads_as_numbers_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("task_id: 2026\nrun_id: 1.5\ninstruction: x\nagent: {harness: codex}\nruntime: {backend: local}\n")
    task = Task.load(path)
    assert (task.task_id, task.run_id) == ("2026", "1.5")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\xff\xfe", "is not UTF-8 text (byte 0); save it as UTF-8"),
        (b"a: [", "cannot be parsed"),
        (b"- a\n", "must hold a mapping"),
        (b"", "must hold a mapping"),
    ],
)
def test_a_file_that_is_no_task_is_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(content)
    with pytest.raises(InvalidTask) as caught:
        Task.load(path)
    assert line in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidTask, match="is larger than"):
        Task.load(Path("/dev/zero"))


def test_a_missing_file_and_a_wrong_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="there is no such file"):
        Task.load(tmp_path / "no.yaml")
    with pytest.raises(InvalidTask, match="expected a mapping, a Task or a path, got int"):
        Task.load(7)  # type: ignore[arg-type]


def test_equal_requests_have_equal_digests_whatever_their_key_order() -> None:
    turned = dict(reversed(list(SMALL.items())))
    assert Task.load(SMALL).digest() == Task.load(turned).digest()
    assert Task.load(SMALL).digest() != Task.load({**SMALL, "instruction": "other"}).digest()


@given(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,40}\Z"), st.integers(0, 4095))
def test_a_rollout_id_tells_its_task_and_index(task_id: str, index: int) -> None:
    task = Task.load({**SMALL, "task_id": task_id})
    assert split_rollout_id(task.rollout_id(index)) == (task_id, index)


def test_budgets_come_from_the_timeout_unless_given() -> None:
    task = Task.load({**SMALL, "timeout_seconds": 100, "timeouts": {"evaluate_s": 7}})
    budgets = task.budgets()
    assert (budgets.prepare_s, budgets.agent_s, budgets.evaluate_s, budgets.queue_s) == (100, 100, 7, None)
