"""What a harness finds in its environment, and what no task can change of it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polarq.contracts.rollout import HarnessReport, RolloutState
from polarq.contracts.task import Task
from polarq.errors import HarnessFault
from polarq.testing.stack import LocalStack
from polarq_worker.harnesses.base import harness_env, run_harness, sandbox_env
from polarq_worker.harnesses.configs import git_settings
from polarq_worker.harnesses.create import create_harness
from polarq_worker.runtimes.base import SandboxLayout
from polarq_worker.runtimes.local import LocalRuntime
from tests.harnesses.conftest import MakeContext
from tests.worker.conftest import ask, shell_task, write_scenario

from ..needs import not_here

LAYOUT = SandboxLayout.below("/polar/session")
BASE = "http://10.1.2.3:8081/s/grant"
DEAD_PROXY = "http://127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


def env_of(
    runtime: dict[str, str] | None = None, agent: dict[str, str] | None = None, base: str = BASE
) -> dict[str, str]:
    task = Task.parse(
        {
            "task_id": "t1",
            "instruction": "x",
            "runtime": {"backend": "local", "env": runtime or {}},
            "agent": {"harness": "mini_swe_agent", "env": agent or {}},
        }
    )
    return harness_env(task, rollout_id="t1.0", fencing_token=1, base_url=base, api_key="key", layout=LAYOUT)


def test_every_dialect_is_told_where_the_model_is() -> None:
    env = env_of()
    assert {name: value for name, value in env.items() if not name.lower().startswith("no_proxy")} == {
        "OPENAI_BASE_URL": f"{BASE}/v1",
        "OPENAI_API_BASE": f"{BASE}/v1",
        "OPENAI_API_KEY": "key",
        "ANTHROPIC_BASE_URL": BASE,
        "ANTHROPIC_API_BASE": BASE,
        "ANTHROPIC_API_KEY": "key",
        "GOOGLE_API_URL": BASE,
        "GOOGLE_GEMINI_BASE_URL": BASE,
        "GOOGLE_API_KEY": "key",
        "GEMINI_API_KEY": "key",
        "SESSION_ID": "t1.0",
        "TASK_ID": "t1",
        "FENCING_TOKEN": "1",
        "SESSION_DIR": "/polar/session",
        "ARTIFACTS_DIR": "/polar/session/artifacts",
        "LOGS_DIR": "/polar/session/logs",
        "AGENT_LOG_DIR": "/polar/session/logs/agent",
    }


def test_the_agents_variables_win_over_the_runtimes_and_both_over_the_sessions() -> None:
    env = env_of({"A": "runtime", "B": "runtime", "TASK_ID": "mine"}, {"B": "agent"})
    assert (env["A"], env["B"], env["TASK_ID"]) == ("runtime", "agent", "mine")


NAMES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE")
"""Where two say where the same API is, some clients read only one of them."""


def test_no_task_can_lead_its_model_calls_past_the_record() -> None:
    elsewhere = dict.fromkeys(NAMES, "http://elsewhere")
    env = env_of(elsewhere, elsewhere)
    assert "http://elsewhere" not in env.values()


def test_preparing_and_scoring_see_no_model() -> None:
    task = Task.parse(
        {
            "task_id": "t1",
            "instruction": "x",
            "runtime": {"backend": "local", "env": {"A": "1"}},
            "agent": {"harness": "mini_swe_agent", "env": {"AGENT_ONLY": "1"}},
        }
    )
    env = sandbox_env(task, rollout_id="t1.0", layout=LAYOUT)
    assert env["A"] == "1"
    assert not {"AGENT_ONLY", "OPENAI_BASE_URL", "OPENAI_API_KEY"} & set(env)


@pytest.mark.parametrize(
    ("base", "host"), [(BASE, "10.1.2.3"), ("http://[fd00::1]:8081/s/g", "fd00::1"), ("http://node0:1/s/g", "node0")]
)
def test_the_hosts_of_model_calls_are_literal_exceptions_in_both_spellings(base: str, host: str) -> None:
    env = env_of({"NO_PROXY": "npm.example,127.*", "no_proxy": "lower.example"}, {"NO_PROXY": "agent.example"}, base)
    assert env["NO_PROXY"] == env["no_proxy"]
    listed = env["NO_PROXY"].split(",")
    assert listed == ["npm.example", "127.*", "lower.example", "agent.example", "127.0.0.1", "::1", "localhost", host]


STUBS = {
    "httpx": "import httpx, os; print(httpx.get(os.environ['OPENAI_BASE_URL'] + '/models').text)",
    "urllib": (
        "import os, urllib.request\n"
        "print(urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/models').read().decode())"
    ),
    "requests": "import os, requests; print(requests.get(os.environ['OPENAI_BASE_URL'] + '/models').text)",
    "aiohttp": (
        "import aiohttp, asyncio, os\n"
        "async def main():\n"
        "    async with aiohttp.ClientSession(trust_env=True) as session:\n"
        "        async with session.get(os.environ['OPENAI_BASE_URL'] + '/models') as reply:\n"
        "            print(await reply.text())\n"
        "asyncio.run(main())"
    ),
}
COMMANDS = {
    "curl": 'curl -sS "$OPENAI_BASE_URL/models"',
    # What Node itself makes of the variables, where it is asked to heed them (from Node 24 on; older ones never do).
    "node": (
        """NODE_USE_ENV_PROXY=1 node -e 'fetch(process.env.OPENAI_BASE_URL + "/models")"""
        """.then(async one => console.log(await one.text()))'"""
    ),
}


