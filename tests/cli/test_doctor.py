"""doctor: looks at the real thing and says what to do."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from polarq import bubblewrap
from polarq.cli.main import main
from polarq.testing import ports
from polarq.testing.inference import ScriptedInference, ServerOptions
from polarq.testing.redis import EmbeddedRedis
from tests.cli.conftest import Cli

Found = list[tuple[str, str, str, str]]


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def findings(document: Any, part: str) -> dict[str, str]:
    """fact -> verdict of one part."""
    return {f["fact"]: f["verdict"] for f in document["findings"] if f["part"].startswith(part)}


def write(deployment: Path, **node: Any) -> None:
    deployment.write_text(yaml.safe_dump({"gateway": {"nodes": [{"id": "node0", **node}]}}), encoding="utf-8")


def verdict_of(found: dict[str, str], words: str) -> str:
    [verdict] = [verdict for fact, verdict in found.items() if words in fact]
    return verdict


def test_a_redis_that_keeps_everything_is_good(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(appendonly=True, password="secret") as server:
        monkeypatch.setenv("POLARQ_REDIS_URL", server.url)
        ran = cli("doctor", "--json")
    found = findings(ran.json, "redis")
    assert set(found.values()) == {"ok"}
    assert {"appends every change to disk (AOF)", "evicts nothing (noeviction)", "asks for a password"} <= set(found)
    assert findings(ran.json, "clock") == {"agrees with Redis'": "ok"}
    assert "secret" not in ran.out


def test_a_redis_that_forgets_at_a_restart_is_a_warning(cli: Cli) -> None:
    assert verdict_of(findings(cli("doctor", "--json").json, "redis"), "appendonly is off") == "warn"


def test_a_redis_that_evicts_fails_and_the_advice_is_a_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(maxmemory_policy="allkeys-lru") as server:
        monkeypatch.setenv("POLARQ_REDIS_URL", server.url)
        before = cli("doctor", "--json")
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "1gb")
        ran = cli("doctor", "--json")
        text = cli("doctor").out
    assert verdict_of(findings(before.json, "redis"), "would evict") == "warn"
    assert ran.code == 1
    assert verdict_of(findings(ran.json, "redis"), "evicts keys when full (allkeys-lru)") == "fail"
    assert "redis-cli CONFIG SET maxmemory-policy noeviction" in text


def test_a_wrong_password_and_no_redis_are_told_apart(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    with EmbeddedRedis(password="secret") as server:
        monkeypatch.setenv("POLARQ_REDIS_URL", server.url.replace("secret", "wrong"))
        refused = cli("doctor", "--json")
    monkeypatch.setenv("POLARQ_REDIS_URL", f"redis://127.0.0.1:{free_port}/0")
    absent = cli("doctor", "--json")
    assert (refused.code, absent.code) == (1, 1)
    assert verdict_of(findings(refused.json, "redis"), "refuses the user or password") == "fail"
    assert verdict_of(findings(absent.json, "redis"), "does not answer") == "fail"


async def examined(deployment: Path, capsys: pytest.CaptureFixture[str], options: ServerOptions, **node: Any) -> Any:
    import json

    async with ScriptedInference(options) as server:
        write(deployment, inference={"engine": "vllm", "base_url": server.base_url}, **node)
        await asyncio.to_thread(main, ["doctor", "--json"])
    return findings(json.loads(capsys.readouterr().out), "inference")


async def test_an_engine_that_returns_token_ids_is_good(deployment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await examined(deployment, capsys, ServerOptions(served_model_name="m"), model_served="m")
    assert set(found.values()) == {"ok"}
    assert verdict_of(found, "returns token ids") == "ok"


async def test_an_engine_that_returns_none_fails(deployment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await examined(deployment, capsys, ServerOptions(token_ids=False))
    assert verdict_of(found, "returns no token ids") == "fail"


async def test_an_engine_with_another_model_fails(deployment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await examined(deployment, capsys, ServerOptions(served_model_name="a"), model_served="b")
    assert verdict_of(found, "does not serve 'b'") == "fail"


async def test_an_engine_that_wants_a_key_fails_without_it(
    deployment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await examined(deployment, capsys, ServerOptions(api_key="k"))
    assert verdict_of(found, "answers 401") == "fail"


def test_an_engine_that_is_down_fails(cli: Cli, deployment: Path, free_port: int) -> None:
    write(deployment, inference={"engine": "vllm", "base_url": f"http://127.0.0.1:{free_port}"})
    ran = cli("doctor", "--json")
    assert ran.code == 1
    assert verdict_of(findings(ran.json, "inference"), "does not answer") == "fail"


@pytest.mark.parametrize(("mode", "verdict"), [("embedded", "warn"), ("external", "fail")])
def test_a_proxy_that_is_not_there_is_missed_only_where_somebody_should_run_it(
    cli: Cli, deployment: Path, free_port: int, mode: str, verdict: str
) -> None:
    write(deployment, port=free_port, proxy={"mode": mode})
    assert set(findings(cli("doctor", "--json").json, "proxy").values()) == {verdict}


async def test_what_the_proxy_found_out_about_its_engines_is_told(
    deployment: Path, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    import json

    async with ScriptedInference(ServerOptions(token_in=False)) as server:
        inference = {"engine": "vllm", "base_url": server.base_url}
        write(deployment, port=free_port, inference=inference, proxy={"mode": "external", "context": "exact"})
        command = [sys.executable, "-m", "polarq_proxy", "--node", "node0", "--topology", str(deployment)]
        proxy = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert proxy.stdout is not None
            assert b"is ready on" in await proxy.stdout.readline()
            url = f"http://127.0.0.1:{free_port}/health"
            async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
                while not (await http.get(url)).json()["inference"][0]["exact_off"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.to_thread(main, ["doctor", "--json"])
        finally:
            proxy.kill()
            await proxy.wait()
    found = findings(json.loads(capsys.readouterr().out), "proxy")
    assert verdict_of(found, "gives token ids: yes, streams them: yes, takes prompts as ids") == "ok"
    assert verdict_of(found, "exact mode is off: the engine takes no prompt as ids") == "warn"


def test_a_bad_topology_is_one_finding_per_mistake(cli: Cli, deployment: Path) -> None:
    deployment.write_text("budgets:\n  max_samples: 0\nretention:\n  events: 0\n", encoding="utf-8")
    ran = cli("doctor", "--json")
    assert ran.code == 1
    assert [f["verdict"] for f in ran.json["findings"]] == ["fail", "fail"]
    assert "line 2" in ran.json["findings"][0]["fact"]


@pytest.mark.parametrize(
    ("lists", "verdict"),
    [
        ({}, "warn"),
        ({"NO_PROXY": "example.com"}, "warn"),
        ({"NO_PROXY": "npm.example,127.*"}, "warn"),
        ({"NO_PROXY": "127.0.0.1,x"}, "ok"),
        ({"no_proxy": "127.0.0.1"}, "ok"),
        ({"NO_PROXY": "127.0.0.1", "no_proxy": "npm.example"}, "warn"),
        ({"NO_PROXY": "npm.example", "no_proxy": "127.0.0.1"}, "warn"),
        ({"NO_PROXY": "*"}, "ok"),
    ],
)
def test_a_proxy_variable_that_swallows_loopback_is_a_warning(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, lists: dict[str, str], verdict: str
) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.internal:3128")
    for name, value in lists.items():
        monkeypatch.setenv(name, value)
    assert set(findings(cli("doctor", "--json").json, "environment").values()) == {verdict}


def test_a_state_folder_on_a_file_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("POLARQ_STATE_DIR", str(tmp_path / "file" / "state"))
    assert set(findings(cli("doctor", "--json").json, "disk").values()) == {"fail"}


@pytest.mark.parametrize(
    ("isolation", "why_not", "verdict", "words"),
    [
        ("auto", "", "ok", "isolated by bubblewrap"),
        ("auto", "bubblewrap is not installed", "warn", "share this machine's files"),
        ("bubblewrap", "bubblewrap is not installed", "fail", "asks for bubblewrap"),
        ("none", "bubblewrap is not installed", "ok", "isolation is none"),
    ],
)
def test_what_keeps_local_sandboxes_apart_is_said(
    cli: Cli, deployment: Path, monkeypatch: pytest.MonkeyPatch, isolation: str, why_not: str, verdict: str, words: str
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: why_not)
    for name in ("limits_tmpfs", "own_users"):
        monkeypatch.setattr(bubblewrap, name, lambda: True)
    write(deployment, runtimes={"local": {"isolation": isolation}})
    told = cli("doctor", "--json").json
    assert verdict_of(findings(told, "runtime local"), words) == verdict
    [advice] = [finding["advice"] for finding in told["findings"] if finding["part"] == "runtime local"]
    assert ("apt install bubblewrap" in advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("lacks", "words"), [("limits_tmpfs", "cannot limit their /dev/shm"), ("own_users", "by control groups only")]
)
def test_what_local_sandboxes_can_fill_their_machine_with_is_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, lacks: str, words: str
) -> None:
    monkeypatch.setattr(bubblewrap, "why_not", lambda: "")
    for name in ("limits_tmpfs", "own_users"):
        monkeypatch.setattr(bubblewrap, name, lambda name=name: name != lacks)
    assert verdict_of(findings(cli("doctor", "--json").json, "runtime local"), words) == "warn"
