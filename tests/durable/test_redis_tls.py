"""Redis over TLS, checked against a certificate file, for every part that talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from polarq.contracts.rollout import RolloutState
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger, Ledger, calls_for
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq.topology import Topology, broker_url, redis_url
from tests.durable.gates import PATIENCE_S
from tests.durable.sentinels import Group, wait_for_answer
from tests.durable.tls import Certificate, tls_front
from tests.worker.conftest import ask, shell_task, wait_until, write_scenario


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.made(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def port(certificate: Certificate) -> Iterator[int]:
    with EmbeddedRedis(password="secret") as server, tls_front(certificate, server.port) as found:
        yield found


@pytest.mark.parametrize("said_in", ["the topology", "the address"])
def test_a_task_runs_with_every_part_over_tls(
    port: int, certificate: Certificate, tmp_path: Path, said_in: str
) -> None:
    url = f"rediss://:secret@127.0.0.1:{port}/0"
    sections = {"redis": {"prefix": said_in[4:7], "tls_ca": str(certificate.cert)}}
    if said_in == "the address":
        sections["redis"].pop("tls_ca")
        url += f"?ssl_ca_certs={certificate.cert}"
    with LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=url, sections=sections) as stack:
        stack.client.submit(shell_task("safe", ask(2), num_samples=2))
        assert [r.outcome.state for r in stack.client.results(["safe"])] == [RolloutState.COMPLETED] * 2
        assert stack.client.app.AsyncResult("safe").get(timeout=60, disable_sync_subtasks=False)


def test_sentinels_and_the_servers_they_name_are_reached_over_tls(certificate: Certificate, tmp_path: Path) -> None:
    with (
        Group(sentinels=1, password="secret", certificate=certificate) as group,
        LocalStack(tmp_path, scenario=str(write_scenario(tmp_path)), redis_url=group.url) as stack,
    ):
        for task_id in ("before", "after"):
            stack.client.submit(shell_task(task_id, ask(1)))
            assert [r.outcome.state for r in stack.client.results([task_id])] == [RolloutState.COMPLETED]
            if task_id == "before":
                group.wait_replicated()
                group.kill_primary()
                wait_until(lambda: wait_for_answer(lambda: stack.client.nodes()[0].alive) is True, PATIENCE_S)
        # The servers would also be reached without TLS, by each other: nobody of ours does.
        results: Any = stack.client.app.backend
        with stack.client.app.connection_for_write() as broker:
            channel: Any = broker.default_channel
            clients: list[Any] = [channel.client, results.client, stack.client.ledger.redis]
            assert all(issubclass(c.connection_pool.connection_class, redis.SSLConnection) for c in clients)
        another = Certificate.made(tmp_path, "another")
        url = group.url.replace(str(certificate.cert), str(another.cert))
        with Ledger(url, calls_for(stack.topology)) as ledger, pytest.raises(LedgerUnavailable, match="Sentinels"):
            ledger.do(ledger.calls.last_event_id())


def test_a_server_with_another_certificate_is_not_believed(port: int, certificate: Certificate, tmp_path: Path) -> None:
    another = Certificate.made(tmp_path, "another")
    topology = Topology.model_validate({"redis": {"tls_ca": str(another.cert)}})
    settings = Settings.from_env({"POLARQ_REDIS_URL": f"rediss://:secret@127.0.0.1:{port}/0"})
    with (
        Ledger(redis_url(topology, settings), calls_for(topology)) as ledger,
        pytest.raises(LedgerUnavailable, match=r"not believed .*certificate.*redis\.tls_ca"),
    ):
        ledger.do(ledger.calls.last_event_id())


async def test_a_missing_certificate_file_is_told(port: int) -> None:
    topology = Topology.model_validate({"redis": {"tls_ca": "/nowhere.pem"}})
    url = redis_url(topology, Settings.from_env({"POLARQ_REDIS_URL": f"rediss://:secret@127.0.0.1:{port}/0"}))
    with Ledger(url, calls_for(topology)) as ledger, pytest.raises(LedgerUnavailable, match=r"No such file.*tls_ca"):
        ledger.do(ledger.calls.last_event_id())
    async with AsyncLedger(url, calls_for(topology)) as ledger:
        with pytest.raises(LedgerUnavailable, match=r"No such file.*tls_ca"):
            await ledger.do(ledger.calls.last_event_id())


def test_what_an_address_says_about_tls_wins_over_the_topology() -> None:
    topology = Topology.model_validate({"redis": {"tls_ca": "/ours.pem", "broker_url": "rediss://broker:6380/1"}})
    url = "rediss://ledger:6380/0?ssl_ca_certs=/theirs.pem&ssl_cert_reqs=none"
    settings = Settings.from_env({"POLARQ_REDIS_URL": url})
    assert redis_url(topology, settings) == url
    assert broker_url(topology, settings) == "rediss://broker:6380/1?ssl_cert_reqs=required&ssl_ca_certs=/ours.pem"


def test_an_address_without_tls_stays_as_it_is() -> None:
    topology = Topology.model_validate({"redis": {"tls_ca": "/ours.pem"}})
    settings = Settings.from_env({"POLARQ_REDIS_URL": "redis://:a%2Fb@127.0.0.1:6379/0?protocol=2"})
    assert redis_url(topology, settings) == "redis://:a%2Fb@127.0.0.1:6379/0?protocol=2"
