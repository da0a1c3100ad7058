"""The export itself: results one at a time, a part of the file whenever enough has come together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from polarq.contracts.rollout import RolloutResult
from polarq.errors import PayloadCorrupt, PayloadMissing, TaskNotFound
from polarq.export.base import NO_TRAJECTORY, Format, Group, Record, Skip
from polarq.export.parts import Parts

PART_TOKENS = 1_000_000
PART_ROLLOUTS = 500
DAMAGED = "damaged in the store"
NOT_ENDED = "not ended"
GONE = "tasks that are not in the ledger any more"


@dataclass(slots=True)
class Report:
    """What an export did."""

    rollouts: int = 0
    """That are in the file."""
    records: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Rollouts that are not, by reason."""
    traces_left_out: Counter[str] = field(default_factory=Counter)
    """Of rollouts that are in the file, by reason."""

    @property
    def damaged(self) -> int:
        return self.skipped[DAMAGED]


def export(groups: Iterable[Callable[[], Group]], form: Format, parts: Parts, told: Callable[[float], None]) -> Report:
    """Writes what has not been written, and the whole. `told` hears how many groups are through,
    each in as many steps as it has rollouts.

    Raises `TaskNotFound` for a group that is not there, unless the export goes on where it was killed.
    """
    made: dict[str, list[Record]] = {}
    skipped: dict[str, str] = {}
    tokens, waiting, gone = 0, 0, 0
    known = set(parts.seen)
    for read in groups:
        try:
            group = read()
        except TaskNotFound:
            if not parts.resumed:
                raise
            gone += 1  # when the export began it was there; what had been written of it stays
            told(1)
            continue
        waiting += group.waiting
        # A rollout that is named beside its task comes twice.
        left = [rollout for rollout in group.rollouts if rollout.rollout_id not in known]
        known.update(rollout.rollout_id for rollout in left)
        each = 1 / max(1, len(group.rollouts))
        told(1 - len(left) * each)
        passed_over = form.passed_over(group) if left else {}
        for rollout in left:
            try:
                if (reason := passed_over.get(rollout.rollout_id)) is not None:
                    raise Skip(reason)
                result = rollout.load()
                records = made[rollout.rollout_id] = form.records(result)
                parts.keep_images(form.images(result, records))
                tokens += _tokens(result)
            except Skip as exc:
                skipped[rollout.rollout_id] = exc.reason
            except (PayloadMissing, TaskNotFound):  # its task may be forgotten meanwhile
                skipped[rollout.rollout_id] = NO_TRAJECTORY
            except PayloadCorrupt:
                skipped[rollout.rollout_id] = DAMAGED
            told(each)
            if tokens > PART_TOKENS or len(made) + len(skipped) >= PART_ROLLOUTS:
                parts.add(made, skipped)
                made, skipped, tokens = {}, {}, 0
    parts.add(made, skipped)
    parts.finish()
    told_of = Counter(parts.skipped)
    if waiting:
        told_of[NOT_ENDED] = waiting
    if gone:
        told_of[GONE] = gone
    return Report(len(parts.seen) - parts.skipped.total(), parts.records, told_of, Counter(form.traces_left_out()))


def _tokens(result: RolloutResult) -> int:
    traces = result.trajectory.traces if result.trajectory is not None else []
    return sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)
