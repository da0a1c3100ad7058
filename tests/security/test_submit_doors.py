"""What a topology forbids is refused at every door that takes tasks, and by the node behind them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from polarq.celery import make_app
from polarq.client import Client
from polarq.contracts import Boundary, RolloutState, Task
from polarq.errors import InvalidTask
from polarq.testing.stack import LocalStack
from tests.http.rig import running_shim, topology_for
from tests.worker.conftest import shell_task, write_scenario

UPLOAD = {"type": "upload_file", "source": "/etc/hostname", "target": "/polar/session/x"}
FORBIDDEN: dict[str, Any] = {
    "runtime": {"backend": "local", "gpus": 2, "network_policy": "full", "prepare": [UPLOAD]},
    "evaluator": {"strategy": "subprocess:Popen"},
}
PROBLEMS = [
    "runtime.prepare.0.source: '/etc/hostname' is not below a folder of security.upload_roots of the topology",
    "runtime.network_policy: policy 'full' is not in security.allowed_network_policies of the topology (proxy-only)",
    "runtime.gpus: 2; security.max_gpus of the topology is 0",
    "evaluator.strategy: 'subprocess:Popen' is not in security.allowed_modules of the topology",
]
SECURITY: dict[str, Any] = {"allowed_network_policies": ["proxy-only"], "max_gpus": 0}
PATIENCE_S = 170.0


def of_node0(problem: str) -> str:
    """As it is told to whoever has another file than the node, or none."""
    return problem.replace("of the topology", "of node0's topology")


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    home: Path = tmp_path_factory.mktemp("tight")
    security = SECURITY | {"upload_roots": [str(home)]}
    with LocalStack(home, scenario=str(write_scenario(home)), sections={"security": security}) as made:
        yield made


def test_a_client_refuses_it_with_one_line_per_problem(tight: LocalStack) -> None:
    with pytest.raises(InvalidTask) as refused:
        tight.client.submit(shell_task("door-client", "true", **FORBIDDEN))
    assert list(refused.value.problems) == PROBLEMS


def test_so_does_one_that_has_nothing_but_the_address_of_redis(tight: LocalStack) -> None:
    keys = tight.client.ledger.calls.keys
    with Client(topology_for(keys), tight.settings) as trainer, pytest.raises(InvalidTask) as refused:
        trainer.submit(shell_task("door-trainer", "true", **FORBIDDEN))
    assert list(refused.value.problems) == [of_node0(problem) for problem in PROBLEMS]


@pytest.mark.parametrize(
    "own", [{}, {"security": SECURITY | {"upload_roots": ["/uploads"]}}], ids=["no file", "another"]
)
async def test_the_shim_answers_422(tight: LocalStack, own: dict[str, Any]) -> None:
    keys = tight.client.ledger.calls.keys
    async with running_shim(tight.client.ledger.url, keys, topology=own) as rig:
        answer = await rig.http.post("/rollout/task/submit", json=shell_task("door-shim", "true", **FORBIDDEN))
    assert answer.status_code == 422
    told = [detail["msg"] for detail in answer.json()["detail"]]
    assert told == [of_node0(problem).partition(": ")[2] for problem in PROBLEMS]


def test_a_message_of_a_foreign_client_ends_with_it(tight: LocalStack) -> None:
    foreign = Celery("foreign", set_as_current=False)
    ours = make_app(tight.topology, tight.settings).conf
    for key in ("broker_url", "result_backend", "broker_transport_options", "result_backend_transport_options"):
        foreign.conf[key] = ours[key]
    task = shell_task("door-message", "true", **FORBIDDEN)
    answer = foreign.send_task("polarq.submit_rollout", [task], queue="polarq")
    with pytest.raises(Exception, match=r"security\.upload_roots"):
        answer.get(timeout=PATIENCE_S)


@pytest.mark.parametrize(("key", "says"), [("prepare", "upload_roots"), ("network_policy", "allowed_network_policies")])
def test_the_node_refuses_what_came_past_the_doors(tight: LocalStack, key: str, says: str) -> None:
    runtime = {"backend": "local", key: FORBIDDEN["runtime"][key]}
    task = Task.load(shell_task(f"door-node-{key}", "true", runtime=runtime))
    ledger = tight.client.ledger
    ledger.do(ledger.calls.submit(task, task.task_id))
    tight.client.ring_again(task, 0)
    (result,) = tight.client.wait(task.task_id, timeout_s=PATIENCE_S).results
    outcome = result.outcome
    assert (outcome.state, outcome.boundary, outcome.reason) == (RolloutState.FAILED, Boundary.TASK, "unusable_task")
    assert says in outcome.message
