"""Callbacks: where they may go, how they are tried, what is kept of them."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from polarq.callback import AllowedHost, check_callback_url, own_ports
from polarq.callback.delivery import (
    CallbackPolicy,
    Resolver,
    deliver_callback,
    delivery_id,
    signature,
    signature_holds,
)
from polarq.callback.outbox import deliver_task_callback
from polarq.callback.record import CallbackAttempt, Ending, attempts
from polarq.client import AsyncClient
from polarq.client.limits import Judge
from polarq.contracts.rollout import RolloutState
from polarq.contracts.task import Task
from polarq.errors import LedgerUnavailable
from polarq.ledger import Keys
from polarq.topology import Topology
from tests.http.rig import Rig, a_task, running_shim

from .needs import not_here

DEFAULT_HOSTS = tuple(Topology().security.callback_hosts)
ALLOWED = ("trainer.test", *DEFAULT_HOSTS)
FAST = CallbackPolicy(tries=5, backoff_s=0.01, deadline_s=10.0)
SECRET = "a-secret"
BODY = b'{"task_id":"t"}'


# --- where callbacks may go


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://trainer.test@127.0.0.1/", "user name"),
        ("http://trainer.test:x@127.0.0.1/", "user name"),
        ("http://0x7f000001/", "roundabout"),
        ("http://2130706433/", "roundabout"),
        ("http://017700000001/", "roundabout"),
        ("http://127.1/", "roundabout"),
        ("http://127.0.0.01/", "roundabout"),
        ("http://[::ffff:127.0.0.1]/", "roundabout"),
        ("http://[::127.0.0.1]/", "roundabout"),
        ("http://[::1%25lo]/", "roundabout"),
        ("http://trainer.test:6379/", "port 6379 of 'trainer.test' is not open"),
        ("http://127.0.0.1:6379/", "port 6379 of '127.0.0.1' is not open"),
        ("http://127.0.0.1:22/", "port 22"),
        ("http://trainer.test:40000/", "add 'trainer.test:40000' or 'trainer.test:*'"),
        ("http://169.254.169.254/", "not among security.callback_hosts"),
        ("http://sub.trainer.test/", "not among security.callback_hosts"),
        ("http://trainer.test.attacker.test/", "not among security.callback_hosts"),
        ("http://trainer.test..", "not a host name"),
        ("http://tr%61iner.test/", "not a host name"),
        ("http://\u2460\u2461\u2466.0.0.1/", "plain ASCII"),
        ("http://trainer.test\\@127.0.0.1/", "plain ASCII"),
        ("http://trainer.test\t/", "plain ASCII"),
        ("http://trainer.test /", "plain ASCII"),
        ("file:///etc/passwd", "http or https"),
        ("gopher://trainer.test/", "http or https"),
        ("http:///x", "no host"),
        ("http://trainer.test:0/", "port"),
        ("http://trainer.test:65536/", "port"),
        ("http://[::1", "not an address"),
    ],
)
def test_an_address_that_turns_inwards_is_refused(url: str, says: str) -> None:
    problem = check_callback_url(url, ALLOWED)
    assert problem is not None
    assert says in problem


@pytest.mark.parametrize(
    "url",
    [
        "http://trainer.test/",
        "HTTP://TRAINER.TEST./",
        "https://trainer.test",
        "http://trainer.test:443/x?y=z#f",
        "http://127.0.0.1:43117/callback/task_result",
        "http://localhost:1024/",
        "http://[::1]:40000/",
        "http://[0:0:0:0:0:0:0:1]/",
    ],
)
def test_an_allowed_address_is_allowed_in_every_spelling_that_is_the_same(url: str) -> None:
    assert check_callback_url(url, ALLOWED) is None


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("trainer.test:6379", "http://trainer.test:6379/", True),
        ("trainer.test:6379", "http://trainer.test/", False),
        ("trainer.test:*", "http://trainer.test:1/", True),
        ("TRAINER.test.", "http://trainer.test/", True),
        ("[fd00::7]:9000", "http://[fd00::7]:9000/", True),
        ("fd00::7", "http://[fd00:0::7]/", True),
        ("gpu-*.cluster.test:*", "http://gpu-17.cluster.test:40000/", True),
        ("*:*", "http://169.254.169.254/", False),
        ("*:*", "http://localhost/", False),
        ("10.0.0.7", "http://10.0.0.7/", True),
    ],
)
def test_an_entry_names_a_host_and_its_ports(entry: str, url: str, allowed: bool) -> None:
    assert (check_callback_url(url, [entry]) is None) is allowed


@pytest.mark.parametrize("entry", ["", "trainer.test:http", "trainer.test:0", "0x7f000001", "http://trainer.test"])
def test_an_entry_that_can_never_match_is_said_and_not_skipped(entry: str) -> None:
    with pytest.raises(ValueError, match=r"is not|roundabout"):
        AllowedHost.parse(entry)
    assert "security.callback_hosts" in (check_callback_url("http://trainer.test/", [entry]) or "")


def test_ports_of_the_deployment_itself_are_closed_on_loopback() -> None:
    topology = Topology.model_validate(
        {
            "redis": {"url": "redis://127.0.0.1:7777/0"},
            "rollout": {"port": 8899},
            "gateway": {"nodes": [{"id": "n", "port": 8901}]},
        }
    )
    ports = own_ports(topology, "redis://:secret@127.0.0.1:7778/0")
    assert ports >= {7777, 7778, 8899, 8901, 8000}
    for port in ports:
        assert check_callback_url(f"http://127.0.0.1:{port}/", ALLOWED, ports) is not None
    assert check_callback_url("http://127.0.0.1:8899/", ["127.0.0.1:8899"], ports) is None


def test_a_task_with_a_callback_that_turns_inwards_is_refused_at_submit() -> None:
    topology = Topology.model_validate({"security": {"callback_hosts": list(ALLOWED)}})
    assert not Judge(a_made_task("http://127.0.0.1:43117/x"), topology, {}).problems("node0")
    for url in ("http://0x7f000001/", "http://trainer.test:6379/", "http://127.0.0.1:8080/"):
        (line,) = Judge(a_made_task(url), topology, {}).problems("node0")
        assert line.startswith("callback_url: ")


# --- a receiver


@dataclass(slots=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes
    host: str
    """The address that the connection came in on."""


Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Receiver:
    """A real HTTP receiver on one address: one scripted reply per request, the last one for all that follow."""

    replies: Sequence[bytes | Reply]
    port: int = 0
    host: str = "127.0.0.1"
    got: list[Received] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/cb?x=1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:]) if k}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.got.append(Received(head[0].split()[1], headers, body, writer.get_extra_info("sockname")[0]))
            reply = self.replies[min(len(self.got), len(self.replies)) - 1]
            if isinstance(reply, bytes):
                writer.write(reply)
                await writer.drain()
            else:
                await reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving(
    *replies: bytes | Reply, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    receiver = Receiver(replies, host=host)
    server = await asyncio.start_server(receiver.serve, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    async with server:
        yield receiver


def status(code: int, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {code} Whatever", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def break_before_the_status(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


def a_made_task(url: str) -> Task:
    return Task.load(a_task("t", callback_url=url))


async def deliver(
    url: str,
    hosts: Sequence[str] = DEFAULT_HOSTS,
    *,
    secret: str | None = SECRET,
    policy: CallbackPolicy = FAST,
    resolve: Resolver | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[bool, list[CallbackAttempt]]:
    recorded: list[CallbackAttempt] = []

    async def record(attempt: CallbackAttempt) -> None:
        recorded.append(attempt)

    async def body() -> bytes:
        return BODY

    more: dict[str, Any] = {} if resolve is None else {"resolve": resolve}
    made = await deliver_callback(
        a_made_task(url), body, secret=secret, allowed_hosts=hosts, record=record, policy=policy, tls=tls, **more
    )
    assert made.wait_s is None
    return made.delivered, recorded


# --- how they are tried


async def test_the_result_is_posted_signed_and_recorded() -> None:
    async with receiving(status(200, b'{"ok": true}')) as receiver:
        delivered, tries = await deliver(receiver.url)
    assert delivered
    (got,) = receiver.got
    assert (got.path, got.body) == ("/cb?x=1", BODY)
    assert got.headers["content-type"] == "application/json"
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    timestamp = got.headers["x-polarq-timestamp"]
    assert signature_holds(SECRET, timestamp, got.body, got.headers["x-polarq-signature"])
    assert not signature_holds(SECRET, timestamp, got.body + b" ", got.headers["x-polarq-signature"])
    assert not signature_holds(SECRET, str(int(timestamp) + 1), got.body, got.headers["x-polarq-signature"])
    (attempt,) = tries
    assert (attempt.ending, attempt.status, attempt.number) == (Ending.DELIVERED, 200, 1)
    assert attempt.delivery_id == got.headers["x-polarq-delivery"] == delivery_id(a_made_task(receiver.url))
    assert attempt.address == f"127.0.0.1:{receiver.port}"


def test_the_signature_is_plain_hmac_sha256_that_any_receiver_can_compute() -> None:
    assert signature("key", "1700000000", b"{}") == (
        "sha256=9d713ed406bb7076d4123f0dc2c39d2df5c654ed4b0cd56b52c8b4c940bd63ae"
    )


async def test_without_a_secret_there_is_no_signature() -> None:
    async with receiving(status(204)) as receiver:
        delivered, _ = await deliver(receiver.url, secret=None)
    assert delivered
    assert "x-polarq-signature" not in receiver.got[0].headers


async def test_a_receiver_that_recovers_gets_the_same_delivery_again() -> None:
    """500 twice, then 200 but the connection breaks before the status is read, then 200."""
    async with receiving(status(500), status(503, b"busy"), break_before_the_status, status(200)) as receiver:
        delivered, tries = await deliver(receiver.url)
    assert delivered
    assert [t.ending for t in tries] == [Ending.UNWELL, Ending.UNWELL, Ending.UNREACHABLE, Ending.DELIVERED]
    assert [t.number for t in tries] == [1, 2, 3, 4]
    assert (tries[1].status, tries[1].message) == (503, "busy")
    names = ("x-polarq-delivery", "x-polarq-timestamp", "x-polarq-signature")
    assert len({tuple(got.headers[name] for name in names) for got in receiver.got}) == 1
    assert {got.body for got in receiver.got} == {BODY}


async def test_a_receiver_that_stays_away_is_given_up_after_five_tries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    delivered, tries = await deliver(f"http://127.0.0.1:{port}/")
    assert not delivered
    assert [t.ending for t in tries] == [Ending.UNREACHABLE] * 5


@pytest.mark.parametrize("code", [400, 401, 404, 410, 422])
async def test_a_refusal_is_not_repeated(code: int) -> None:
    async with receiving(status(code, b"no\nthanks")) as receiver:
        delivered, tries = await deliver(receiver.url)
    assert not delivered
    assert [(t.ending, t.status, t.message) for t in tries] == [(Ending.REFUSED, code, "no thanks")]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(code: int) -> None:
    async with receiving(status(200)) as inner:
        for location in (inner.url, "http://169.254.169.254/", "file:///etc/passwd"):
            async with receiving(status(code, Location=location)) as receiver:
                delivered, tries = await deliver(receiver.url)
            assert not delivered
            assert [t.ending for t in tries] == [Ending.REDIRECTED]
            assert len(receiver.got) == 1
    assert inner.got == []


async def test_of_an_endless_answer_only_a_little_is_read() -> None:
    sent = 0

    async def a_gigabyte(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        for _sent in range(1000):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
            sent += 1_000_000

    async with receiving(a_gigabyte) as receiver:
        delivered, tries = await deliver(receiver.url)
    assert delivered
    assert len(tries[0].message) <= 200
    assert sent < 50_000_000


async def test_a_receiver_that_answers_byte_by_byte_is_cut_off() -> None:
    stop = asyncio.Event()

    async def one_byte_a_minute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"H")
        await writer.drain()
        await stop.wait()

    async with receiving(one_byte_a_minute, status(200)) as receiver:
        delivered, tries = await deliver(receiver.url, policy=replace(FAST, deadline_s=0.2))
        stop.set()
    assert delivered
    assert [t.ending for t in tries] == [Ending.TOO_SLOW, Ending.DELIVERED]


async def test_a_status_that_was_read_counts_whatever_follows_it() -> None:
    stop = asyncio.Event()

    async def hang_in_the_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx")
        await writer.drain()
        await stop.wait()

    async with receiving(hang_in_the_body) as receiver:
        delivered, tries = await deliver(receiver.url, policy=replace(FAST, deadline_s=0.2))
        stop.set()
    assert delivered
    assert len(receiver.got) == len(tries) == 1


async def test_proxy_settings_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    async with receiving(status(200)) as receiver:
        assert (await deliver(receiver.url))[0]


# --- names


def own_address() -> str:
    """An address of this machine that is not loopback. Choosing a route sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            not_here("this machine has no network address of its own")
        address: str = probe.getsockname()[0]
    return address


