"""A started local sandbox, and a context as the engine makes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq_worker.harnesses.base import HarnessContext, harness_env
from polarq_worker.runtimes.local import LocalRuntime

MakeContext = Callable[..., HarnessContext]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where these tests are run by themselves, those of one program in one backend are run by one process: they share
    what is installed. (xdist's own groups get lost on pytest 9.)"""
    if config.getvalue("dist") != "loadgroup":
        return None
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = program_of
    return scheduler


def program_of(nodeid: str) -> str:
    file, _, case = nodeid.partition("[")
    words = case.rstrip("]").split("-")
    return " ".join([file, words[0], *words[-2:-1]])


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[LocalRuntime]:
    runtime = LocalRuntime(
        RuntimeSpec(backend="local", workdir="/polar/session/repo"), runtime_id="r1", root=tmp_path / "root"
    )
    await runtime.start()
    yield runtime
    await runtime.stop()


@pytest.fixture
def make_context(runtime: LocalRuntime) -> MakeContext:
    def make(
        instruction: str = "Do it.", base_url: str = "http://127.0.0.1:9/s/secret", **fields: Any
    ) -> HarnessContext:
        fields = {"agent": {"harness": "shell", "custom_shell": {"command": "true"}}, **fields}
        task = Task.parse({"task_id": "t1", "instruction": instruction, **fields})
        layout = runtime.layout
        env = harness_env(task, rollout_id="t1.0", fencing_token=1, base_url=base_url, api_key="secret", layout=layout)
        path = f"{layout.session_dir}/.polarq/instruction.txt"
        return HarnessContext(task, "t1.0", path, base_url, "secret", layout, env)

    return make
