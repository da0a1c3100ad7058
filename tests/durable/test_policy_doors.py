"""A trainer's words about weights at every door: policy versions on results, and pauses of model calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarq.cli.main import main
from polarq.client import Client
from polarq.contracts.node import NodeHealth, NodeRecord
from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.ledger import Keys
from polarq.testing.stack import LocalStack
from tests.durable.hand import Hand, a_client
from tests.http.rig import Rig, running_shim, topology_for
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario

PATIENCE_S = 120.0

Polarq = Callable[..., Any]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home = tmp_path_factory.mktemp("policy")
    with LocalStack(home, scenario=str(write_scenario(home))) as made:
        yield made


@pytest.fixture
def polarq(stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Polarq:
    for name, value in stack.env.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


def swap_weights(stack: LocalStack, version: str) -> None:
    """What a trainer does at the engine itself."""
    answer = httpx.post(f"{stack.inference_url}/update_weight_version", json={"new_version": version})
    assert answer.status_code == 200, answer.text


def held_back(client: Client, run_id: str) -> int:
    return sum(node.waiting for node in client.inference_state(run_id).nodes)


def test_a_result_says_under_which_policy_it_was_claimed_and_which_sampled_it(
    stack: LocalStack, polarq: Polarq, tmp_path: Path
) -> None:
    client, gate = stack.client, tmp_path / "gate"
    swap_weights(stack, "step-7")
    assert polarq("policy", "r", "7") == {"run_id": "r", "policy_version": 7}
    waits = f'while [ ! -e "{gate}" ]; do sleep 0.05; done'
    client.submit(shell_task("t", f"{ask(1)}\n{waits}\n{ask(1).replace('go on', 'and now')}", run_id="r"))
    # Sampled once under the first policy; the second comes while the harness still works.
    wait_until(lambda: client.ledger.redis.keys("*{t}:completions*") != [], PATIENCE_S)
    swap_weights(stack, "step-8")
    assert polarq("policy", "r", "8")["policy_version"] == 8
    gate.touch()
    client.wait("t", PATIENCE_S)

    [full], [light] = client.get("t").results, client.get("t", "none").results
    [streamed] = client.results(run_id="r")
    seen: list[RolloutResult] = [full, light, streamed, client.rollout("t.0")]
    assert [result.policy_version for result in seen] == [7] * 4
    assert [result.versions for result in seen] == [["step-7", "step-8"]] * 4
    now = client.run("r").policy_version
    assert now is not None
    assert full.policy_version is not None
    assert now - full.policy_version == 1, "its staleness"
    [row] = polarq("show", "t")["rollouts"]
    assert (row["policy_version"], row["versions"]) == (7, ["step-7", "step-8"])


def test_model_calls_of_a_run_are_held_back_and_let_go_by_hand(stack: LocalStack, polarq: Polarq) -> None:
    client = stack.client
    paused = polarq("inference", "pause", "--run", "held", "--timeout", str(PATIENCE_S), "--lease", "600")
    assert (paused["run_id"], paused["paused"], paused["in_flight"]) == ("held", True, 0)
    client.submit(shell_task("waits", ask(1), run_id="held"))
    wait_until(lambda: held_back(client, "held") == 1, PATIENCE_S)
    [node] = polarq("inference", "status", "--run", "held")["nodes"]
    assert (node["node_id"], node["paused"], node["waiting"]) == ("node0", True, 1)
    assert polarq("inference", "status")["paused"] is False, "only that run's"
    assert polarq("inference", "resume", "--run", "held")["paused"] is False
    assert client.wait("waits", PATIENCE_S).counts.completed == 1


def test_a_thread_pauses_the_deployment_as_a_loop_does(stack: LocalStack) -> None:
    client = stack.client
    assert client.pause_inference(timeout_s=PATIENCE_S, lease_s=600).drained
    assert client.inference_state().paused
    assert client.resume_inference() is True
    assert client.resume_inference() is False
    with pytest.raises(InvalidInput, match="lease_s: 0; more than 0"):
        client.pause_inference(lease_s=0)


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys) as rig:
        yield rig


def silent_node() -> NodeRecord:
    """One whose proxy may have calls in flight, and says nothing."""
    return NodeRecord(node_id="mute", health=NodeHealth(proxy=True), max_run_workers=1)


@pytest.mark.parametrize("through_the_shim", [False, True])
async def test_a_pause_that_is_not_reached_in_time_says_so_and_holds(
    shim: Rig, redis_url: str, keys: Keys, tmp_path: Path, through_the_shim: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    topology = tmp_path / "topology.yaml"
    topology.write_text(json.dumps({"redis": {"prefix": keys.prefix}}), encoding="utf-8")
    monkeypatch.setenv("POLARQ_REDIS_URL", redis_url)
    door = ["--url", shim.url] if through_the_shim else ["--config", str(topology)]
    await shim.client.ledger.do(shim.client.ledger.calls.announce(silent_node(), 60.0))

    def polarq(*arguments: str) -> int:
        capsys.readouterr()
        return main([*arguments, *door])

    assert (
        await asyncio.to_thread(polarq, "inference", "pause", "--run", "r", "--timeout", "0.2", "--lease", "600") == 124
    )
    hint, problem = capsys.readouterr().err.splitlines()
    assert "polarq inference resume --run r ends it" in hint
    assert "calls in flight on mute (its proxy has not said)" in problem
    pauses = await shim.client.inference_state("r")
    assert [node.waiting for node in pauses.nodes] == [0]
    assert await asyncio.to_thread(polarq, "inference", "status") == 0
    assert "all model calls pass" in capsys.readouterr().out
    assert await asyncio.to_thread(polarq, "inference", "resume", "--run", "r") == 0
    assert await asyncio.to_thread(polarq, "inference", "pause", "--timeout", "0") == 2
    assert "--timeout: 0 is no number of seconds above 0" in capsys.readouterr().err


async def test_an_idle_run_with_only_a_version_is_listed(shim: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    await shim.client.set_policy_version("ahead", 3)
    row = {"run_id": "ahead", "paused": False, "waiting": 0, "in_flight": 0, "policy_version": 3}
    assert (await shim.http.get("/runs")).json() == {"runs": [row]}
    assert await asyncio.to_thread(main, ["runs", "--url", shim.url]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["ahead", "idle", "0", "0", "3"]
    assert await asyncio.to_thread(main, ["policy", "ahead", "--url", shim.url]) == 0
    assert "run ahead: policy version 3" in capsys.readouterr().out


def test_a_run_is_listed_until_its_last_results_are_forgotten(redis_url: str, keys: Keys) -> None:
    with a_client(redis_url, topology_for(keys, retention={"result_s": 1.0})) as client:
        hand = Hand(client.ledger)
        hand.submit("a", run_id="r")
        hand.submit("b", run_id="r")
        hand.end("a.0")
        redis, known = client.ledger.redis, keys.runs_known
        wait_until(lambda: not redis.exists(keys.task("a")), PATIENCE_S)
        assert [run.run_id for run in client.runs()] == ["r"], "b has not ended"
        assert redis.ttl(known) == redis.ttl(keys.run_tasks("r")) == -1
        hand.end("b.0")
        assert redis.ttl(known) > -1
        wait_until(lambda: not redis.exists(keys.task("b")), PATIENCE_S)
        wait_until(lambda: client.runs() == [], PATIENCE_S)
        wait_until(lambda: not redis.exists(known, keys.run_tasks("r")), PATIENCE_S)
