"""A finished task's callback, from the ledger: claimed so that one process sends it; every try is kept with the task.

Any process that sees a task end may call `deliver_task_callback`; a second call finds the claim and does nothing. The
claim is short and renewed while a round of tries goes on. When it runs out, because its process died, or when the wait
after a round is over, the task is due in `untold`, and the reaper delivers it: at least once, with one delivery id, so
that the receiver can drop a double.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from polarq.callback.address import own_ports
from polarq.callback.delivery import DEFAULT_POLICY, CallbackPolicy, Round, deliver_callback
from polarq.callback.lanes import Lanes
from polarq.callback.record import CallbackAttempt, last_number, record_attempt
from polarq.contracts.task import Task
from polarq.errors import LedgerUnavailable
from polarq.http.task_body import task_body
from polarq.ledger import AsyncLedger, TaskRecord
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.ledger.retention import server_ms
from polarq.topology.models import Topology

log = logging.getLogger(__name__)

CLAIM_S = 12.0
"""How long a claim holds without being renewed; three renewals fall into it."""

_DONE = "done"
# KEYS claim, untold ; ARGV owner, milliseconds, task id. The task is looked at again when its time is over.
_DUE = """
local t = redis.call('TIME')
redis.call('ZADD', KEYS[2], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2], ARGV[3])
return 1
"""
_CLAIM = "if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end" + _DUE
_IF_MINE = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end "
_RENEW = _IF_MINE + "redis.call('PEXPIRE', KEYS[1], ARGV[2])" + _DUE
_RELEASE = _IF_MINE + "redis.call('DEL', KEYS[1])" + _DUE


def _hold_claim(script: str, keys: Keys, task_id: str, owner: str, seconds: float) -> Call[bool]:
    command = ("EVAL", script, 2, keys.callback_claim(task_id), keys.untold, owner, int(seconds * 1000), task_id)
    return Call(lambda replies: int(replies[0]) == 1, commands=(command,))


def _settle(keys: Keys, task_id: str, keep_s: int) -> Call[None]:
    """The delivery is over, well or not: nobody shall send it again."""
    return Call(lambda _: None, commands=(("SET", keys.callback_claim(task_id), _DONE, "EX", keep_s),))


async def deliver_task_callback(
    ledger: AsyncLedger,
    topology: Topology,
    task_id: str,
    *,
    secret: str | None,
    policy: CallbackPolicy = DEFAULT_POLICY,
    claim_s: float = CLAIM_S,
    lanes: Lanes | None = None,
) -> bool | None:
    """Tells a finished task's callback address, in one round of tries. Run it as its own asyncio task; with `lanes` it
    waits for a place first.

    True: delivered; False: given up, or put off (the ledger says why); None: nothing to do (unknown, no address, not
    ended, or claimed by another process, also while this one delivered, because it could not renew its claim). Raises
    `LedgerUnavailable`. When it is cancelled, another process may deliver.
    """
    record = await ledger.do(ledger.calls.task(task_id, with_request=True))
    if record is None or record.request is None or record.request.callback_url is None or not record.state.terminal:
        return None
    if lanes is None:
        return await _round(ledger, topology, record, record.request, secret, policy, claim_s)
    async with lanes.place(urlsplit(record.request.callback_url).netloc):
        return await _round(ledger, topology, record, record.request, secret, policy, claim_s)


async def _round(
    ledger: AsyncLedger, topology: Topology, record: TaskRecord, request: Task, secret: str | None,
    policy: CallbackPolicy, claim_s: float,
) -> bool | None:  # fmt: skip
    keys, task_id = ledger.calls.keys, record.task_id
    owner = secrets.token_hex(8)
    if not await ledger.do(_hold_claim(_CLAIM, keys, task_id, owner, claim_s)):
        return None

    async def keep(attempt: CallbackAttempt) -> None:
        await ledger.do(record_attempt(keys, task_id, attempt, ledger.calls.keep_s))

    async def body() -> bytes:
        return await task_body(ledger, record)

    made: Round | None = None
    try:
        delivery = deliver_callback(
            request,
            body,
            secret=secret,
            allowed_hosts=topology.security.callback_hosts,
            record=keep,
            own=own_ports(topology, ledger.url),
            policy=policy,
            first=await ledger.do(last_number(keys, task_id)) + 1,
            clock=await _server_clock(ledger),
        )
        made = await _while_held(ledger, task_id, owner, claim_s, delivery)
    finally:
        if made is not None and made.wait_s is None:
            await ledger.do(_settle(keys, task_id, ledger.calls.keep_s))
        else:
            wait_s = 0.0 if made is None or made.wait_s is None else made.wait_s
            await ledger.do(_hold_claim(_RELEASE, keys, task_id, owner, wait_s))
    return None if made is None else made.delivered


async def _server_clock(ledger: AsyncLedger) -> Callable[[], datetime]:
    """The server's time from now on, whatever this host's clock says or is set to."""
    at = datetime.fromtimestamp(await ledger.do(server_ms()) / 1000, UTC)
    told = time.monotonic()
    return lambda: at + timedelta(seconds=time.monotonic() - told)


async def _while_held(
    ledger: AsyncLedger, task_id: str, owner: str, claim_s: float, delivery: Awaitable[Round]
) -> Round | None:
    """What came of the delivery; None when the claim went to another process before, which delivers now."""
    delivering = asyncio.ensure_future(delivery)
    holding = asyncio.create_task(_hold(ledger, task_id, owner, claim_s))
    try:
        await asyncio.wait({delivering, holding}, return_when=asyncio.FIRST_COMPLETED)
        if delivering.done():
            return delivering.result()
        log.warning("callback of task %s: the claim went to another process, which delivers it", task_id)
        return None
    finally:
        for part in (delivering, holding):
            part.cancel()
        await asyncio.gather(delivering, holding, return_exceptions=True)


async def _hold(ledger: AsyncLedger, task_id: str, owner: str, claim_s: float) -> None:
    """Renews the claim; ends when it is somebody else's."""
    while True:
        await asyncio.sleep(claim_s / 3)
        try:
            if not await ledger.do(_hold_claim(_RENEW, ledger.calls.keys, task_id, owner, claim_s)):
                return
        except LedgerUnavailable as exc:
            log.warning("callback of task %s: the claim could not be renewed: %s", task_id, exc)
