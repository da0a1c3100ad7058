"""Sandboxes whose worker is dead: found by their records in the ledger, stopped by their own runtime plug-in.

Most sandboxes end with their worker. One that does not (a container, a remote machine) says so by its `reach`; then its
record is in the ledger for as long as it may run. A worker that starts stops what its dead predecessors left on this
machine; what can be stopped from anywhere the reaper stops, once the node is gone and the attempt is over.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Sequence

from polarq.contracts.sandbox import Reach, SandboxRecord
from polarq.errors import LedgerUnavailable, PolarqError, UnknownPlugin
from polarq.ledger import AsyncLedger, Claim
from polarq.ledger.sandboxes import drop_sandbox, of_no_use, sandboxes_of
from polarq.topology import Topology
from polarq_worker.runtimes.base import Runtime
from polarq_worker.runtimes.create import runtime_named

log = logging.getLogger("polarq.worker.orphans")

_STOP_S = 60.0
"""How long one sandbox may take to be stopped."""
_AT_ONCE = 8


def record_of(runtime: Runtime, node_id: str, incarnation: str, claim: Claim | None) -> SandboxRecord | None:
    """None for a sandbox that ends with its worker. Without a claim it is the worker's own: it waits for a rollout."""
    if runtime.reach is Reach.WORKER:
        return None
    return SandboxRecord(
        runtime=runtime.spec.import_path or runtime.spec.backend,
        runtime_id=runtime.runtime_id,
        handle=runtime.handle,
        reach=runtime.reach,
        node_id=node_id,
        incarnation=incarnation,
        hostname=socket.gethostname(),
        rollout_id="" if claim is None else claim.rollout_id,
        attempt=0 if claim is None else claim.attempt,
        token=0 if claim is None else claim.token,
    )


class Orphans:
    """One worker's. Its steps may raise `LedgerUnavailable`; that a sandbox cannot be stopped is logged, and the next
    step tries again."""

    def __init__(self, ledger: AsyncLedger, topology: Topology) -> None:
        self._ledger = ledger
        self._keys = ledger.calls.keys
        self._allowed = topology.security.allowed_modules

    async def stop_own(self, node_id: str, incarnation: str, dead: Collection[str] = ()) -> list[str]:
        """Stops what other workers of this node left on this machine: those that are dead, and whoever else no longer
        has the attempt by the ledger's word. Answers the runtime ids."""
        records = await self._ledger.do(sandboxes_of(self._keys, [node_id]))
        others = [record for record in records if record.incarnation not in {incarnation, *dead}]
        over = await self._ledger.do(of_no_use(self._keys, others))
        here = socket.gethostname()
        left = [record for record in records if record.incarnation in dead]
        for record in over:
            if record.reach is Reach.NODE and record.hostname != here:
                log.info(
                    "sandbox %s (%s %s) was started on host %s and is left to that one",
                    record.runtime_id, record.runtime, record.handle, record.hostname,
                )  # fmt: skip
            else:
                left.append(record)
        return await self._stop(left)

    async def stop_of_nodes_gone(self, gone: Sequence[str]) -> list[str]:
        """Stops what can be stopped from here of nodes that are gone, where the ledger has ended the attempt."""
        if not gone:
            return []
        records = await self._ledger.do(sandboxes_of(self._keys, gone))
        within_reach = [record for record in records if record.reach is Reach.ANYWHERE]
        if not within_reach:
            return []
        over = await self._ledger.do(of_no_use(self._keys, within_reach))
        return await self._stop(over)

    async def _stop(self, records: Sequence[SandboxRecord]) -> list[str]:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def one(record: SandboxRecord) -> str | None:
            async with turn:
                return record.runtime_id if await self._stopped(record) else None

        stopped = [runtime_id for runtime_id in await asyncio.gather(*map(one, records)) if runtime_id is not None]
        if stopped:
            log.warning("stopped sandboxes that outlived their workers: %s", ", ".join(stopped))
        return stopped

    async def _stopped(self, record: SandboxRecord) -> bool:
        try:
            async with asyncio.timeout(_STOP_S):
                await runtime_named(record.runtime, self._allowed).stop_orphan(record)
        except TimeoutError:
            log.error("sandbox %s (%s) was not stopped within %g s", record.runtime_id, record.runtime, _STOP_S)
            return False
        except UnknownPlugin as exc:
            # Another node may have it.
            log.info("sandbox %s is left to others: %s", record.runtime_id, exc)
            return False
        except LedgerUnavailable:
            raise
        except PolarqError as exc:
            log.error("sandbox %s (%s) could not be stopped: %s", record.runtime_id, record.runtime, exc)
            return False
        except Exception:
            log.exception("sandbox %s: an error in runtime '%s' itself", record.runtime_id, record.runtime)
            return False
        await self._ledger.do(drop_sandbox(self._keys, record))
        return True