async def answer(request: web.Request) -> web.Response:
    return web.Response(text=f"arrived at {request.path}")


@pytest.mark.parametrize("client", [*STUBS, *COMMANDS])
async def test_a_corporate_proxy_does_not_swallow_model_calls(
    client: str, runtime: LocalRuntime, make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Field case H04. By name too: where that is ::1 first, nobody listens there.
    if client in COMMANDS and shutil.which(client) is None:
        not_here(f"{client} is not installed")
    for name in PROXIES:
        monkeypatch.setenv(name, DEAD_PROXY)
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        port = server.addresses[0][1]
        bases = [f"http://{host}:{port}/s/grant" for host in ("127.0.0.1", "localhost")]
        reports = await asyncio.gather(*(call_model(client, base, runtime, make_context) for base in bases))
    finally:
        await server.cleanup()
    for report in reports:
        assert report.ok, report
        assert report.steps[0].stdout_tail.strip() == "arrived at /s/grant/v1/models"


async def call_model(client: str, base: str, runtime: LocalRuntime, make_context: MakeContext) -> HarnessReport:
    command = COMMANDS.get(client, 'python "$SESSION_DIR/stub.py"')
    if client in STUBS:
        await runtime.put_bytes(STUBS[client].encode(), "/polar/session/stub.py")
    proxies: dict[str, Any] = {
        "HTTP_PROXY": DEAD_PROXY,
        "HTTPS_PROXY": DEAD_PROXY,
        "ALL_PROXY": DEAD_PROXY,
        "http_proxy": "http://127.0.0.1:10",
        "all_proxy": "http://127.0.0.1:10",
        "NO_PROXY": "npm.example,127.*",
    }
    context = make_context(
        base_url=base,
        runtime={"backend": "local", "env": proxies},
        agent={"harness": "shell", "custom_shell": {"command": command}},
    )
    return await run_harness(create_harness(context.task.agent, []), runtime, context, timeout_s=60)


@pytest.mark.slow
def test_a_deployment_whose_environment_names_a_dead_proxy_works(tmp_path: Path) -> None:
    # Worker, proxy and engine talk to each other and to Redis as if it were not there.
    env = {**dict.fromkeys(PROXIES, DEAD_PROXY), "NO_PROXY": "npm.example,127.*", "no_proxy": "npm.example"}
    own = {"backend": "local", "env": dict.fromkeys(PROXIES, "http://127.0.0.1:10")}
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), env=env) as stack:
        stack.client.submit(shell_task("proxied", ask(), runtime=own))
        (result,) = stack.client.wait("proxied", 120).results
    assert result.outcome.state is RolloutState.COMPLETED, result.outcome
    assert result.reward is not None
    assert result.reward.outcome == 1.0


def test_settings_of_git_come_after_the_tasks_own() -> None:
    own = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "a.b", "GIT_CONFIG_VALUE_0": "c"}
    named = {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_1": "user.name", "GIT_CONFIG_VALUE_1": "x"}
    assert git_settings(own, {"user.name": "x"}) == named


@pytest.mark.parametrize("count", ["abc", "-5", "1.5", "\u0661"])
def test_a_count_of_gits_settings_that_is_no_number_is_said_in_one_line(count: str) -> None:
    with pytest.raises(HarnessFault, match=f"^GIT_CONFIG_COUNT is '{count}', which is no number; set it right"):
        git_settings({"GIT_CONFIG_COUNT": count}, {"user.name": "x"})
