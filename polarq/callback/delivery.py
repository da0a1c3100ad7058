"""Sends one callback: to the address that was checked, signed, tried again, each try recorded.

- Tries that follow each other soon are one round. A long wait ends the round, and the next one, in whatever process,
  goes on counting: nothing is held in memory while a receiver is away for hours.
- The name is looked up once per round. Every try goes to an address of that answer which passed the check, so a
  second, different answer of the name server has no effect. No proxy settings of the environment are used.
- Redirects are not followed: a redirect is a failed try, and the last one.
- All tries carry the same delivery id, those of a round also the same body, time and signature, so that a receiver can
  drop the double.
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
from email.utils import parsedate_to_datetime
from functools import cache

import httpx

from polarq.callback.address import Target, check_callback_url, may_connect
from polarq.callback.record import CallbackAttempt, Ending
from polarq.contracts.task import Task
from polarq.errors import PolarqError
from polarq.hosts import as_address

log = logging.getLogger(__name__)

DELIVERY_HEADER = "X-Polarq-Delivery"
TIMESTAMP_HEADER = "X-Polarq-Timestamp"
SIGNATURE_HEADER = "X-Polarq-Signature"

_RETRIED_STATUSES = frozenset({408, 425, 429})
_LONGEST_RETRY_AFTER_S = 3600.0
_NOTE_CHARS = 200
_BYTES_PER_S = 1_000_000
"""A body adds this to a try's deadline: the slowest link on which a large result still arrives."""

Resolver = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """How hard a delivery is tried. As it is, for about a day."""

    tries: int = 300
    backoff_s: float = 1.0
    """Before the second try; doubles from try to try."""
    longest_backoff_s: float = 300.0
    patience_s: float = 10.0
    """A wait longer than this ends the round."""
    deadline_s: float = 10.0
    """For one try, from connecting to the status; large bodies get more."""
    answer_bytes: int = 16 * 1024
    """Most of an answer that is read."""

    def wait_s(self, number: int, asked_s: float | None) -> float:
        """Between try `number` and the next, where the receiver asked for a time too (Retry-After)."""
        wait_s = min(self.backoff_s * 2.0 ** min(number - 1, 40), self.longest_backoff_s)
        return max(wait_s, min(asked_s or 0.0, _LONGEST_RETRY_AFTER_S))

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
class Round:
    """What came of one round. `wait_s` None: the delivery is over, well or not."""

    delivered: bool
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Try:
    """What came of one try."""

    ending: Ending
    message: str = ""
    status: int | None = None
    address: str | None = None
    duration_s: float = 0.0
    retry_after_s: float | None = None


async def deliver_callback(
    task: Task,
    result_json: Callable[[], Awaitable[bytes]],
    *,
    secret: str | None,
    allowed_hosts: Sequence[str],
    record: Callable[[CallbackAttempt], Awaitable[None]],
    own: frozenset[int] = frozenset(),
    policy: CallbackPolicy = DEFAULT_POLICY,
    first: int = 1,
    resolve: Resolver = system_addresses,
    tls: ssl.SSLContext | None = None,
    clock: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Round:
    """One round: POSTs a task's result to its `callback_url`. A bad receiver never raises here.

    `first`: the number of the first try. `result_json` makes the body, once. `secret` None: the callback goes out
    without a signature. `own`: see `check_callback_url`. `record` is awaited after each try; while the ledger cannot
    take it, the tries go on. `clock` says when something was sent: a receiver looks at a signature's age.
    """
    url = task.callback_url
    if url is None or first > policy.tries:
        return Round(False)
    made_id = delivery_id(task)
    problem = check_callback_url(url, allowed_hosts, own)
    if problem is not None:
        refused = _Try(Ending.FORBIDDEN_ADDRESS, f"callback_url {problem}")
        await _record(record, task, made_id, first, refused, clock())
        return Round(False)
    target = Target.parse(url)
    body = await result_json()
    headers = _headers(target, made_id, secret, body, clock())
    addresses: list[str] = []
    for number in range(first, policy.tries + 1):
        made: _Try | None = None
        if not addresses:
            addresses, made = await _checked_addresses(target, resolve, policy.deadline_s)
        if made is None:
            made = await _send(target, addresses[(number - 1) % len(addresses)], headers, body, policy, tls)
        await _record(record, task, made_id, number, made, clock())
        if made.ending.final:
            return Round(made.ending is Ending.DELIVERED)
        wait_s = policy.wait_s(number, made.retry_after_s)
        if number < policy.tries:
            if wait_s > policy.patience_s:
                return Round(False, wait_s)
            await asyncio.sleep(wait_s)
    return Round(False)


async def _record(
    record: Callable[[CallbackAttempt], Awaitable[None]],
    task: Task,
    made_id: str,
    number: int,
    made: _Try,
    at: datetime,
) -> None:
    assert task.callback_url is not None
    level = logging.INFO if made.ending is Ending.DELIVERED else logging.WARNING
    log.log(level, "callback of task %s, try %d: %s %s", task.task_id, number, made.ending.value, made.message)
    attempt = CallbackAttempt(
        delivery_id=made_id,
        number=number,
        at=at,
        ending=made.ending,
        status=made.status,
        host=_shown_host(task.callback_url),
        address=made.address,
        duration_s=round(made.duration_s, 3),
        message=made.message,
        retry_after_s=made.retry_after_s,
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


def _headers(target: Target, made_id: str, secret: str | None, body: bytes, at: datetime) -> dict[str, str]:
    timestamp = str(int(at.timestamp()))
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
    verify = (tls or _system_trust()) if target.scheme == "https" else False
    extensions = {"sni_hostname": target.host} if as_address(target.host) is None else {}
    deadline_s = policy.try_s(len(body))
    began = time.monotonic()
    status: int | None = None
    note = ""
    retry_after_s: float | None = None
    ending = Ending.UNREACHABLE
    try:
        async with (
            asyncio.timeout(deadline_s),
            httpx.AsyncClient(verify=verify, trust_env=False, follow_redirects=False, timeout=deadline_s) as client,
            client.stream("POST", url, content=body, headers=headers, extensions=extensions) as response,
        ):
            status = response.status_code
            retry_after_s = _seconds(response.headers.get("Retry-After"))
            note = await _little(response, policy.answer_bytes)
    except (TimeoutError, httpx.TimeoutException):
        ending, note = Ending.TOO_SLOW, f"no complete answer within {deadline_s:.0f} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        note = _line(f"{type(exc).__name__}: {exc}")
    if status is not None:
        ending = _ending_of(status)
    return _Try(ending, note, status, where, time.monotonic() - began, retry_after_s)


@cache
def _system_trust() -> ssl.SSLContext:
    """Reading the system's certificates takes longer than a delivery."""
    return ssl.create_default_context()


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header: seconds, or a date."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after.strip()[:9])
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


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
