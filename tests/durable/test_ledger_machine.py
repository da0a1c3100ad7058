"""The model check of the ledger, and the proof that it sees: each way to break the Lua is found."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.durable.ledger_machine import LedgerMachine
from tests.durable.ledger_steps import Swaps

CHECK = settings(
    max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
SEARCH = settings(CHECK, max_examples=400, phases=[Phase.generate], derandomize=True, print_blob=False)
"""For a ledger that is broken: the first failure will do."""


def check(url: str, how: settings, swaps: Swaps | None = None) -> None:
    def machine() -> LedgerMachine:
        return LedgerMachine(url, swaps)

    run_state_machine_as_test(machine, settings=how)  # type: ignore[arg-type]  # any callable will do


def test_the_ledger_does_what_its_model_does(redis_url: str) -> None:
    check(redis_url, CHECK)


AGAIN = "redis.call('HSET', rollout, 'summary', ARGV[4])"

BREAKS: dict[str, Swaps] = {
    "an old token commits": {"commit": ("r[2] ~= token or not may", "not may")},
    "a committed end is changed": {"commit": ("return {'already'", f"{AGAIN} return {{'already'")},
    "a commit leaves its lease": {"commit": ("be_over(leases, task, rollout_id)", "")},
    "a commit is not counted": {"commit": ("redis.call('HINCRBY', task, to, 1)", "")},
    "a lease does not protect": {"claim": ("> now or ARGV[8]", "< 0 or ARGV[8]")},
    "a token is given out twice": {"claim": ("redis.call('HINCRBY', rollout, 'token', 1 + salt)", "1")},
    "a repeated claim counts twice": {"claim": ("r[5] == ARGV[7] and", "false and")},
    "a claimed rollout still waits": {"claim": ("be_held(leases, task, rollout_id, now + lease)", "")},
    "a released rollout is not queued": {"release": ("wait_in_line(waiting, task, ARGV[1], now)", "")},
    "a cancelled rollout is queued again": {"release": ("if r[4] == '1' then", "if false then")},
    "a release by anybody": {"release": ("or r[2] ~= ARGV[2]", "")},
    "a lost lease is renewed": {"renew": ("or r[2] ~= token", "")},
    "a cancelled rollout still waits": {"cancel": ("be_over(events, task, id)", "")},
    "a cancel is not counted": {"cancel": ("redis.call('HINCRBY', task, 'queued', -1)", "")},
    "a cancel is not told": {"cancel": ("redis.call('HSET', key, 'cancel', '1')", "")},
    "a run's index is forgotten": {"cancel": ("redis.call('ZREM', own, id)", "")},
    "a tombstone is not heeded": {"submit": ("redis.call('EXISTS', tombstone) == 1", "false")},
    "a step across the table": {"advance": ("if not may(r[1], ARGV[3]) then", "if false then")},
    "a reaper takes what was renewed": {"reap_lost": ("if lease > now and not dead then", "if false then")},
    "a living worker's rollout is taken back": {"reap_lost": ("incarnation == ARGV[9]", "ARGV[9] ~= ''")},
    "a dead worker's rollout waits for its lease": {"reap_lost": ("and not dead then", "then")},
    "a reaper leaves the token": {"reap_lost": ("redis.call('HINCRBY', rollout, 'token', 1)", "")},
    "a poison rollout is tried for ever": {"reap_lost": ("same_crash or lost", "lost")},
    "every loss is held against the rollout": {"reap_lost": ("tonumber(ARGV[12]), how)", "1, how)")},
    "losses at other stages are held against it": {"reap_lost": (".. stage\n  local of", "\n  local of")},
    "a reaper queues what was cancelled": {"reap_lost": ("r[6] == '1'", "false")},
    "a mend forgets what waits": {"reap_task": ("wait_in_line(waiting, task, id, now)", "")},
    "an ended task never expires": {"commit": ("redis.call('EXPIRE', task, keep_s)", "")},
    "a task ends before its last rollout": {"commit": ("if done < num then", "if done < num - 1 then")},
    "an end without its event": {"commit": ("'session.state_changed'", "'session.updated'")},
}


@pytest.mark.parametrize("broken", sorted(BREAKS))
def test_a_broken_ledger_is_found(redis_url: str, broken: str) -> None:
    with pytest.raises((AssertionError, KeyError)) as caught:
        check(redis_url, SEARCH, BREAKS[broken])
    assert "any more" not in str(caught.value), "the Lua has changed: break it in another way"
