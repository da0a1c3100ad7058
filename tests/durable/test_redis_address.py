"""Addresses of Redis: one server or Sentinels, as each part and Celery read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from polarq.celery import celery_settings
from polarq.errors import InvalidTopology, LedgerUnavailable
from polarq.ledger import Ledger, calls_for, without_password
from polarq.ledger.servers import async_client, sync_client
from polarq.settings import Settings
from polarq.topology import Topology, load_topology
from polarq.topology.redis_address import Sentinels


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("sentinel://a:1,b:2/3?master=m", (("a", 1), ("b", 2))),
        ("sentinel://a,b/3?master=m", (("a", 26379), ("b", 26379))),
        ("sentinel://a:1;b:2/3?master=m", (("a", 1), ("b", 2))),
        ("sentinel://a:1;sentinel://b:2/3?master=m", (("a", 1), ("b", 2))),
        ("sentinel://u:p@a:1/3;sentinel://u:p@b:2/3?master=m", (("a", 1), ("b", 2))),
        ("sentinel://[::1]:1,b:2/3?master=m", (("::1", 1), ("b", 2))),
    ],
)
def test_an_address_of_sentinels_is_read_however_it_is_written(url: str, hosts: tuple[tuple[str, int], ...]) -> None:
    found = Sentinels.parse(url)
    assert found is not None
    assert (found.hosts, found.master, found.db, found.tls) == (hosts, "m", 3, None)


def test_celery_is_told_of_the_same_servers() -> None:
    topology = Topology.model_validate(
        {
            "redis": {
                "broker_url": "sentinels://worker:p%40ss@b1,b2:7/1?master=queues&sentinel_password=s",
                "tls_ca": "/ca",
            }
        }
    )
    settings = Settings.from_env({"POLARQ_REDIS_URL": "sentinel://:secret@a:1,b:2/0?master=ledger"})
    told = celery_settings(topology, settings)
    assert told["broker_url"] == "sentinel://worker:p%40ss@b1:26379/1;sentinel://worker:p%40ss@b2:7/1"
    assert told["broker_transport_options"]["master_name"] == "queues"
    asked = told["broker_transport_options"]["sentinel_kwargs"]
    assert (asked["password"], asked["ssl"], asked["ssl_ca_certs"]) == ("s", True, "/ca")
    assert told["broker_use_ssl"] == {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca"}
    assert told["result_backend"] == "sentinel://:secret@a:1/0;sentinel://:secret@b:2/0"
    assert told["result_backend_transport_options"]["master_name"] == "ledger"
    assert told["redis_backend_use_ssl"] is None


def test_no_password_of_an_address_is_shown() -> None:
    url = "sentinel://u:p@h1:1,h2:2/0?master=m&sentinel_password=s"
    assert without_password(url) == "sentinel://u:***@h1:1,h2:2/0?master=m&sentinel_password=***"
    assert without_password("redis://:p@s@h:1/0") == "redis://:***@h:1/0"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sentinel://h:1/x", "'x' is no number of a database"),
        ("sentinel://h:1,:2/0", "':2' is not HOST:PORT"),
        ("sentinel://h:99999999/0", "'h:99999999' is not HOST:PORT"),
        ("sentinel://h/0?service=m", "'service' is no option"),
    ],
)
def test_an_address_that_cannot_be_read_is_told_with_the_form(url: str, told: str) -> None:
    with pytest.raises(LedgerUnavailable, match=told):
        Ledger(url, calls_for(Topology()))


def test_sentinels_that_are_not_there_or_know_no_such_primary_are_one_line(redis_url: str) -> None:
    for url in ("sentinel://127.0.0.1:1/0", redis_url.replace("redis://", "sentinel://").partition("/0")[0] + "/0"):
        with Ledger(url, calls_for(Topology())) as ledger, pytest.raises(LedgerUnavailable, match=r"Sentinels|refused"):
            ledger.do(ledger.calls.last_event_id())


def test_a_sentinel_address_that_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("redis:\n  prefix: x\n  broker_url: sentinel://h/0?service=m\n")
    with pytest.raises(InvalidTopology, match=r"line 3.*redis\.broker_url.*'service' is no option"):
        load_topology(path)
    settings = Settings.from_env({"POLARQ_REDIS_URL": "sentinel://h/zero"})
    with pytest.raises(LedgerUnavailable, match="'zero' is no number of a database"):
        celery_settings(Topology(), settings)


async def test_that_no_sentinel_knows_a_primary_is_said_in_a_few_words() -> None:
    url = "sentinel://:secret@127.0.0.1:1,127.0.0.1:2/0?master=m"
    client = async_client(url, max_connections=1, timeout=1, retry=AsyncRetry(NoBackoff(), 0))
    try:
        with pytest.raises(redis.ConnectionError, match=r"^no Sentinel names a primary of 'm' that answers$"):
            await client.ping()
    finally:
        await client.aclose()
    with sync_client(url, retry=Retry(NoBackoff(), 0)) as sync, pytest.raises(redis.ConnectionError, match=r"^no Sent"):
        sync.ping()
