"""A started local sandbox, and a context as the engine makes it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polarq.contracts.specs import RuntimeSpec
from polarq.contracts.task import Task
from polarq_worker.harnesses.base import HarnessContext, harness_env
from polarq_worker.runtimes.local import LocalRuntime

MakeContext = Callable[..., HarnessContext]


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
