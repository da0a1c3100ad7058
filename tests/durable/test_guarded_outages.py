"""Under users of least rights and TLS the same is survived: a Redis that is killed, and a node that is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from polarq.contracts.rollout import RolloutState
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from tests.durable.gates import PATIENCE_S, Gates, ids, wait_for_log
from tests.durable.guarded import with_passwords
from tests.durable.tls import Certificate, tls_front
from tests.worker.conftest import wait_until, write_scenario

OUTAGE_S = 10.0
NODE = {"max_init_workers": 4, "max_run_workers": 4, "max_postrun_workers": 4}


@contextmanager
def guarded(home: Path, *nodes: str, lease_s: float) -> Iterator[tuple[EmbeddedRedis, LocalStack]]:
    """A stack whose workers and proxies reach Redis by TLS, each as the user of its role."""
    certificate = Certificate.made(home)
    conf = with_passwords(home)
    with (
        EmbeddedRedis(password="administrator", appendonly=True, config=[f'include "{conf}"']) as server,
        tls_front(certificate, server.port) as port,
    ):
        url = f"rediss://{{0}}:{{0}}@127.0.0.1:{port}/0"
        stack = LocalStack(
            home,
            scenario=str(write_scenario(home)),
            redis_url=url.format("polarq-worker"),
            env={"POLARQ_PROXY_REDIS_URL": url.format("polarq-proxy")},
            nodes=dict.fromkeys(nodes, NODE),
            sections={
                "redis": {"prefix": "polarq", "tls_ca": str(certificate.cert)},
                "gateway": {"lease_s": lease_s},
            },
        )
        with stack:
            yield server, stack


def refusals(server: EmbeddedRedis) -> list[tuple[str, str]]:
    with redis.Redis.from_url(server.url, decode_responses=True) as admin:
        found = [(entry["username"], entry["object"]) for entry in admin.acl_log()]
    return [entry for entry in found if entry[1] not in {"client|setinfo", "client"}]


def test_a_restart_of_redis_is_survived_by_every_user_over_tls(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    with guarded(tmp_path, "node0", lease_s=60) as (server, stack):
        stack.client.submit(gates.task("outage", 4))
        gates.wait_started(*ids("outage", 4))
        gates.open("outage.0")
        wait_until(lambda: stack.client.record("outage").counts.completed == 1, PATIENCE_S)
        assert refusals(server) == []
        server.kill()
        gates.open("outage.1", "outage.2")
        wait_for_log(stack, "waiting for the ledger", times=2)
        threading.Event().wait(OUTAGE_S)
        server.start()
        wait_until(lambda: stack.client.record("outage").counts.completed == 3, PATIENCE_S)
        gates.open("outage.3")
        result = stack.client.wait("outage", PATIENCE_S)
        assert [r.outcome.state for r in result.results] == [RolloutState.COMPLETED] * 4
        assert [r.trajectory and r.trajectory.fidelity.calls for r in result.results] == [1] * 4
        # The queue is back too, and every place in it.
        stack.client.submit(gates.task("after", 4))
        gates.wait_started(*ids("after", 4))
        gates.open(*ids("after", 4))
        assert stack.client.wait("after", PATIENCE_S).counts.completed == 4
        assert set(gates.starts().values()) == {1}
        assert stack.workers["node0"].exit_code is None
        assert refusals(server) == []


def test_the_reaper_takes_back_what_a_lost_node_held_with_a_workers_rights(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    with guarded(tmp_path, "node0", "node1", lease_s=2) as (server, stack):
        stack.client.submit(gates.task("lost", 4))
        gates.wait_started(*ids("lost", 4))
        held = [r.rollout_id for r in stack.client.record("lost").rollouts if r.owner == "node0"]
        assert held
        stack.workers["node0"].kill()
        wait_until(lambda: all(gates.starts()[rollout_id] == 2 for rollout_id in held), PATIENCE_S)
        gates.open(*ids("lost", 4))
        result = stack.client.wait("lost", PATIENCE_S)
        assert [r.outcome.state for r in result.results] == [RolloutState.COMPLETED] * 4
        assert {r.node_id for r in result.results} == {"node1"}
        # Its queue and its record are cleared with the same rights.
        wait_for_log(stack, "node node0 is gone without a word", "node1")
        assert refusals(server) == []
