"""Sends one callback: to the address that was checked, signed, tried again, each try recorded.

- The name is looked up once per delivery. Every try goes to an address of that answer which passed the check, so a
  second, different answer of the name server has no effect. No proxy settings of the environment are used.
- Redirects are not followed: a redirect is a failed try, and the last one.
- All tries carry the same body, delivery id, time and signature, so that a receiver can drop the double.
- A try ends with its deadline. Of an answer only a little is read; a 2xx status is a delivery whatever follows it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

import httpx

from polarq.callback.address import Target, as_address, check_callback_url, may_connect
from polarq.contracts.base import Contract
from polarq.contracts.task import Task
from polarq.errors import PolarqError

log = logging.getLogger(__name__)

DELIVERY_HEADER = "X-Polarq-Delivery"
TIMESTAMP_HEADER = "X-Polarq-Timestamp"
SIGNATURE_HEADER = "X-Polarq-Signature"

_RETRIED_STATUSES = frozenset({408, 425, 429})
_NOTE_CHARS = 200
_BYTES_PER_S = 1_000_000
"""A body adds this to a try's deadline: the slowest link on which a large result still arrives."""

Resolver = Callable[[str, int], Awaitable[list[str]]]


class Ending(StrEnum):
    """How one try ended."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    """The receiver answered with a status that another try will not change."""
    REDIRECTED = "redirected"
    UNWELL = "unwell"
    """The receiver answered that it cannot now (408, 425, 429, 5xx)."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke before a status came."""
    TOO_SLOW = "too_slow"
    UNKNOWN_HOST = "unknown_host"
    FORBIDDEN_ADDRESS = "forbidden_address"
    """The address is not allowed, or its name leads to where callbacks must not go. Nothing was sent."""

    @property
    def final(self) -> bool:
        return self in {Ending.DELIVERED, Ending.REFUSED, Ending.REDIRECTED, Ending.FORBIDDEN_ADDRESS}


class CallbackAttempt(Contract):
    """One try, as it is kept in the ledger."""

    delivery_id: str
    number: int
    """From 1."""
    at: datetime
    ending: Ending
    status: int | None = None
    host: str
    """Host and port as the task named them (the rest of the address may hold a secret)."""
    address: str | None = None
    """Where the connection went."""
    duration_s: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """How hard a delivery is tried."""

    tries: int = 5
    backoff_s: float = 1.0
    """Before the second try; doubles from try to try."""
    deadline_s: float = 10.0
    """For one try, from connecting to the status; large bodies get more."""
    answer_bytes: int = 16 * 1024
    """Most of an answer that is read."""

    def try_s(self, body_bytes: int) -> float:
        return self.deadline_s + body_bytes / _BYTES_PER_S


def delivery_id(task: Task) -> str:
    """The same for every try of the same request's callback, also from another process."""
    return hashlib.sha256(f"{task.task_id}\n{task.digest()}".encode()).hexdigest()[:32]


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """`sha256=` and the hex HMAC-SHA256 over `<timestamp>.<body>`."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return f"sha256={digest.hexdigest()}"


def signature_holds(secret: str, timestamp: str, body: bytes, given: str) -> bool:
    """For receivers, in constant time. Look at the timestamp's age too, and drop a delivery id seen before."""
    return hmac.compare_digest(signature(secret, timestamp, body).encode(), given.encode())


