"""What a trainer has stored may go: payload and captured calls, never what has not ended; and nothing else piles up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from polarq.client import Client
from polarq.contracts.rollout import RolloutState
from polarq.errors import InvalidInput, NotEnded, PayloadMissing, TaskNotFound
from polarq.ledger import Call, Keys, Ledger
from polarq.testing.redis import EmbeddedRedis
from tests.durable.hand import Hand, a_client, ids
from tests.http.rig import a_task, running_shim, topology_for


@pytest.fixture
def client(redis_url: str, keys: Keys) -> Iterator[Client]:
    with a_client(redis_url, topology_for(keys)) as made:
        yield made


@pytest.fixture
def hand(client: Client) -> Hand:
    return Hand(client.ledger)


def heavy(hand: Hand) -> list[str]:
    """Keys that hold tokens."""
    return sorted(key for key in hand.all_keys() if ":payload:" in key or ":completions:" in key)


def leave_completions(hand: Hand, rollout_id: str, attempt: int, token: int) -> None:
    keys = hand.calls.keys
    hand.ledger.redis.rpush(keys.completions(rollout_id, attempt, token), b"a call")


def test_an_acknowledged_task_keeps_its_outcome_and_nothing_that_is_large(client: Client, hand: Hand) -> None:
    hand.submit("t", 2)
    for index in range(2):
        claim = hand.claim(f"t.{index}")
        leave_completions(hand, f"t.{index}", claim.attempt, claim.token)
        hand.end(f"t.{index}", size=600_000, claim=claim)
    before = client.get("t", "none")
    assert len(heavy(hand)) > 4
    assert client.acknowledge("t") == 2
    assert heavy(hand) == []
    after = client.get("t")
    assert (after.state, after.counts, after.rewards) == (before.state, before.counts, [1.0, 1.0])
    assert [(r.outcome, r.trajectory, r.payload) for r in after.results] == [
        (r.outcome, None, None) for r in before.results
    ]
    assert client.rollout("t.0").reward == after.results[0].reward
    ttl = client.ledger.redis.ttl(hand.calls.keys.task("t"))
    assert 0 < ttl <= hand.calls.keep_s


def test_acknowledging_again_changes_nothing(client: Client, hand: Hand) -> None:
    hand.submit("t", 3)
    for index in range(3):
        hand.end(f"t.{index}")
    assert client.acknowledge(["t.1"]) == 1
    first = client.record("t").rollouts[1].acknowledged_at
    assert client.acknowledge(["t.1", "t.1"]) == 0
    assert client.acknowledge("t.1") == 0
    assert client.acknowledge("t") == 2
    assert client.acknowledge("t") == 0
    assert client.record("t").rollouts[1].acknowledged_at == first


def test_what_has_not_ended_is_never_acknowledged_and_nothing_beside_it(client: Client, hand: Hand) -> None:
    hand.submit("t", 3)
    hand.end("t.0")
    running = hand.claim("t.1")
    before = hand.all_keys()
    for target in ("t", ["t.0", "t.1"], ["t.0", "t.2"], "t.2"):
        with pytest.raises(NotEnded, match=r"t\.[12]' is (preparing|queued)"):
            client.acknowledge(target)
    assert hand.all_keys() == before
    assert client.rollout("t.0").trajectory is not None
    hand.end("t.1", claim=running)
    assert client.acknowledge(["t.0", "t.1"]) == 2


def test_what_is_not_there_and_what_is_no_id_is_said(client: Client, hand: Hand) -> None:
    hand.submit("t")
    hand.end("t.0")
    with pytest.raises(TaskNotFound, match="task 'nope'"):
        client.acknowledge("nope")
    with pytest.raises(TaskNotFound, match=r"rollout 't\.7'"):
        client.acknowledge(["t.0", "t.7"])
    with pytest.raises(InvalidInput, match="'nope' is not a rollout id"):
        client.acknowledge(["t.0", "nope"])
    assert client.rollout("t.0").trajectory is not None


def test_a_task_whose_id_ends_in_a_number_is_not_taken_for_a_rollout(client: Client, hand: Hand) -> None:
    hand.submit("t", 2)
    hand.submit("t.1")
    hand.end("t.1")
    hand.end("t.1.0")
    assert client.acknowledge("t.1") == 1
    assert client.record("t.1").rollouts[0].acknowledged_at is not None
    assert client.record("t").rollouts[1].acknowledged_at is None


def test_what_lost_attempts_left_behind_goes_too(client: Client, hand: Hand) -> None:
    """A drained attempt, a lost one, one that wrote its payload and died before the commit, then the one that won."""
    hand.submit("t")
    drained = hand.claim("t.0")
    leave_completions(hand, "t.0", drained.attempt, drained.token)
    assert hand.ledger.do(hand.calls.release("t.0", drained.token, counted=False, reason="drain"))
    lost = hand.claim("t.0")
    leave_completions(hand, "t.0", lost.attempt, lost.token)
    stem = hand.calls.keys.payload("t.0", lost.attempt, lost.token)
    for chunk in range(3):
        client.ledger.redis.set(f"{stem}:{chunk}", b"never committed")
    assert hand.ledger.do(hand.calls.release("t.0", lost.token, counted=True, reason="lost"))
    won = hand.claim("t.0")
    leave_completions(hand, "t.0", won.attempt, won.token)
    hand.end("t.0", claim=won)
    assert len(heavy(hand)) == 7
    client.acknowledge("t")
    assert heavy(hand) == []


def test_a_trainer_that_stores_then_acknowledges_goes_on_after_its_restart_where_it_was(
    client: Client, hand: Hand
) -> None:
    hand.submit("t", 4)
    hand.submit("u")
    hand.end("t.0")
    hand.end("t.1")
    came = client.results(["t", "u"], timeout_s=60)
    client.acknowledge([next(came).rollout_id])
    # It is killed before it stored the next one.
    next(came)
    del came
    for rollout_id in ("t.2", "u.0", "t.3"):
        hand.end(rollout_id)
    client.acknowledge("u")
    assert ids(list(client.results(["t", "u"], timeout_s=60))) == ["t.1", "t.2", "t.3"]
    client.acknowledge("t")
    assert list(client.results(["t", "u"], timeout_s=60)) == []
    assert list(client.groups(["t", "u"], timeout_s=60)) == []


def test_an_acknowledgement_between_the_record_and_the_payload_is_no_loss(
    client: Client, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's trainer acknowledges it in the moment in which somebody else reads it."""
    hand.submit("t")
    hand.end("t.0")
    hand.submit("u")
    claim = hand.claim("u.0")
    hand.end("u.0", claim=claim)

    def in_between(call: Call[Any]) -> Any:
        if call.commands and call.commands[0][0] == "GET":
            monkeypatch.undo()
            client.acknowledge("t")
        return Ledger.do(client.ledger, call)

    monkeypatch.setattr(client.ledger, "do", in_between)
    assert client.get("t").results[0].trajectory is None
    # What is missing without anybody's doing is said.
    hand.ledger.redis.delete(f"{hand.calls.keys.payload('u.0', 1, claim.token)}:0")
    with pytest.raises(PayloadMissing):
        client.get("u")


