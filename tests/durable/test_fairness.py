"""Which rollout a free place is given to: by runs' shares, then priority and waiting; only what the node may run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from polarq.contracts.node import NodeRecord
from polarq.ledger import Calls, Claim, Keys, Ledger, Refused
from polarq.ledger.admission import Admission, Place
from polarq.ledger.control import pause_run
from polarq.topology.models import LimitsSection, RunShare
from tests.ledger.test_ledger import a_task, ended


@pytest.fixture
def ledger(redis_url: str, keys: Keys) -> Iterator[Ledger]:
    with Ledger(redis_url, Calls(keys, admission=Admission.of(LimitsSection()))) as made:
        yield made


def place(node_id: str = "node0", **more: Any) -> Place:
    known: dict[str, Any] = {"labels": {}, "model": "", "runtimes": ["local"], "default_runtime": True, "runs": {}}
    return Place(node_id=node_id, **{**known, **more})


def submit(ledger: Ledger, task_id: str, samples: int = 1, **more: Any) -> None:
    ledger.do(ledger.calls.submit(a_task(task_id, samples, **more), task_id))


def take(ledger: Ledger, at: Place | None = None, hint: str = "none.0") -> Claim | Refused:
    at = at or place()
    return ledger.do(ledger.calls.claim(hint, at.node_id, 30, "job", at))


def taken(ledger: Ledger, count: int, at: Place | None = None) -> list[str]:
    claims = [take(ledger, at) for _ in range(count)]
    return [claim.rollout_id for claim in claims if isinstance(claim, Claim)]


def older(ledger: Ledger, task_id: str, run_id: str, seconds: float) -> None:
    """As if its rollouts had waited that much longer."""
    keys = ledger.calls.keys
    record = ledger.do(ledger.calls.task(task_id))
    assert record is not None
    for rollout in record.rollouts:
        ledger.redis.zincrby(keys.run_waiting(run_id), -1000 * seconds, rollout.rollout_id)


def test_higher_priority_goes_first_and_within_one_whoever_came_first(ledger: Ledger) -> None:
    for number, priority in enumerate([0, 50, 100, 50, 0, 100]):
        submit(ledger, f"t{number}", dispatch_priority=priority)
        older(ledger, f"t{number}", "default", 6 - number)
    assert [i[:2] for i in taken(ledger, 6)] == ["t2", "t5", "t1", "t3", "t0", "t4"]


def test_what_waited_longer_than_its_priority_is_behind_goes_before_any_other(ledger: Ledger) -> None:
    submit(ledger, "old")
    older(ledger, "old", "default", 100 * 60 + 1)
    submit(ledger, "urgent", dispatch_priority=100)
    assert taken(ledger, 2) == ["old.0", "urgent.0"]


def test_runs_share_the_places_by_weight_whoever_came_first_and_has_more(ledger: Ledger) -> None:
    submit(ledger, "big", 100, run_id="big")
    submit(ledger, "small", 20, run_id="small", dispatch_priority=0)
    submit(ledger, "heavy", 60, run_id="heavy")
    shares = {"heavy": RunShare(weight=3), "big": RunShare(), "small": RunShare()}
    runs = Counter(i.partition(".")[0] for i in taken(ledger, 50, place(runs=shares)))
    assert runs == {"heavy": 30, "big": 10, "small": 10}


def test_a_run_that_comes_late_gets_the_next_places(ledger: Ledger) -> None:
    submit(ledger, "bulk", 100, run_id="bulk", dispatch_priority=100)
    assert len(taken(ledger, 10)) == 10
    submit(ledger, "late", 3, run_id="late")
    assert taken(ledger, 3) == ["late.0", "late.1", "late.2"]


def test_a_quota_holds_a_run_back_and_an_end_makes_room(ledger: Ledger) -> None:
    submit(ledger, "t", 5, run_id="narrow")
    narrow = place(runs={"narrow": RunShare(max_in_flight=2)})
    first = take(ledger, narrow)
    assert isinstance(first, Claim)
    assert isinstance(take(ledger, narrow), Claim)
    assert take(ledger, narrow, hint="t.4") == Refused("held", "run narrow may start nothing now")
    assert ledger.do(ledger.calls.look(narrow, 10)) == []
    ledger.do(ledger.calls.commit(first.rollout_id, first.token, ended()))
    assert ledger.do(ledger.calls.look(narrow, 10)) == ["t.2"]
    assert taken(ledger, 1, narrow) == ["t.2"]


def test_a_paused_run_is_passed_over_and_keeps_its_place_in_line(ledger: Ledger) -> None:
    submit(ledger, "a", run_id="paused")
    submit(ledger, "b", run_id="other")
    older(ledger, "a", "paused", 10)
    ledger.do(pause_run(ledger.calls.keys, "paused", on=True))
    assert taken(ledger, 1) == ["b.0"]
    assert take(ledger, hint="a.0") == Refused("held", "run paused may start nothing now")
    ledger.do(pause_run(ledger.calls.keys, "paused", on=False))
    submit(ledger, "c", run_id="other")
    assert taken(ledger, 2) == ["a.0", "c.0"]


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        ({"placement": {"policy": "pinned", "node_id": "node1"}}, {"node_id": "node1"}),
        ({"placement": {"labels": {"gpu": "yes"}}}, {"labels": {"gpu": "yes", "zone": "a"}}),
        ({"placement": {"model": "large"}}, {"model": "large"}),
        ({"runtime": {"backend": "docker", "image": "x"}}, {"runtimes": ["local", "docker"]}),
        ({"runtime": None}, {"default_runtime": True}),
    ],
)
def test_a_node_takes_only_what_it_can_run(ledger: Ledger, asked: dict[str, Any], other: dict[str, Any]) -> None:
    submit(ledger, "t", **{"runtime": {"backend": "local"}, **asked})
    here = place(model="small", default_runtime=False)
    assert take(ledger, here, hint="t.0") == Refused("held", "another node has to run it")
    assert ledger.do(ledger.calls.look(here, 5)) == []
    assert taken(ledger, 1, place(**{"node_id": "node2", "model": "small", **other})) == ["t.0"]


def test_what_another_node_has_to_run_does_not_stand_in_the_way(ledger: Ledger) -> None:
    submit(ledger, "pinned", 100, placement={"policy": "pinned", "node_id": "node1"}, dispatch_priority=100)
    submit(ledger, "free", 2)
    assert taken(ledger, 2) == ["free.0", "free.1"]


def test_what_lies_behind_very_many_that_others_have_to_run_is_found_by_a_deeper_look(ledger: Ledger) -> None:
    submit(ledger, "pinned", 300, placement={"policy": "pinned", "node_id": "node1"}, dispatch_priority=100)
    submit(ledger, "free", 2)
    assert ledger.do(ledger.calls.look(place(), 5)) == []
    found = ledger.do(ledger.calls.look(place(), 5, 1000))
    assert found == ["free.0", "free.1"]
    claims = [take(ledger, hint=rollout_id) for rollout_id in found]
    assert [claim.rollout_id for claim in claims if isinstance(claim, Claim)] == found


def announce(ledger: Ledger, node_id: str) -> None:
    ledger.do(ledger.calls.announce(NodeRecord(node_id=node_id), 60))


def test_a_group_that_shall_be_together_stays_with_its_first_node_while_that_one_takes_work(ledger: Ledger) -> None:
    submit(ledger, "t", 4, placement={"policy": "together"})
    announce(ledger, "node0")
    assert taken(ledger, 1, place("node0")) == ["t.0"]
    assert isinstance(take(ledger, place("node1"), hint="t.1"), Refused)
    assert taken(ledger, 1, place("node0")) == ["t.1"]
    ledger.do(ledger.calls.set_node_flag("node0", "draining", on=True))
    assert taken(ledger, 1, place("node1")) == ["t.2"], "a node that takes nothing keeps nobody waiting"


@pytest.mark.parametrize("flag", ["paused", "draining"])
def test_a_node_that_is_told_to_take_nothing_takes_nothing_before_it_has_read_so(ledger: Ledger, flag: str) -> None:
    submit(ledger, "t")
    ledger.do(ledger.calls.set_node_flag("node0", flag, on=True))
    assert take(ledger, hint="t.0") == Refused("held", "node node0 takes nothing now")
    assert taken(ledger, 1, place("node1")) == ["t.0"]


def test_a_claim_that_is_repeated_after_its_answer_was_lost_grants_the_same_rollout(ledger: Ledger) -> None:
    submit(ledger, "t", 3)
    call = ledger.calls.claim("none.0", "node0", 30, "job", place())
    first, again = ledger.do(call), ledger.do(call)
    assert first == again
    assert ledger.redis.scard(ledger.calls.keys.run_held("default")) == 1


def test_a_stale_entry_of_the_line_is_dropped_and_blocks_nobody(ledger: Ledger) -> None:
    submit(ledger, "gone")
    submit(ledger, "t")
    ledger.redis.delete(ledger.calls.keys.rollout("gone.0"))
    assert taken(ledger, 2) == ["t.0"]
    assert ledger.redis.exists(ledger.calls.keys.run_waiting("default")) == 0


def test_a_look_names_what_would_be_claimed_and_claims_nothing(ledger: Ledger) -> None:
    submit(ledger, "a", 3, run_id="a")
    submit(ledger, "b", 3, run_id="b")
    seen = ledger.do(ledger.calls.look(place(), 4))
    assert sorted(i.partition(".")[0] for i in seen) == ["a", "a", "b", "b"]
    assert taken(ledger, 4) == seen
