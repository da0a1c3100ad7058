"""Agents that are written with a library: what of the user's is run, and what it is given. Here with a library that is
no agents' (pydantic, which is installed wherever polarq is); the six that ship go through the conformance suite."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polarq.contracts.rollout import HarnessReport
from polarq.contracts.specs import AgentSpec
from polarq.errors import InvalidTask
from polarq_worker.harnesses.base import HarnessContext, run_harness
from polarq_worker.harnesses.libraries.base import LibraryPreset
from polarq_worker.harnesses.programs.program import PythonProgram
from polarq_worker.harnesses.programs.versions import Versions
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

HERE = version("pydantic")
MAKER = """
def model(name, base_url, api_key, dialect):
    return {"name": name, "base_url": base_url, "api_key": api_key, "dialect": dialect}
"""
CODE = """
import json, os, sys
import beside

async def both(instruction, model):
    return {"instruction": instruction, "model": model, "beside": beside.WORD, "cwd": os.getcwd()}

def neither():
    return "as told"

def other(task):
    return task
"""
SCRIPT = """
import os, sys
import beside
print(sys.argv[1:], sys.stdin.read(), os.environ["POLARQ_MODEL"], os.environ["OPENAI_BASE_URL"], beside.WORD)
print(__name__, "polarq_model" in sys.modules)
"""


class PydanticHarness(LibraryPreset):
    """A preset as one from outside of polarq would be."""

    name: ClassVar[str] = "pydantic"
    title: ClassVar[str] = "Pydantic"
    program: ClassVar[PythonProgram] = PythonProgram("pydantic", "python", Versions(HERE, HERE, "99"))
    dialects: ClassVar[tuple[str, ...]] = ("openai_chat", "anthropic_messages")


@pytest.fixture(autouse=True)
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "maker.py"
    file.write_text(MAKER)
    monkeypatch.setattr(PydanticHarness, "maker", file)


async def run(
    runtime: LocalRuntime, make_context: MakeContext, entrypoint: str, instruction: str = "Count to three.", **more: Any
) -> HarnessReport:
    """In a sandbox whose image has the library, with the user's files where the agent works."""
    for name, text in {"agent.py": CODE, "main.py": SCRIPT, "beside.py": "WORD = 'beside'"}.items():
        await runtime.put_bytes(text.encode(), f"/polar/session/repo/{name}")
    preset = made(entrypoint=entrypoint, **more)
    context = make_context(instruction)
    context = replaced(context, PATH=f"{Path(sys.executable).parent}:{context.env.get('PATH', '/usr/bin:/bin')}")
    (action,) = preset.recipe()
    done = await runtime.exec(str(action.command), env={**context.env, **(action.env or {})}, timeout_s=60)
    assert done.ok, done
    report = await run_harness(preset, runtime, context, timeout_s=60)
    assert report.metadata["program"]["origin"] == "image"
    return report


def replaced(context: HarnessContext, **env: str) -> HarnessContext:
    return replace(context, env={**context.env, **env})


def made(**settings: Any) -> PydanticHarness:
    return PydanticHarness(AgentSpec.parse({"harness": "pydantic", "model_name": "tiny", "settings": settings}))


@pytest.mark.parametrize("module", ["agent.py", "agent", "/polar/session/repo/agent.py"])
async def test_a_function_gets_the_instruction_and_the_librarys_model(
    runtime: LocalRuntime, make_context: MakeContext, module: str
) -> None:
    if module.startswith("/"):
        module = runtime.layout.session_dir + module.removeprefix("/polar/session")
    words = "Zähle \U0001f9ea: 'drei' $HOME\r\nfour\r"
    report = await run(runtime, make_context, f"{module}:both", words, dialect="anthropic_messages")
    assert report.ok, report
    result = report.metadata["result"]
    assert result["instruction"] == words
    assert result["model"] == {
        "name": "tiny",
        "base_url": "http://127.0.0.1:9/s/secret",
        "api_key": "secret",
        "dialect": "anthropic_messages",
    }
    assert result["beside"] == "beside"
    assert report.metadata["python"] == ".".join(map(str, sys.version_info[:3]))


async def test_a_module_of_the_repository_is_not_taken_for_the_library(
    runtime: LocalRuntime, make_context: MakeContext, tmp_path: Path
) -> None:
    (tmp_path / "maker.py").write_text("def model(**given):\n    import packaging\n    return packaging.__file__\n")
    await runtime.put_bytes(b"raise SystemExit('of the repository')\n", "/polar/session/repo/packaging.py")
    report = await run(runtime, make_context, "agent.py:both")
    assert report.ok, report
    assert report.metadata["result"]["model"].endswith("/site-packages/packaging/__init__.py")


async def test_a_function_may_take_nothing(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, "agent:neither")
    assert report.metadata["result"] == "as told"
    assert report.steps[0].stdout_tail.strip() == "as told"


async def test_a_script_has_it_in_its_environment(runtime: LocalRuntime, make_context: MakeContext) -> None:
    report = await run(runtime, make_context, "main.py", "Count.", args=["--fast", "a b"])
    assert report.ok, report
    said = report.steps[0].stdout_tail.splitlines()
    assert said[0] == "['--fast', 'a b'] Count. tiny http://127.0.0.1:9/s/secret/v1 beside"
    assert said[1].startswith("__main__")


@pytest.mark.parametrize(
    ("entrypoint", "says"),
    [
        ("missing.py", "entrypoint: there is no file missing.py in "),
        ("missing.py:solve", "entrypoint: there is no file missing.py in "),
        ("nowhere:solve", "No module named 'nowhere'"),
        ("agent:missing", "entrypoint: agent has no function 'missing'"),
        ("agent:other", "entrypoint: the function may take 'instruction' and 'model' by name, and nothing else"),
    ],
)
async def test_what_cannot_be_run_is_said_in_its_last_line(
    runtime: LocalRuntime, make_context: MakeContext, entrypoint: str, says: str
) -> None:
    report = await run(runtime, make_context, entrypoint)
    assert not report.ok
    assert says in report.steps[0].stderr_tail.strip().splitlines()[-1]


@pytest.mark.parametrize("entrypoint", ["", "agent", ":solve", "agent:", "agent:not a name", "agent.sh"])
def test_an_entrypoint_that_is_none_is_refused(entrypoint: str) -> None:
    with pytest.raises(InvalidTask, match=r"entrypoint: .*is neither module:function, file\.py:function nor file\.py"):
        made(entrypoint=entrypoint)


def test_without_one_there_is_nothing_to_run() -> None:
    with pytest.raises(InvalidTask, match=r"entrypoint: .*required"):
        made()


def test_requirements_are_part_of_the_recipe() -> None:
    (action,) = made(entrypoint="agent.py", requirements=["numpy<3", "rich"]).recipe()
    assert (action.env or {})["POLARQ_WITH"].splitlines() == ["numpy<3", "rich"]
