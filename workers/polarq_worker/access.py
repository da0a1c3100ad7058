"""One attempt's access to the model: the grant that the proxy asks for, and the record of what it let through."""

from __future__ import annotations

from collections.abc import Sequence

from polarq.contracts.completion import Completion
from polarq.errors import PayloadCorrupt, PolarqError
from polarq.ledger import Claim
from polarq.store.completions import read_completions
from polarq.store.grants import GrantSpec, GrantUse, SessionRules, close_grant, open_grant
from polarq_worker.lease import Lease
from polarq_worker.services import Services

_GRANT_MARGIN_S = 120.0
"""A grant outlives the agent's budget by this much at most, should nobody close it."""


class RecordLost(PolarqError):
    """Redis does not have the record of an attempt's model calls any more: a failover forgot its last moments. The
    attempt is worth nothing, the rollout can be run again."""


class ModelAccess:
    """See the module."""

    def __init__(self, claim: Claim, services: Services, lease: Lease) -> None:
        self.secret: str | None = None
        """Known while the grant is open."""
        self.use = GrantUse()
        """What came of it, once it was closed by `record`."""
        self.calls: Sequence[Completion] = ()
        """The closed record, once it was read."""
        self._claim = claim
        self._services = services
        self._lease = lease

    async def open(self, budget_s: float) -> str:
        """Opens the model to the harness about to start, while nobody else can start one: see `polarq_worker.lease`.
        Returns the secret that the harness presents."""
        redis, keys = self._services.ledger.redis, self._services.ledger.calls.keys
        patience = self._services.patience
        while True:
            await self._lease.certainty()
            self.secret = await patience.until_answered(
                lambda: open_grant(redis, keys, self._grant(budget_s), budget_s + _GRANT_MARGIN_S)
            )
            if self._lease.certain:
                return self.secret
            # The ledger was away meanwhile: its deadline began too early, and the rollout may be somebody else's.
            await patience.until_answered(self.close)
            self.secret = None

    async def close(self) -> None:
        """One try. Harmless to repeat, and where none is open."""
        if self.secret is not None:
            await close_grant(self._services.ledger.redis, self._services.ledger.calls.keys, self.secret)

    async def record(self) -> Sequence[Completion]:
        """Closes the record, then reads it: nothing that comes later can change what is built from it. Raises
        `RecordLost`."""
        claim, patience = self._claim, self._services.patience
        redis, keys = self._services.ledger.redis, self._services.ledger.calls.keys
        if (secret := self.secret) is not None:
            self.use = await patience.until_answered(lambda: close_grant(redis, keys, secret))
            self.secret = None
        try:
            calls = await patience.until_answered(
                lambda: read_completions(redis, keys, claim.rollout_id, claim.attempt, claim.token)
            )
        except PayloadCorrupt as exc:
            raise RecordLost(f"what attempt {claim.attempt} captured has gaps: {exc}") from exc
        if not calls and not self.use.known:
            raise RecordLost(f"what attempt {claim.attempt} captured is not in Redis any more")
        self.calls = calls
        return calls

    def _grant(self, budget_s: float) -> GrantSpec:
        claim, node = self._claim, self._services.node
        return GrantSpec(
            rollout_id=claim.rollout_id,
            task_id=claim.task.task_id,
            attempt=claim.attempt,
            token=claim.token,
            node_id=node.id,
            model=node.model_served,
            run_id=claim.task.run_id,
            rules=SessionRules(
                **claim.task.model.model_dump(),
                time_s=budget_s,
                harness=claim.task.agent.harness or "",
            ),
        )
