"""What a deployment lets a task ask for: the rules that its nodes publish and every submission is judged by."""

from __future__ import annotations

from typing import Self, TypeVar

from polarq.contracts.base import Contract
from polarq.topology.models import BudgetsSection, SecuritySection, Topology

S = TypeVar("S", bound=Contract)


class Rules(Contract):
    """Of one topology file."""

    security: SecuritySection = SecuritySection()
    budgets: BudgetsSection = BudgetsSection()

    @classmethod
    def of(cls, topology: Topology) -> Self:
        return cls(security=topology.security, budgets=topology.budgets)

    def with_what_is_said(self, own: Rules) -> Rules:
        """These, but for what another file says itself: what it leaves to its defaults says nothing."""
        return Rules(security=_over(self.security, own.security), budgets=_over(self.budgets, own.budgets))


def _over(section: S, own: S) -> S:
    return section.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})
