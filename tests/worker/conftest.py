"""A whole polarq on this machine, shared by the tests of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polarq.testing.stack import LocalStack

SCENARIO = """
name: worker-tests
scripts:
  - name: plain
    turns: &turns
      - content: First answer.
      - content: Second answer.
      - content: Third answer.
      - content: Fourth answer.
  - {name: plain-1, turns: *turns}
  - {name: plain-2, turns: *turns}
  - {name: plain-3, turns: *turns}
  - name: no_ids
    fault: {kind: omit}
    turns: *turns
  - name: nan_logprob
    fault: {kind: bad_logprob, value: NaN}
    turns: *turns
  - name: unreadable_call
    turns: [{raw: "<tool_call>\\n{not JSON"}]
  - name: broken
    fault: {kind: http_status, status: 500}
    turns: *turns
"""
"""Rollouts 0 to 3 of a task get a plain script; the others are for who asks with `[script: NAME]`."""

ASK = """python3 - <<'PY'
import json, os, urllib.request
messages = [{"role": "user", "content": open(os.environ["POLARQ_INSTRUCTION_FILE"]).read()}]
for turn in range(%d):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "go on"}]
    print(reply["content"])
PY
"""
"""A harness in a few lines: asks the model that many times."""


def ask(times: int = 1) -> str:
    return ASK % times


def shell_task(task_id: str, command: str, **more: Any) -> dict[str, Any]:
    """A task whose harness is a shell command in a local sandbox."""
    return {
        "task_id": task_id,
        "instruction": "Say something.",
        "agent": {"harness": "shell", "custom_shell": {"command": command}},
        "runtime": {"backend": "local"},
        "evaluator": {"strategy": "session_completed"},
        "timeout_seconds": 60,
        **more,
    }


def commands_with(marker: str) -> list[str]:
    """Command lines of all processes that contain `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in line:
            found.append(line)
    return found


def wait_until(true: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "did not become true"
        time.sleep(0.1)


def write_scenario(folder: Path) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write_scenario(tmp_path)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("stack")
    with LocalStack(
        home,
        scenario=str(write_scenario(home)),
        nodes={"node0": {"max_run_workers": 4}},
    ) as made:
        yield made
