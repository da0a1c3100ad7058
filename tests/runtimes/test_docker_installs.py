"""Programs of harnesses in containers: whose user is not root, and whose image has not what installing needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.programs.program import NpmProgram, Program, PythonProgram, installed
from polarq_worker.harnesses.programs.registries import Registries
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.docker.runtime import DockerRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare

from ..harnesses.package_registry import PASSWORD, registry
from .docker_rig import Sandboxes

pytestmark = pytest.mark.docker

VERSIONS = Versions("1.2.0", "1.1", "1.3")
USER = "4711:4712"
"""Of no name in the image."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with registry("1.2.0") as opened:
        yield opened


@pytest.fixture
async def runtime(sandboxes: Sandboxes) -> DockerRuntime:
    """In this machine's network, where the registry is."""
    return await sandboxes.started(network="host", user=USER, env={})


async def install(runtime: DockerRuntime, program: Program, port: int, tmp_path: Path) -> None:
    worker = {"PIP_INDEX_URL": f"http://me:{PASSWORD}@127.0.0.1:{port}/simple/", "PIP_RETRIES": "0"}
    env = prepare_env(runtime.spec, runtime.layout)
    async with Registries.of(worker, tmp_path).lent(runtime) as lent:
        action = program.install("pocket", "1.2.0", exact=False)
        await prepare(runtime, [action], env={**lent, **env}, timeout_s=170, upload_roots=[])


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (USER, ["polarq4711", "/polar/home", "4711:4712 700"]),
        ("nobody", ["nobody", "/polar/home", "65534:65534 700"]),
        ("root", ["root", "/root", "0:0 700"]),
    ],
    ids=["without a name", "without a home", "with both"],
)
async def test_every_user_has_a_name_and_a_home_of_its_own(sandboxes: Sandboxes, user: str, said: list[str]) -> None:
    look = "whoami; echo ~; stat -c '%u:%g %a' ~; cat ~/kept 2>&1; grep -c ^root:x:0:0:root:/root: /etc/passwd"
    first = await sandboxes.started("first", user=user, env={})
    assert (await first.exec("echo left >~/kept", timeout_s=60)).ok
    assert (await first.exec(look, timeout_s=60)).stdout_text.splitlines() == [*said, "left", "1"]
    second = sandboxes.new("second", user=user, env={})
    await second.start(snapshot=(await first.snapshot("of-first")).reference)
    assert (await second.exec(look, timeout_s=60)).stdout_text.splitlines() == [*said, "left", "1"]


async def test_a_user_of_no_name_gets_a_program_and_runs_it(runtime: DockerRuntime, port: int, tmp_path: Path) -> None:
    await install(runtime, PythonProgram("pocket-agent", "pocket", VERSIONS), port, tmp_path)
    found = await installed(runtime, "pocket")
    assert (found.origin, found.version) == ("python", "1.2.0")
    said = await runtime.exec([found.path, "a b", "c"], timeout_s=60)
    assert said.stdout_text == "pocket a b c\n"
    owners = await runtime.exec(["stat", "-c", "%u:%g", found.path], timeout_s=60)
    assert owners.stdout_text.strip() == USER


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            NpmProgram("pocket-agent", "pocket", VERSIONS),
            r"there is no npm here, and none can be installed \(.+\); put it in the image, or ",
        ),
        (
            PythonProgram("pocket-agent", "pocket", VERSIONS, python="3.99"),
            r"Python 3\.99 or newer is needed, and there is none: .+; put it in the image$",
        ),
        (
            PythonProgram("pocket-agent", "pocket", VERSIONS, needs=("tmux",)),
            r"'tmux' is needed, and can neither be found nor installed \(only root can .+\); put it in the image$",
        ),
    ],
    ids=["npm", "python", "needs"],
)
async def test_of_what_the_image_lacks_and_its_user_cannot_install_one_line_says_so(
    runtime: DockerRuntime, program: Program, line: str, port: int, tmp_path: Path
) -> None:
    with pytest.raises(PrepareFailed, match=f"harness pocket: {line}") as failed:
        await install(runtime, program, port, tmp_path)
    assert "\n" not in str(failed.value)
