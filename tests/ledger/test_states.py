"""The transition table."""

from __future__ import annotations

import pytest

from polarq.contracts import TERMINAL, RolloutState
from polarq.ledger.states import ACTIVE, TRANSITIONS, allowed, lua_table


def test_every_state_has_its_row() -> None:
    assert set(TRANSITIONS) == set(RolloutState)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_leaves_an_end(state: RolloutState) -> None:
    assert not TRANSITIONS[state]


@pytest.mark.parametrize("state", ACTIVE)
def test_every_stage_can_end_and_be_given_back(state: RolloutState) -> None:
    assert TRANSITIONS[state] >= TERMINAL | {RolloutState.QUEUED}


def test_stages_come_in_their_order_only() -> None:
    order = [RolloutState.QUEUED, *ACTIVE]
    for i, before in enumerate(order):
        for j, after in enumerate(order[1:], start=1):
            assert allowed(before, after) == (j == i + 1), (before, after)


def test_the_scripts_carry_the_same_table() -> None:
    text = lua_table()
    for before, afters in TRANSITIONS.items():
        for after in afters:
            assert f"{after.value}=true" in text.split(f"{before.value}={{")[1].split("}")[0]