def answering(*answers: list[str]) -> tuple[Resolver, list[str]]:
    """A name server whose answer changes, and the names it was asked for."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answers[min(len(asked), len(answers)) - 1]

    return resolve, asked


async def test_the_address_that_was_checked_is_the_one_connected_to() -> None:
    """The name leads to the right address first and to loopback when it is asked again: it is not asked again."""
    address = own_address()
    async with (
        receiving(status(500), status(200), host=address) as outer,
        receiving(status(200), port=outer.port) as inner,
    ):
        resolve, asked = answering([address], ["127.0.0.1"])
        url = f"http://Trainer.Test.:{outer.port}/cb"
        delivered, tries = await deliver(url, ["trainer.test:*"], resolve=resolve)
    assert delivered
    assert asked == ["trainer.test"]
    assert [t.address for t in tries] == [f"{address}:{outer.port}"] * 2
    assert [got.host for got in outer.got] == [address] * 2
    assert outer.got[0].headers["host"] == f"trainer.test:{outer.port}"
    assert inner.got == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "169.254.169.254",
        "100.100.100.200",
        "224.0.0.1",
        "240.0.0.1",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "fe80::1",
        "fd00:ec2::254",
        "2002:7f00:1::",
    ],
)
async def test_a_name_that_leads_inwards_is_not_connected_to(address: str) -> None:
    resolve, asked = answering([address])
    delivered, tries = await deliver("http://trainer.test/", ["trainer.test"], resolve=resolve)
    assert not delivered
    assert [t.ending for t in tries] == [Ending.FORBIDDEN_ADDRESS]
    assert "where callbacks must not go" in tries[0].message
    assert asked == ["trainer.test"]


async def test_localhost_leads_to_this_machine_only() -> None:
    resolve, _ = answering(["203.0.113.7"])
    _, tries = await deliver("http://localhost:40000/", resolve=resolve)
    assert [t.ending for t in tries] == [Ending.FORBIDDEN_ADDRESS]
    async with receiving(status(200)) as receiver:
        assert (await deliver(f"http://localhost:{receiver.port}/"))[0]


async def test_a_name_that_is_not_known_yet_is_asked_for_again() -> None:
    calls = 0

    async def resolve(host: str, port: int) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    async with receiving(status(200)) as receiver:
        delivered, tries = await deliver(f"http://localhost:{receiver.port}/", resolve=resolve)
    assert delivered
    assert [t.ending for t in tries] == [Ending.UNKNOWN_HOST, Ending.DELIVERED]


async def test_an_address_no_longer_allowed_when_the_task_ends_gets_nothing() -> None:
    async with receiving(status(200)) as receiver:
        delivered, tries = await deliver(receiver.url, ["trainer.test"])
    assert not delivered
    assert [t.ending for t in tries] == [Ending.FORBIDDEN_ADDRESS]
    assert receiver.got == []


async def test_with_https_the_name_is_what_the_certificate_must_prove(tmp_path: Path) -> None:
    address = own_address()
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=trainer.test"),
            *("-addext", "subjectAltName=DNS:trainer.test", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    resolve, _ = answering([address])
    hosts = ["trainer.test:*", "other.test:*"]
    once = replace(FAST, tries=1)
    async with receiving(status(200), host=address, tls=server) as receiver:
        good = await deliver(
            f"https://trainer.test:{receiver.port}/", hosts, resolve=resolve, tls=trusting, policy=once
        )
        other = await deliver(f"https://other.test:{receiver.port}/", hosts, resolve=resolve, tls=trusting, policy=once)
        unknown = await deliver(f"https://trainer.test:{receiver.port}/", hosts, resolve=resolve, policy=once)
    assert [good[0], other[0], unknown[0]] == [True, False, False]
    assert "certificate" in other[1][0].message.lower()
    assert len(receiver.got) == 1


async def test_a_record_that_cannot_be_written_stops_no_try() -> None:
    async def record(_: CallbackAttempt) -> None:
        raise LedgerUnavailable("Redis is away")

    async def body() -> bytes:
        return BODY

    async with receiving(status(500), status(200)) as receiver:
        made = await deliver_callback(
            a_made_task(receiver.url), body, secret=None, allowed_hosts=DEFAULT_HOSTS, record=record, policy=FAST
        )
    assert made.delivered


# --- from the ledger


@pytest.fixture
async def shim(redis_url: str, keys: Keys) -> AsyncIterator[Rig]:
    async with running_shim(redis_url, keys, secret=SECRET) as rig:
        yield rig


async def call_back(client: AsyncClient, task_id: str = "t") -> bool | None:
    return await deliver_task_callback(client.ledger, client.topology, task_id, secret=SECRET, policy=FAST)


async def test_a_finished_tasks_result_goes_out_as_polars_json_and_once(shim: Rig) -> None:
    async with receiving(status(500), status(200)) as receiver:
        await shim.submit(a_task(samples=2, callback_url=receiver.url))
        await shim.end("t.0")
        assert await call_back(shim.client) is None
        await shim.end("t.1", state=RolloutState.FAILED, reward=None)
        first, second = await asyncio.gather(call_back(shim.client), call_back(shim.client))
        assert {first, second} == {True, None}
        assert await call_back(shim.client) is None
    assert len(receiver.got) == 2
    result = json.loads(receiver.got[1].body)
    assert {"task_id", "status", "results", "result_paths"} <= set(result)
    assert (result["task_id"], result["status"]) == ("t", "completed")
    assert [session["status"] for session in result["results"]] == ["COMPLETED", "ERROR"]
    assert result["results"][0]["trajectory"]["traces"][0]["response_ids"] == [7, 8, 9]
    kept = (await shim.http.get("/rollout/task/t/callbacks")).json()["attempts"]
    assert [(attempt["ending"], attempt["status"]) for attempt in kept] == [("unwell", 500), ("delivered", 200)]
    assert kept[0]["host"] == f"127.0.0.1:{receiver.port}"


async def test_a_task_without_a_callback_and_an_unknown_task_need_nothing(shim: Rig) -> None:
    await shim.submit(a_task())
    await shim.end("t.0")
    assert await call_back(shim.client) is None
    assert await call_back(shim.client, "nope") is None


async def test_a_task_cancelled_in_the_queue_is_told_to_its_trainer_too(shim: Rig) -> None:
    arrived = asyncio.Event()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(status(200))
        await writer.drain()
        arrived.set()

    async with receiving(take) as receiver:
        await shim.submit(a_task(callback_url=receiver.url))
        assert (await shim.http.delete("/rollout/task/t")).json()["status"] == "cancelled"
        async with asyncio.timeout(30):
            await arrived.wait()
    assert json.loads(receiver.got[0].body)["status"] == "cancelled"
    assert signature_holds(
        SECRET,
        receiver.got[0].headers["x-polarq-timestamp"],
        receiver.got[0].body,
        receiver.got[0].headers["x-polarq-signature"],
    )


async def test_a_delivery_that_is_cut_off_may_be_made_by_another_process(shim: Rig) -> None:
    started, stop = asyncio.Event(), asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        started.set()
        await stop.wait()

    async with receiving(hang, status(200)) as receiver:
        await shim.submit(a_task(callback_url=receiver.url))
        await shim.end("t.0")
        first = asyncio.create_task(call_back(shim.client))
        await started.wait()
        assert await call_back(shim.client) is None
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        stop.set()
        assert await call_back(shim.client) is True
    assert receiver.got[0].headers["x-polarq-delivery"] == receiver.got[1].headers["x-polarq-delivery"]


async def test_a_delivery_given_up_is_recorded_and_not_begun_again(shim: Rig) -> None:
    async with receiving(status(404)) as receiver:
        await shim.submit(a_task(callback_url=receiver.url))
        await shim.end("t.0")
        assert await call_back(shim.client) is False
        assert await call_back(shim.client) is None
    ledger = shim.client.ledger
    (attempt,) = await ledger.do(attempts(ledger.calls.keys, "t"))
    assert attempt.ending is Ending.REFUSED
    assert await ledger.redis.ttl(ledger.calls.keys.callbacks("t")) > 0


async def test_a_refused_callback_address_is_a_422_with_its_reason(shim: Rig) -> None:
    for url in (
        "http://0x7f000001/",
        "http://trainer.test/",
        "http://trainer.test@127.0.0.1/",
        "http://127.0.0.1:6379/",
    ):
        response = await shim.http.post("/rollout/task/submit", json=a_task(callback_url=url))
        assert response.status_code == 422
        assert response.json()["detail"][0]["loc"] == ["body", "callback_url"]
