"""The harbor runtime keeps the contract of every runtime, on Harbor's own Docker environment.

By hand: it takes a Python of 3.12 or newer with `harbor` installed beside polarq, and the daemon and the image that
.ci/docker-up makes.

    python3.12 -m pytest -m harbor tests/runtimes/test_harbor.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polarq.contracts.rollout import ExecKind
from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.contracts.specs import RuntimeSpec
from polarq.testing.runtime_contract import CONTRACT_ENV, New, RuntimeContract, Sandbox
from polarq_worker.runtimes.base import Host
from polarq_worker.runtimes.harbor import environment
from polarq_worker.runtimes.harbor.runtime import HarborRuntime

IMAGE = os.environ.get("POLARQ_BASE_IMAGE", "polarq-base:local")
LONG_S = 120.0
pytestmark = pytest.mark.harbor


def harbor_spec(**changes: object) -> RuntimeSpec:
    known = {"backend": "harbor", "image": IMAGE, "env": CONTRACT_ENV, "kwargs": {"environment": "docker"}}
    return RuntimeSpec.model_validate({**known, **changes})


def containers(session: str) -> list[str]:
    command = ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={session}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


class TestHarborRuntime(RuntimeContract):
    no_snapshots = "no environment of Harbor keeps files"
    no_offline = "no environment of Harbor gives a way back to the proxy"

    @pytest.fixture
    async def new(self, tmp_path: Path) -> AsyncIterator[New]:
        made: list[HarborRuntime] = []

        def new(runtime_id: str) -> HarborRuntime:
            host = Host("node0", "1", tmp_path / "kept")
            made.append(HarborRuntime(harbor_spec(), runtime_id=runtime_id, root=tmp_path / runtime_id, host=host))
            return made[-1]

        yield new
        for runtime in made:
            await runtime.stop()

    async def test_the_log_is_written_while_the_command_runs(self, runtime: Sandbox) -> None:
        # Harbor hands nothing out before a command has ended.
        await runtime.exec("echo first; echo second", timeout_s=LONG_S, log="agent/log")
        assert (runtime.host_log_dir / "agent/log.stdout").read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kwargs": {"environment": "no-such"}}, "kwargs.environment"),
        ({"kwargs": {}}, "kwargs.environment"),
        ({"kwargs": {"environment": "docker", "mounts": []}}, "kwargs.mounts"),
        ({"kwargs": {"environment": "docker", "extra_docker_compose": ["/x"]}}, "kwargs.extra_docker_compose"),
        ({"max_processes": 5}, "max_processes"),
        ({"network": "bridge"}, "network"),
    ],
)
def test_what_harbor_cannot_give_is_said_with_its_key(changes: dict[str, object], key: str) -> None:
    [problem] = HarborRuntime.problems(harbor_spec(**changes), Host())
    assert problem.startswith(f"{key}: ")
    assert HarborRuntime.problems(harbor_spec(), Host()) == []


async def test_a_sandbox_of_a_dead_worker_is_stopped_by_its_record(tmp_path: Path) -> None:
    runtime = HarborRuntime(harbor_spec(), runtime_id="left", root=tmp_path / "left")
    record = SandboxRecord(
        runtime="harbor", runtime_id="left", handle=runtime.handle, reach=Reach.NODE, node_id="", incarnation="1",
        hostname="here",
    )  # fmt: skip
    await HarborRuntime.stop_orphan(record)
    await runtime.start()
    session = environment.read_handle(record.handle)[1]
    assert len(containers(session)) == 1
    await HarborRuntime.stop_orphan(record)
    assert containers(session) == []
    result = await runtime.exec("true", timeout_s=LONG_S)
    assert result.kind is ExecKind.SANDBOX_LOST
    await runtime.stop()


async def test_a_user_runs_commands_and_may_write_to_the_session(tmp_path: Path) -> None:
    runtime = HarborRuntime(harbor_spec(user="nobody"), runtime_id="user", root=tmp_path / "user")
    try:
        await runtime.start()
        results = await asyncio.gather(*(runtime.exec("id -un; echo x > file", timeout_s=LONG_S) for _ in range(3)))
        assert {(result.ok, result.stdout) for result in results} == {(True, b"nobody\n")}, results
    finally:
        await runtime.stop()