async def system_addresses(host: str, port: int) -> list[str]:
    """What the system's resolver says, in its order. Raises OSError."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


DEFAULT_POLICY = CallbackPolicy()


@dataclass(frozen=True, slots=True)
class _Try:
    """What came of one try."""

    ending: Ending
    message: str = ""
    status: int | None = None
    address: str | None = None
    duration_s: float = 0.0


async def deliver_callback(
    task: Task,
    result_json: Callable[[], Awaitable[bytes]],
    *,
    secret: str | None,
    allowed_hosts: Sequence[str],
    record: Callable[[CallbackAttempt], Awaitable[None]],
    own: frozenset[int] = frozenset(),
    policy: CallbackPolicy = DEFAULT_POLICY,
    resolve: Resolver = system_addresses,
    tls: ssl.SSLContext | None = None,
) -> bool:
    """POSTs a task's result to its `callback_url`; True when the receiver took it. A bad receiver never raises here.

    `result_json` makes the body, once. `secret` None: the callback goes out without a signature. `own`: see
    `check_callback_url`. `record` is awaited after each try; while the ledger cannot take it, the tries go on.
    """
    url = task.callback_url
    if url is None:
        return False
    made_id = delivery_id(task)
    problem = check_callback_url(url, allowed_hosts, own)
    if problem is not None:
        await _record(record, task, made_id, 1, _Try(Ending.FORBIDDEN_ADDRESS, f"callback_url {problem}"))
        return False
    target = Target.parse(url)
    body = await result_json()
    headers = _headers(target, made_id, secret, body)
    addresses: list[str] = []
    for number in range(1, policy.tries + 1):
        if number > 1:
            await asyncio.sleep(policy.backoff_s * 2.0 ** (number - 2))
        made: _Try | None = None
        if not addresses:
            addresses, made = await _checked_addresses(target, resolve, policy.deadline_s)
        if made is None:
            made = await _send(target, addresses[(number - 1) % len(addresses)], headers, body, policy, tls)
        await _record(record, task, made_id, number, made)
        if made.ending.final:
            return made.ending is Ending.DELIVERED
    return False


async def _record(
    record: Callable[[CallbackAttempt], Awaitable[None]], task: Task, made_id: str, number: int, made: _Try
) -> None:
    assert task.callback_url is not None
    level = logging.INFO if made.ending is Ending.DELIVERED else logging.WARNING
    log.log(level, "callback of task %s, try %d: %s %s", task.task_id, number, made.ending.value, made.message)
    attempt = CallbackAttempt(
        delivery_id=made_id,
        number=number,
        at=datetime.now(UTC),
        ending=made.ending,
        status=made.status,
        host=_shown_host(task.callback_url),
        address=made.address,
        duration_s=round(made.duration_s, 3),
        message=made.message,
    )
    try:
        await record(attempt)
    except PolarqError as exc:
        log.warning("callback of task %s: try %d could not be recorded: %s", task.task_id, number, exc)


def _shown_host(url: str) -> str:
    try:
        return Target.parse(url).authority
    except ValueError:
        return "?"


def _headers(target: Target, made_id: str, secret: str | None, body: bytes) -> dict[str, str]:
    timestamp = str(int(time.time()))
    headers = {
        "Host": target.authority,
        "Content-Type": "application/json",
        "User-Agent": "polarq",
        "Accept-Encoding": "identity",
        DELIVERY_HEADER: made_id,
        TIMESTAMP_HEADER: timestamp,
    }
    if secret is not None:
        headers[SIGNATURE_HEADER] = signature(secret, timestamp, body)
    return headers


async def _checked_addresses(target: Target, resolve: Resolver, deadline_s: float) -> tuple[list[str], _Try | None]:
    """Addresses that may be connected to; when there are none, why."""
    if target.address is not None:
        return [str(target.address)], None
    try:
        async with asyncio.timeout(deadline_s):
            found = await resolve(target.host, target.port)
    except (OSError, TimeoutError) as exc:
        return [], _Try(Ending.UNKNOWN_HOST, _line(f"'{target.host}' cannot be looked up: {exc or 'too slow'}"))
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
    fit = [str(address) for address in addresses if may_connect(target, address)]
    if not fit:
        shown = ", ".join(str(address) for address in addresses) or "nothing"
        return [], _Try(Ending.FORBIDDEN_ADDRESS, f"'{target.host}' leads to {shown}, where callbacks must not go")
    return fit, None


async def _send(
    target: Target,
    address: str,
    headers: dict[str, str],
    body: bytes,
    policy: CallbackPolicy,
    tls: ssl.SSLContext | None,
) -> _Try:
    """One try at one address. The name stands in the Host header and, with https, is what the certificate proves."""
    host = f"[{address}]" if ":" in address else address
    where = f"{host}:{target.port}"
    url = f"{target.scheme}://{where}{target.path}"
    verify = (tls or ssl.create_default_context()) if target.scheme == "https" else False
    extensions = {"sni_hostname": target.host} if as_address(target.host) is None else {}
    deadline_s = policy.try_s(len(body))
    began = time.monotonic()
    status: int | None = None
    note = ""
    ending = Ending.UNREACHABLE
    try:
        async with (
            asyncio.timeout(deadline_s),
            httpx.AsyncClient(verify=verify, trust_env=False, follow_redirects=False, timeout=deadline_s) as client,
            client.stream("POST", url, content=body, headers=headers, extensions=extensions) as response,
        ):
            status = response.status_code
            note = await _little(response, policy.answer_bytes)
    except (TimeoutError, httpx.TimeoutException):
        ending, note = Ending.TOO_SLOW, f"no complete answer within {deadline_s:.0f} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        note = _line(f"{type(exc).__name__}: {exc}")
    if status is not None:
        ending = _ending_of(status)
    return _Try(ending, note, status, where, time.monotonic() - began)


async def _little(response: httpx.Response, limit: int) -> str:
    """The beginning of an answer, as one line for the record."""
    kept = b""
    async for chunk in response.aiter_raw():
        kept += chunk[: limit - len(kept)]
        if len(kept) >= limit:
            break
    return _line(kept.decode("utf-8", "replace"))


def _ending_of(status: int) -> Ending:
    if 200 <= status < 300:
        return Ending.DELIVERED
    if 300 <= status < 400:
        return Ending.REDIRECTED
    return Ending.UNWELL if status in _RETRIED_STATUSES or status >= 500 else Ending.REFUSED


def _line(text: str) -> str:
    return " ".join(text.split())[:_NOTE_CHARS]