def test_a_full_redis_can_be_freed_by_acknowledging() -> None:
    with EmbeddedRedis() as server, a_client(server.url, topology_for(Keys("p"))) as client:
        hand = Hand(client.ledger)
        hand.submit("t")
        hand.end("t.0", size=2_000_000)
        used = int(client.ledger.redis.info("memory")["used_memory"])
        client.ledger.redis.config_set("maxmemory", used - 100_000)
        assert client.acknowledge("t") == 1
        assert heavy(hand) == []
        hand.submit("u")


async def test_over_http_a_task_and_a_session_are_acknowledged(redis_url: str, keys: Keys) -> None:
    async with running_shim(redis_url, keys) as rig:
        await rig.submit(a_task(samples=2))
        await rig.end("t.0")
        refused = await rig.http.post("/rollout/task/t/acknowledge")
        assert refused.status_code == 409
        assert "t.1' is queued" in refused.json()["detail"]
        assert (await rig.http.post("/sessions/t.0/acknowledge")).json() == {"task_id": "t", "acknowledged": 1}
        await rig.end("t.1", state=RolloutState.FAILED, reward=None)
        assert (await rig.http.post("/rollout/task/t/acknowledge")).json() == {"task_id": "t", "acknowledged": 1}
        assert (await rig.http.post("/rollout/task/t/acknowledge")).json()["acknowledged"] == 0
        for path in ("/rollout/task/nope/acknowledge", "/sessions/t.9/acknowledge", "/rollout/task/t.0/acknowledge"):
            assert (await rig.http.post(path)).status_code == 404
        status = (await rig.http.get("/rollout/task/t")).json()
        assert [session["status"] for session in status["results"]] == ["COMPLETED", "ERROR"]
        assert [session["trajectory"]["traces"] for session in status["results"]] == [[], []]
        types = [event.type for event in await rig.client.ledger.do(rig.client.ledger.calls.events("0"))]
        assert types.count("task.acknowledged") == 2
