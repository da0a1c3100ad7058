"""How a program gets into a sandbox: by the real npm and pip, from a registry that wants a login."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarq_worker.harnesses import programs
from polarq_worker.harnesses.environment import prepare_env
from polarq_worker.harnesses.programs.program import Installed, NpmProgram, Program, PythonProgram, installed
from polarq_worker.harnesses.programs.registries import Registries
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.local import LocalRuntime
from polarq_worker.stages.prepare import PrepareFailed, prepare

from ..needs import not_here
from .package_registry import PASSWORD, TOKEN, registry

pytestmark = pytest.mark.slow

VERSIONS = Versions("1.2.0", "1.1", "1.3")
NPM = NpmProgram("pocket-agent", "pocket", VERSIONS)
PYTHON = PythonProgram("pocket-agent", "pocket", VERSIONS)
INSTALL = Path(programs.__path__[0]) / "install.sh"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    if shutil.which("npm") is None:
        not_here("there is no npm")
    with registry("1.1.4", "1.2.0") as opened:
        yield opened


@pytest.fixture
def worker(port: int, tmp_path: Path) -> dict[str, str]:
    """The environment of a worker whose user has logins for the registry, in the places where npm and pip look."""
    home = tmp_path / "home"
    (home / ".config/pip").mkdir(parents=True)
    at = f"127.0.0.1:{port}"
    (home / ".npmrc").write_text(f"registry=http://{at}/npm/\n//{at}/npm/:_authToken=${{LOGIN}}\nprefix=/nowhere\n")
    (home / ".config/pip/pip.conf").write_text(f"[global]\nindex-url = http://me:{PASSWORD}@{at}/simple/\n")
    return {"LOGIN": TOKEN, "PATH": os.environ["PATH"], "HOME": str(home)}


async def install(
    runtime: LocalRuntime, program: Program, worker: dict[str, str], version: str = "1.2.0", *, exact: bool = False
) -> Installed:
    registries = Registries.of(worker, Path(worker["HOME"]))
    env = prepare_env(runtime.spec, runtime.layout)
    async with registries.lent(runtime) as lent:
        action = program.install("pocket", version, exact=exact)
        await prepare(runtime, [action], env={**lent, **env}, timeout_s=170, upload_roots=[])
    return await installed(runtime, "pocket")


async def says(runtime: LocalRuntime) -> str:
    program = f"{runtime.layout.session_dir}/.polarq/programs/pocket/bin/pocket"
    said = await runtime.exec([program, "a b", "c"], timeout_s=60)
    assert said.ok, said.why
    return said.stdout_text.strip()


async def put_in_image(runtime: LocalRuntime, version: str) -> None:
    """A program that stands on PATH before anything is installed."""
    folder = f"{runtime.layout.session_dir}/image/bin"
    await runtime.put_bytes(f"#!/bin/sh\necho pocket {version} of the image\n".encode(), f"{folder}/pocket", 0o755)
    path = f"{folder}:{os.environ['PATH']}"
    runtime.spec = runtime.spec.model_copy(update={"env": {"PATH": path}})


@pytest.mark.parametrize("program", [NPM, PYTHON], ids=["npm", "python"])
async def test_the_workers_own_registry_and_login_are_used_and_nothing_of_them_is_left(
    runtime: LocalRuntime, worker: dict[str, str], program: Program
) -> None:
    found = await install(runtime, program, worker)
    assert (found.origin, found.version) == (program.kind, "1.2.0")
    assert (await says(runtime)).endswith("a b c")
    left = await runtime.exec(
        f"grep -rl -e {TOKEN} -e {PASSWORD} $SESSION_DIR $HOME",
        env=prepare_env(runtime.spec, runtime.layout),
        timeout_s=60,
    )
    assert left.stdout_text == ""
    hidden = await runtime.exec(
        "ls -A $SESSION_DIR/.polarq", env=prepare_env(runtime.spec, runtime.layout), timeout_s=60
    )
    assert hidden.stdout_text.split() == ["programs"]


@pytest.mark.parametrize("program", [NPM, PYTHON], ids=["npm", "python"])
async def test_without_the_login_one_line_says_what_was_not_to_be_had_and_what_to_do(
    runtime: LocalRuntime, worker: dict[str, str], program: Program, port: int
) -> None:
    home = Path(worker["HOME"])
    (home / ".npmrc").write_text(f"registry=http://127.0.0.1:{port}/npm/\n")
    (home / ".config/pip/pip.conf").write_text(f"[global]\nindex-url = http://127.0.0.1:{port}/simple/\nretries = 0\n")
    with pytest.raises(PrepareFailed) as failed:
        await install(runtime, program, worker)
    text = str(failed.value)
    assert "harness pocket: pocket-agent 1.2.0 cannot be installed" in text
    assert "put it in the image" in text
    assert "\n" not in text


async def test_a_supported_version_of_the_image_is_used_as_it_is(runtime: LocalRuntime, worker: dict[str, str]) -> None:
    await put_in_image(runtime, "1.1.9")
    found = await install(runtime, NPM, worker)
    assert (found.origin, found.version) == ("image", "1.1.9")
    assert found.path.endswith("/image/bin/pocket")
    assert await says(runtime) == "pocket 1.1.9 of the image"


@pytest.mark.parametrize(
    ("there", "asked", "exact"), [("1.0.9", "1.2.0", False), ("1.3.0", "1.2.0", False), ("1.2.0", "1.1.4", True)]
)
async def test_another_version_of_the_image_is_left_alone(
    runtime: LocalRuntime, worker: dict[str, str], there: str, asked: str, exact: bool
) -> None:
    await put_in_image(runtime, there)
    found = await install(runtime, NPM, worker, asked, exact=exact)
    assert (found.origin, found.version) == ("npm", asked)
    assert await says(runtime) == f"pocket {asked} a b c"


def test_of_an_image_without_bash_one_line_says_so() -> None:
    env = {"PATH": os.environ["PATH"], "POLARQ_HARNESS": "pocket", "POLARQ_PACKAGE": "pocket-agent"}
    said = subprocess.run(["dash", INSTALL], env=env, capture_output=True, text=True, timeout=60, check=False)
    line = "harness pocket: bash is needed to install pocket-agent; put it in the image\n"
    assert (said.returncode, said.stderr) == (1, line)


def test_what_the_worker_is_told_of_registries_is_handed_on_and_folders_of_its_own_are_not(tmp_path: Path) -> None:
    (tmp_path / ".npmrc").write_text(
        "; a comment\nregistry = https://npm.example/\n@corp:registry=https://corp.example/\ncache=/x\nyes=false\n"
    )
    (tmp_path / ".config/uv").mkdir(parents=True)
    (tmp_path / ".config/uv/uv.toml").write_text("offline = false\n")
    (tmp_path / "ca.pem").write_text("CERTIFICATES")
    env = {
        "PATH": "/nowhere",
        "npm_config_registry": "https://other.example/",
        "npm_config_//other.example/:_authToken": "T",
        "PIP_EXTRA_INDEX_URL": "file:///opt/index https://more.example/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_HTTP_TIMEOUT": "9",
        "SSL_CERT_FILE": str(tmp_path / "ca.pem"),
        "HTTPS_PROXY": "http://proxy.example:3128",
        "SECRET": "no",
    }
    found = Registries.of(env, tmp_path)
    lines = set(found.files["npmrc"].decode().splitlines())
    assert {
        "registry=https://other.example/",
        "@corp:registry=https://corp.example/",
        "//other.example/:_authToken=T",
    } <= lines
    assert not any(line.startswith(("cache", "yes", ";")) for line in lines)
    assert (found.files["ca.pem"], found.files["uv.toml"]) == (b"CERTIFICATES", b"offline = false\n")
    assert found.env["PIP_EXTRA_INDEX_URL"] == found.env["UV_INDEX"] == "https://more.example/simple"
    assert (found.env["UV_HTTP_TIMEOUT"], found.env["HTTPS_PROXY"]) == ("9", "http://proxy.example:3128")
    assert "SECRET" not in found.env
    assert "NODE_EXTRA_CA_CERTS" in found.named_by["ca.pem"]
