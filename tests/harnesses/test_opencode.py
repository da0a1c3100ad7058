"""OpenCode: the ripgrep that it is installed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from polarq.contracts.sandbox import ExecCategory
from polarq.contracts.specs import AgentSpec
from polarq_worker.harnesses.opencode import OpenCodeHarness
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext

HOME = "/polar/session/.polarq/programs/opencode"
RG = f"{HOME}/node_modules/@vscode/ripgrep-linux-x64/bin/rg"


def opencode(**settings: Any) -> OpenCodeHarness:
    return OpenCodeHarness(AgentSpec.parse({"harness": "opencode", "settings": settings}))


def test_ripgrep_is_installed_with_it() -> None:
    (action,) = opencode().recipe()
    assert action.env is not None
    assert action.env["POLARQ_WITH"].startswith("@vscode/ripgrep@")


@pytest.mark.parametrize(
    ("env", "folder"),
    [({}, "$HOME/.cache"), ({"XDG_CACHE_HOME": "/polar/session/caches"}, "/polar/session/caches")],
)
async def test_ripgrep_lies_where_the_program_looks_for_it(
    runtime: LocalRuntime, make_context: MakeContext, env: Mapping[str, str], folder: str
) -> None:
    context = make_context(agent={"harness": "opencode"})
    context = replace(context, env={**context.env, **env})
    await runtime.put_bytes(b"npm\n1.18.33\n/x\n", f"{HOME}/installed")
    await runtime.put_bytes(b"#!/bin/sh\necho ripgrep itself\n", RG, 0o755)
    for _ in range(2):  # also in a sandbox that was used before
        await opencode().setup(runtime, context)
    ran = await runtime.exec(f"{folder}/opencode/bin/rg", env=context.env, timeout_s=60, category=ExecCategory.SETUP)
    assert ran.stdout_text == "ripgrep itself\n"


async def test_a_program_of_the_image_brings_its_own_or_none(runtime: LocalRuntime, make_context: MakeContext) -> None:
    await runtime.put_bytes(b"image\n1.18.33\n/x\n", f"{HOME}/installed")
    await opencode().setup(runtime, make_context(agent={"harness": "opencode"}))


async def test_of_a_repositorys_own_files_it_is_told_what_they_say_and_starts_nothing(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    context = make_context(agent={"harness": "opencode"})
    await runtime.put_bytes(b"npm\n1.18.33\n/x\n", f"{HOME}/installed")
    git = await runtime.exec("git init -q . && mkdir -p 'a b'", timeout_s=60, category=ExecCategory.SETUP)
    assert git.ok, git.why
    repo = "/polar/session/repo"
    for path in (f"{repo}/AGENTS.md", f"{repo}/a b/AGENTS.md", f"{repo}/CLAUDE.md", "/polar/session/AGENTS.md"):
        await runtime.put_bytes(b"Be brief.\n", path)
    harness = opencode(workdir="a b", config={"instructions": ["own.md"]})
    await harness.setup(runtime, context)
    top = runtime.workdir
    assert harness.config(context)["instructions"] == ["own.md", f"{top}/a b/AGENTS.md", f"{top}/AGENTS.md"]
    assert harness.environment(context)["OPENCODE_DISABLE_PROJECT_CONFIG"] == "1"


async def test_a_task_may_have_it_read_the_repositorys_configuration(
    runtime: LocalRuntime, make_context: MakeContext
) -> None:
    context = make_context(agent={"harness": "opencode"})
    await runtime.put_bytes(b"npm\n1.18.33\n/x\n", f"{HOME}/installed")
    await runtime.put_bytes(b"Be brief.\n", "/polar/session/repo/AGENTS.md")
    harness = opencode(project_config=True)
    await harness.setup(runtime, context)
    assert harness.config(context)["instructions"] == []
    assert harness.environment(context)["OPENCODE_DISABLE_PROJECT_CONFIG"] == "0"
