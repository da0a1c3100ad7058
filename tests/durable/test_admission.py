"""Back-pressure at submit: what does not fit is refused by every door, and leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.cli.main import main
from polarq.client import AsyncClient, Client
from polarq.contracts import RolloutState
from polarq.errors import InvalidTask, QueueFull, TaskNotFound
from polarq.ledger import Claim, Keys
from polarq.tasks import SubmitRollout
from polarq.topology import Topology
from tests.http.rig import a_task, running_shim, settings_for, topology_for

LIMITS = {"max_queued": 5, "retry_after_s": 7.0, "runs": {"small": {"max_queued": 2}}}


@pytest.fixture
def topology(keys: Keys) -> Topology:
    return topology_for(keys, limits=LIMITS)


@pytest.fixture
def client(redis_url: str, topology: Topology) -> Any:
    with Client(topology, settings_for(redis_url)) as made:
        yield made


def nothing_of(client: Client, task_id: str) -> bool:
    try:
        client.record(task_id)
    except TaskNotFound:
        return not client.ledger.redis.keys(f"{client.ledger.calls.keys.prefix}:*{{{task_id}}}*")
    return False


def test_a_task_that_does_not_fit_is_refused_and_leaves_nothing(client: Client) -> None:
    client.submit(a_task("a", 3))
    before = client.ledger.do(client.ledger.calls.last_event_id())
    with pytest.raises(QueueFull, match="3 rollouts wait and at most 5 may") as refused:
        client.submit(a_task("b", 3))
    assert refused.value.retry_after_s == 7.0
    assert nothing_of(client, "b")
    assert client.ledger.do(client.ledger.calls.last_event_id()) == before
    client.submit(a_task("c", 2))


def test_what_starts_makes_room_and_what_is_given_back_is_never_refused(client: Client) -> None:
    calls = client.ledger.calls
    client.submit(a_task("a", 5))
    got = client.ledger.do(calls.claim("a.0", "node0", 30, "job"))
    assert isinstance(got, Claim)
    client.submit(a_task("b", 1))
    assert client.ledger.do(calls.release("a.0", got.token, counted=False, reason="drain"))
    with pytest.raises(QueueFull, match="6 rollouts wait"):
        client.submit(a_task("c", 1))
    client.cancel("b")
    client.cancel("a")
    client.submit(a_task("c", 5))


def test_a_run_has_a_limit_of_its_own(client: Client) -> None:
    client.submit(a_task("a", 2, run_id="small"))
    with pytest.raises(QueueFull, match="2 rollouts of run 'small' wait and at most 2 may"):
        client.submit(a_task("b", 1, run_id="small"))
    client.submit(a_task("b", 1, run_id="other"))


def test_the_same_task_again_is_the_same_task_however_full_the_queue_is(client: Client) -> None:
    client.submit(a_task("a", 5))
    assert not client.submit(a_task("a", 5)).created


def test_a_task_that_could_never_fit_is_bad_input_and_not_a_matter_of_time(client: Client) -> None:
    with pytest.raises(InvalidTask, match=r"num_samples: 6; at most 5 rollouts may wait at once \(limits.max_queued\)"):
        client.submit(a_task("a", 6))
    with pytest.raises(InvalidTask, match=r"limits\.runs\.small\.max_queued"):
        client.submit(a_task("a", 3, run_id="small"))


def test_of_many_that_submit_at_once_no_more_get_in_than_fit(client: Client) -> None:
    outcomes: list[bool] = []
    start = threading.Barrier(8)

    def submit(number: int) -> None:
        start.wait()
        try:
            client.submit(a_task(f"t{number}", 1))
        except QueueFull:
            outcomes.append(False)
        else:
            outcomes.append(True)

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 3 + [True] * 5


async def test_the_async_client_raises_it_too(redis_url: str, topology: Topology) -> None:
    async with AsyncClient(topology, settings_for(redis_url)) as client:
        await client.submit(a_task("a", 5))
        with pytest.raises(QueueFull) as refused:
            await client.submit(a_task("b", 1))
        assert refused.value.retry_after_s == 7.0


def test_submit_rollout_delay_raises_it_where_it_was_called(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.submit(a_task("a", 5))
    submit_rollout = SubmitRollout()
    submit_rollout.bind(client.app)
    monkeypatch.setattr("polarq.tasks.Client", lambda app: client)
    with pytest.raises(QueueFull):
        submit_rollout.delay(a_task("b", 1))


async def test_over_http_it_is_429_with_retry_after_in_the_shape_of_every_refusal(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys, topology={"limits": LIMITS}) as shim:
        await shim.submit(a_task("a", 5))
        refused = await shim.http.post("/rollout/task/submit", json=a_task("b", 1))
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "7")
        assert refused.json()["detail"].startswith("the queue is full: 5 rollouts wait")
        await shim.end("a.0", state=RolloutState.COMPLETED)
        await shim.submit(a_task("b", 1))


def test_the_command_line_says_it_in_one_line_and_has_an_exit_code_for_it(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.submit(a_task("a", 5))
    topology, task = tmp_path / "topology.yaml", tmp_path / "task.yaml"
    prefix = client.topology.redis.prefix
    topology.write_text(yaml.safe_dump({"redis": {"prefix": prefix}, "limits": LIMITS}), encoding="utf-8")
    task.write_text(yaml.safe_dump(a_task("b", 1)), encoding="utf-8")
    monkeypatch.setenv("POLARQ_REDIS_URL", client.url)
    assert main(["submit", str(task), "--no-wait", "--config", str(topology)]) == 75
    assert capsys.readouterr().err.splitlines() == [
        "polarq: the queue is full: 5 rollouts wait and at most 5 may, so that 1 more do not fit; try again in 7 s"
    ]
