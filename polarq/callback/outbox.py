"""A finished task's callback, from the ledger: claimed so that one process sends it; every try is kept with the task.

Any process that sees a task end may call `deliver_task_callback`; a second call finds the claim and does nothing. The
claim is short and renewed while the delivery goes on. That of a process that died runs out within `CLAIM_S`, and the
reaper has another one deliver; the delivery id is the same then, so that the receiver can drop a double.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable

from polarq.callback.address import own_ports
from polarq.callback.delivery import DEFAULT_POLICY, CallbackAttempt, CallbackPolicy, deliver_callback
from polarq.errors import LedgerUnavailable
from polarq.http.task_body import task_body
from polarq.ledger import AsyncLedger
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.topology.models import Topology

log = logging.getLogger(__name__)

ATTEMPTS_KEPT = 50
CLAIM_S = 30.0
"""How long a claim holds without being renewed."""

_DONE = "done"
_RENEW_IF_MINE = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
)
_DELETE_IF_MINE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def record_attempt(keys: Keys, task_id: str, attempt: CallbackAttempt, keep_s: int) -> Call[None]:
    key = keys.callbacks(task_id)
    commands = (
        ("RPUSH", key, attempt.model_dump_json()),
        ("LTRIM", key, -ATTEMPTS_KEPT, -1),
        ("EXPIRE", key, keep_s),
    )
    return Call(lambda _: None, commands=commands)


def attempts(keys: Keys, task_id: str) -> Call[list[CallbackAttempt]]:
    """Every kept try of a task's callback, oldest first."""
    command = ("LRANGE", keys.callbacks(task_id), 0, -1)
    return Call(lambda replies: [CallbackAttempt.stored(r) for r in replies[0]], commands=(command,))


def _claim(keys: Keys, task_id: str, owner: str, claim_s: float) -> Call[bool]:
    command = ("SET", keys.callback_claim(task_id), owner, "NX", "PX", int(claim_s * 1000))
    return Call(lambda replies: replies[0] is not None, commands=(command,))


def _renew(keys: Keys, task_id: str, owner: str, claim_s: float) -> Call[bool]:
    command = ("EVAL", _RENEW_IF_MINE, 1, keys.callback_claim(task_id), owner, int(claim_s * 1000))
    return Call(lambda replies: int(replies[0]) == 1, commands=(command,))


def _release(keys: Keys, task_id: str, owner: str) -> Call[None]:
    command = ("EVAL", _DELETE_IF_MINE, 1, keys.callback_claim(task_id), owner)
    return Call(lambda _: None, commands=(command,))


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
) -> bool | None:
    """Tells a finished task's callback address, once. Takes as long as the tries do: run it as its own asyncio task.

    True: delivered; False: given up (the ledger says why); None: nothing to do (unknown, no address, not ended, or
    claimed by another process, also while this one delivered, because it could not renew its claim). Raises
    `LedgerUnavailable`. When it is cancelled, another process may deliver.
    """
    keys = ledger.calls.keys
    record = await ledger.do(ledger.calls.task(task_id, with_request=True))
    if record is None or record.request is None or record.request.callback_url is None or not record.state.terminal:
        return None
    owner = secrets.token_hex(8)
    if not await ledger.do(_claim(keys, task_id, owner, claim_s)):
        return None

    async def keep(attempt: CallbackAttempt) -> None:
        await ledger.do(record_attempt(keys, task_id, attempt, ledger.calls.keep_s))

    async def body() -> bytes:
        return await task_body(ledger, record)

    delivery = deliver_callback(
        record.request,
        body,
        secret=secret,
        allowed_hosts=topology.security.callback_hosts,
        record=keep,
        own=own_ports(topology, ledger.url),
        policy=policy,
    )
    delivered: bool | None = None
    try:
        delivered = await _while_held(ledger, task_id, owner, claim_s, delivery)
    finally:
        over = delivered is not None
        await ledger.do(_settle(keys, task_id, ledger.calls.keep_s) if over else _release(keys, task_id, owner))
    return delivered


async def _while_held(
    ledger: AsyncLedger, task_id: str, owner: str, claim_s: float, delivery: Awaitable[bool]
) -> bool | None:
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
            if not await ledger.do(_renew(ledger.calls.keys, task_id, owner, claim_s)):
                return
        except LedgerUnavailable as exc:
            log.warning("callback of task %s: the claim could not be renewed: %s", task_id, exc)
