"""A deployment's limits are the ledger's: whoever submits and every worker go by them, whatever their files say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polarq.cli.main import main
from polarq.client import Client
from polarq.contracts.node import NodeRecord
from polarq.errors import InvalidTask, QueueFull
from polarq.ledger import Calls, Keys, Ledger
from polarq.ledger.limits import BY_COMMAND, Published, publish, published
from polarq.testing.stack import LocalStack
from polarq.topology import Topology
from polarq.topology.models import LimitsSection
from tests.durable.gates import Gates, ids, wait_for_log
from tests.durable.hand import Hand, a_client
from tests.http.rig import Rig, a_task, running_shim, topology_for
from tests.worker.conftest import write_scenario


def limits(**values: Any) -> LimitsSection:
    return LimitsSection.model_validate(values)


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys)) as made:
        yield made


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys) as rig:
        yield rig


def says(ledger: Ledger, node_id: str, section: LimitsSection) -> bool:
    return ledger.do(publish(ledger.calls, section, node_id))


def now(ledger: Ledger) -> Published:
    return ledger.do(published(ledger.calls.keys, limits()))


def test_who_published_them_may_change_them_and_others_only_when_that_one_is_gone(ledger: Ledger) -> None:
    ledger.do(ledger.calls.announce(NodeRecord(node_id="first"), 60.0))
    assert now(ledger).version == 0
    assert says(ledger, "first", limits(max_queued=10))
    assert not says(ledger, "stray", limits())
    assert not says(ledger, "first", limits(max_queued=10)), "nothing has changed"
    assert (now(ledger).version, now(ledger).by, now(ledger).limits.max_queued) == (1, "first", 10)
    assert says(ledger, "first", limits(max_queued=20))
    ledger.do(ledger.calls.depart("first"))
    assert says(ledger, "stray", limits(max_queued=30))
    assert (now(ledger).version, now(ledger).by) == (3, "stray")
    assert ledger.do(publish(ledger.calls, limits(max_queued=40), BY_COMMAND, anyway=True))
    assert not says(ledger, "stray", limits(max_queued=50)), "a word given by hand holds"
    assert (now(ledger).version, now(ledger).limits.max_queued) == (4, 40)
    told = [event.data for event in ledger.do(ledger.calls.events("0")) if event.type == "limits.published"]
    assert [(data["version"], data["by"]) for data in told] == [
        (1, "first"), (2, "first"), (3, "stray"), (4, BY_COMMAND),
    ]  # fmt: skip


def test_a_trainer_with_another_file_is_let_in_by_the_deployment_s_numbers(redis_url: str, keys: Keys) -> None:
    strict, loose = topology_for(keys, limits={"max_queued": 1}), topology_for(keys)
    with a_client(redis_url, strict) as narrow, a_client(redis_url, loose) as wide:
        hand = Hand(wide.ledger)
        with pytest.raises(InvalidTask, match="at most 1 rollouts may wait"):
            narrow.submit(a_task("alone", 2))
        wide.set_limits(limits(max_queued=3, retry_after_s=7, runs={"r": {"max_queued": 2}}))
        assert narrow.submit(a_task("t", 2)).created, "its own file says one"
        with pytest.raises(InvalidTask, match="at most 3 rollouts may wait at once"):
            wide.submit(a_task("large", 4))
        with pytest.raises(InvalidTask, match=r"at most 2 rollouts may wait at once \(limits.runs.r.max_queued\)"):
            wide.submit(a_task("of-a-run", 3, run_id="r"))
        with pytest.raises(QueueFull, match="2 rollouts wait and at most 3 may") as full:
            wide.submit(a_task("more", 2))
        assert full.value.retry_after_s == 7
        hand.end("t.0")
        assert wide.submit(a_task("more", 2)).created


async def test_over_http(shim: Rig) -> None:
    assert (await shim.http.get("/limits")).json()["version"] == 0
    wrong = await shim.http.post("/admin/limits", json={"max_queue": 3})
    assert wrong.status_code == 422
    assert "max_queued" in wrong.json()["detail"][0]["msg"]
    made = (await shim.http.post("/admin/limits", json={"max_queued": 3, "runs": {"r": {"weight": 2}}})).json()
    assert (made["version"], made["by"]) == (1, BY_COMMAND)
    assert made == (await shim.http.get("/limits")).json()
    assert made["limits"]["runs"]["r"] == {"weight": 2.0, "max_in_flight": None, "max_queued": None}
    refused = await shim.http.post("/rollout/task/submit", json=a_task(samples=4))
    assert (refused.status_code, "at most 3" in refused.text) == (422, True)


def test_a_worker_publishes_its_file_s_and_learns_what_is_set_while_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = Gates(tmp_path / "gates")
    sections = {"limits": {"runs": {"r": {"max_in_flight": 1}}}}
    nodes: dict[str, dict[str, Any]] = {"node0": {"max_run_workers": 4, "max_init_workers": 4}}
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({"limits": {"runs": {"r": {"max_in_flight": 3}}}}), encoding="utf-8")
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), nodes=nodes, sections=sections) as stack:
        for name, value in stack.env.items():
            monkeypatch.setenv(name, value)

        def polarq(*arguments: str, code: int = 0) -> Any:
            capsys.readouterr()
            assert main([*arguments, "--json"]) == code
            return json.loads(capsys.readouterr().out)

        def doctor() -> dict[str, str]:
            main(["doctor", "--json"])
            findings = json.loads(capsys.readouterr().out)["findings"]
            return next(finding for finding in findings if finding["part"] == "limits")

        # A trainer that knows nothing of them.
        with Client(Topology(), stack.settings) as trainer:
            assert (trainer.limits().version, trainer.limits().by) == (1, "node0")
            trainer.submit(gates.task("t", 3, run_id="r"))
            gates.wait_started("t.0")
            assert trainer.waiting_for("t") == "run 'r', of which 1 rollouts are in flight and at most 1 may be"
        assert doctor()["verdict"] == "ok"
        assert len(gates.starts()) == 1

        shown = polarq("limits", "set", "--config", str(other))
        assert (shown["version"], shown["by"]) == (2, BY_COMMAND)
        gates.wait_started(*ids("t", 3))
        wait_for_log(stack, "limits are version 2 now, published by polarq limits set")
        wait_for_log(stack, "limits of this topology file are not the deployment's (version 2, by polarq limits set)")
        assert doctor()["verdict"] == "warn"
        gates.open(*ids("t", 3))
        stack.client.wait("t", 120)

        stack.workers["node0"].stop()
        stack.start_worker("node0")
        assert polarq("limits", "show")["version"] == 2, "a worker's start does not undo it"
