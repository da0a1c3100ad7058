"""Sandboxes that nobody knows of any more: found by their backend's own label, and removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from polarq import registry
from polarq.errors import PolarqError, RuntimeFault
from polarq.ledger import AsyncLedger
from polarq.ledger.sandboxes import forget_sandboxes
from polarq_worker.runtimes.base import Runtime
from polarq_worker.warm.making import Maker

log = logging.getLogger("polarq.worker.warm")


class Sweeper:
    """One worker's. `alone` says whether no other worker of its node lives: what it started has the same label."""

    def __init__(self, maker: Maker, ledger: AsyncLedger, alone: Callable[[], bool]) -> None:
        self._maker = maker
        self._ledger = ledger
        self._alone = alone
        self._answered: set[type[Runtime]] = set()

    async def at_start(self) -> None:
        """Asks every backend that is installed. Raises `LedgerUnavailable`."""
        await self._sweep(_installed())

    async def step(self) -> None:
        """Asks those that answered at the start, for what was still being made then, and those that this worker has
        used. Raises `LedgerUnavailable`."""
        await self._sweep(self._answered | self._maker.used)

    async def _sweep(self, backends: Iterable[type[Runtime]]) -> None:
        if not self._alone():
            return
        host = self._maker.host
        for backend in list(backends):
            try:
                # A view and no copy: what is begun while the backend lists is among the living before it can be listed.
                swept = await backend.sweep(host, self._maker.living.keys())
            except RuntimeFault as exc:
                level = logging.WARNING if backend in self._maker.used else logging.DEBUG
                log.log(level, "%s: nothing swept: %s", backend.__name__, exc)
            except Exception:
                log.exception("an error in runtime %s", backend.__name__)
            else:
                self._answered.add(backend)
                if swept:
                    log.warning("removed sandboxes that nobody knows of any more: %s", ", ".join(swept))
                    keys = self._ledger.calls.keys
                    await self._ledger.do(forget_sandboxes(keys, host.node_id, swept))


def _installed() -> list[type[Runtime]]:
    found = []
    for name in registry.names("runtimes"):
        try:
            backend = registry.plugin("runtimes", name)
        except PolarqError as exc:
            log.debug("runtime '%s' is not asked: %s", name, exc)
        else:
            if issubclass(backend, Runtime):
                found.append(backend)
    return found
