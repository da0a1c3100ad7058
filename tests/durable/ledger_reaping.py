"""The reaper's steps of the ledger's machine: taking back, ringing, mending, at any moment and out of date."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from polarq.contracts import Outcome, RolloutState, RolloutSummary
from polarq.ledger import incarnations
from polarq.ledger.blame import LOSSES_PER_ATTEMPT, Share
from polarq.ledger.reaping import mend_task, reap_lost, ring_due
from tests.durable.ledger_model import RolloutModel
from tests.durable.ledger_steps import NODES, LedgerSteps

S = RolloutState

MAX_ATTEMPTS = 2
"""Losses by one crash that are held against a rollout before it fails."""


class ReaperSteps(LedgerSteps):
    """See the module."""

    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        """Mostly what is due, else anything: the look that found it may be old."""
        due = [r for r in self.all_rollouts() if r.active and r.lease_over]
        quarters = data.draw(st.integers(0, 4), label="quarters of the loss")
        self.reap_one(data.draw(st.sampled_from(due or self.all_rollouts()), label="rollout"), quarters=quarters)

    @precondition(lambda self: any(r.active for r in self.all_rollouts()))
    @rule(data=st.data(), cancelled=st.booleans())
    def a_node_is_lost(self, data: st.DataObject, cancelled: bool) -> None:
        """A lease runs out, of a rollout that was perhaps just told to stop, and the reaper is there at once."""
        rollout = data.draw(st.sampled_from([r for r in self.all_rollouts() if r.active]), label="rollout")
        if cancelled:
            task_id, _, index = rollout.rollout_id.rpartition(".")
            self.cancel(task_id, int(index), 0)
        self.expire(rollout)
        self.reap_one(rollout)

    @precondition(lambda self: any(self.holds(t) for t in self.tickets))
    @rule(data=st.data(), cancelled=st.booleans())
    def a_worker_leaves(self, data: st.DataObject, cancelled: bool) -> None:
        """It gives back what it has, which was perhaps just told to stop."""
        ticket = data.draw(st.sampled_from([t for t in self.tickets if self.holds(t)]), label="ticket")
        if cancelled:
            task_id, _, index = ticket.rollout_id.rpartition(".")
            self.cancel(task_id, int(index), 0)
        self._release(ticket, counted=False)

    @precondition(lambda self: any(self.holds(t) for t in self.tickets))
    @rule(data=st.data(), leaves=st.booleans())
    def a_worker_comes_late(self, data: st.DataObject, leaves: bool) -> None:
        """It was stopped past its lease; another node has the rollout when it goes on and commits, or gives it back."""
        old = data.draw(st.sampled_from([t for t in self.tickets if self.holds(t)]), label="ticket")
        rollout = self.rollout(old.rollout_id)
        self.expire(rollout)
        call = self.claim_call(old.rollout_id, NODES[0])
        self._claimed(call, rollout, NODES[0], self.do(call))
        if leaves:
            self._release(old, counted=False)
        else:
            self._commit(old, RolloutSummary(outcome=Outcome(state=S.FAILED)))

    @rule(node=st.sampled_from(NODES), others=st.booleans())
    def a_worker_starts_again(self, node: str, others: bool) -> None:
        """It takes back what the one before it held, whatever the leases say, and never what another one holds."""
        dead = f"{node}-{self.starts[node]}"
        self.starts[node] += 1
        leased = self.do(incarnations.leased(self.calls))
        assert sorted(leased) == sorted(r.rollout_id for r in self.all_rollouts() if r.active)
        held = self.do(incarnations.holdings(self.calls, leased))
        for holding in held:
            rollout = self.rollout(holding.rollout_id)
            assert (holding.owner, holding.incarnation) == (rollout.owner, rollout.incarnation)
            if others or holding.incarnation == dead:
                self.reap_one(rollout, dead)

    def reap_one(self, rollout: RolloutModel, dead: str = "", quarters: int = 4) -> None:
        share = Share(beside=3, share=quarters / 4)
        reaped = self.do(reap_lost(self.calls, rollout.rollout_id, MAX_ATTEMPTS, share, dead=dead))
        if not rollout.active:
            assert reaped.action == "index"
            return
        if not rollout.lease_over and not (dead and rollout.incarnation == dead):
            assert reaped.action == "held"
            return
        rollout.was_lost(quarters)
        same_crash = rollout.blame[rollout.state] >= 4 * MAX_ATTEMPTS
        if not rollout.cancel and not same_crash and rollout.lost < LOSSES_PER_ATTEMPT * MAX_ATTEMPTS:
            assert reaped.action == "queued"
            self.given_back(rollout, counted=True)
            return
        rollout.state = S.CANCELLED if rollout.cancel else S.FAILED
        assert reaped.action == rollout.state
        rollout.token += 1
        self.highest[rollout.rollout_id] = rollout.token
        self.story.moved(rollout)
        self.ended_one(rollout.rollout_id.rpartition(".")[0])

    @rule(data=st.data())
    def ring(self, data: st.DataObject) -> None:
        rollout = self.pick(data)
        word = self.do(ring_due(self.calls, rollout.rollout_id, 0, 60))
        assert word == ("ring" if rollout.state is S.QUEUED else "index")

    @rule(data=st.data(), forget=st.booleans())
    def mend(self, data: st.DataObject, forget: bool) -> None:
        """A task that is right is left alone; what an index forgot is put back."""
        task_id = data.draw(st.sampled_from(sorted(self.tasks)), label="task")
        rollout = data.draw(st.sampled_from(self.tasks[task_id].rollouts), label="rollout")
        lost = forget and not rollout.state.terminal
        if lost:
            self.redis.zrem(self.keys.waiting, rollout.rollout_id)
            self.redis.zrem(self.keys.leases, rollout.rollout_id)
        assert self.do(mend_task(self.calls, task_id)) == ("mended" if lost else "right")
