"""A finished task's callback, from the ledger: claimed so that one process sends it; every try is kept with the task.

Any process that sees a task end may call `deliver_task_callback`; a second call finds the claim and does nothing. The
claim of a process that died runs out, and the delivery id is the same then, so that the receiver can drop a double.
"""

from __future__ import annotations

import secrets

from polarq.callback.address import own_ports
from polarq.callback.delivery import DEFAULT_POLICY, CallbackAttempt, CallbackPolicy, deliver_callback
from polarq.http.task_body import task_body
from polarq.ledger import AsyncLedger
from polarq.ledger.calls import Call
from polarq.ledger.keys import Keys
from polarq.topology.models import Topology

ATTEMPTS_KEPT = 50
_CLAIM_S = 15 * 60
_DONE = "done"
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
    return Call(lambda replies: [CallbackAttempt.model_validate_json(r) for r in replies[0]], commands=(command,))


def _claim(keys: Keys, task_id: str, owner: str) -> Call[bool]:
    command = ("SET", keys.callback_claim(task_id), owner, "NX", "EX", _CLAIM_S)
    return Call(lambda replies: replies[0] is not None, commands=(command,))


def _extend(keys: Keys, task_id: str, seconds: float) -> Call[None]:
    return Call(lambda _: None, commands=(("EXPIRE", keys.callback_claim(task_id), int(seconds) + 60),))


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
) -> bool | None:
    """Tells a finished task's callback address, once. Takes as long as the tries do: run it as its own asyncio task.

    True: delivered; False: given up (the ledger says why); None: nothing to do (unknown, no address, not ended, or
    claimed by another process). Raises `LedgerUnavailable`. When it is cancelled, another process may deliver.
    """
    keys = ledger.calls.keys
    record = await ledger.do(ledger.calls.task(task_id, with_request=True))
    if record is None or record.request is None or record.request.callback_url is None or not record.state.terminal:
        return None
    owner = secrets.token_hex(8)
    if not await ledger.do(_claim(keys, task_id, owner)):
        return None

    async def keep(attempt: CallbackAttempt) -> None:
        await ledger.do(record_attempt(keys, task_id, attempt, ledger.calls.keep_s))

    async def body() -> bytes:
        made = await task_body(ledger, record)
        await ledger.do(_extend(keys, task_id, policy.longest_s(len(made))))
        return made

    over = False
    try:
        delivered = await deliver_callback(
            record.request,
            body,
            secret=secret,
            allowed_hosts=topology.security.callback_hosts,
            record=keep,
            own=own_ports(topology, ledger.url),
            policy=policy,
        )
        over = True
    finally:
        await ledger.do(_settle(keys, task_id, ledger.calls.keep_s) if over else _release(keys, task_id, owner))
    return delivered
