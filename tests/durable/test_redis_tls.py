"""Redis over TLS, checked against a certificate file, for every part that talks to it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from polarq.contracts.rollout import RolloutState
from polarq.errors import LedgerUnavailable
from polarq.ledger import AsyncLedger, Ledger, calls_for
from polarq.settings import Settings
from polarq.testing.redis import EmbeddedRedis
from polarq.testing.stack import LocalStack
from polarq.topology import Topology, broker_url, redis_url
from tests.worker.conftest import ask, shell_task, write_scenario


@dataclass(frozen=True)
class Certificate:
    """A self-signed one for 127.0.0.1, which vouches for itself."""

    cert: Path
    key: Path

    @classmethod
    def made(cls, folder: Path, name: str = "redis") -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
        signed = (
            x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder / f"{name}.crt", folder / f"{name}.key")
        made.cert.write_bytes(signed.public_bytes(Encoding.PEM))
        made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made


@contextmanager
def tls_server(certificate: Certificate) -> Iterator[int]:
    """The port of a Redis that is reached by TLS only. Not every server is built with it (the one that comes as a
    package is not), so TLS ends in front of it, as it does behind a load balancer."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    loop = asyncio.new_event_loop()
    with EmbeddedRedis(password="secret") as server:
        thread = threading.Thread(target=loop.run_forever, name="tls")
        thread.start()
        try:
            listening = asyncio.run_coroutine_threadsafe(_listening(context, server.port), loop).result()
            yield listening.sockets[0].getsockname()[1]
        finally:
            asyncio.run_coroutine_threadsafe(_closed(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _listening(context: ssl.SSLContext, redis_port: int) -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_connection("127.0.0.1", redis_port)
        await asyncio.gather(_passed_on(reader, ahead), _passed_on(behind, writer))

    return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)


async def _passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _closed() -> None:
    """Ends what is still being passed on."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.made(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def port(certificate: Certificate) -> Iterator[int]:
    with tls_server(certificate) as found:
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
