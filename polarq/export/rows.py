"""Rows in files: one record per trace (`polarq.rows/2`), and rows and results out of such records.

| column | type | |
| --- | --- | --- |
| schema | string | `polarq.rows/2` |
| run, group, rollout_id | string | group: the task; its rollouts are compared with one another |
| rollout, trace | int32 | number of the rollout in its group, of the trace in its rollout |
| prompt_ids, response_ids | list of int32 | the sequence is one after the other |
| loss_mask | list of uint8 | over `response_ids`; 1: sampled by the policy, and to be trained on |
| logprobs | list of float32 | over `response_ids`; natural logarithm; 0.0 under mask 0 |
| teacher_logprobs | list of float32 or null | the same of a teacher, where one was asked (`self_distillation`) |
| reward | float64 or null | this row's; null: no verdict |
| outcome_reward | float64 or null | the rollout's |
| weight | float64 | 1 / number of the rollout's rows that may be trained on; 0.0 of the others |
| versions | list of {version: string, start, end: int32} | spans of `response_ids`: which policy sampled them |
| oldest, newest | int64 or null | numbers of these policies; oldest null: unknown, which is older than any |
| finish_reason | string or null | of the last call |
| turns | list of {seq, start, end: int32; finish_reason, untrainable, grammar: string or null; reward: float64 or \
null} | the calls: spans of `response_ids`, and what each one's answer was worth where the evaluator said so |
| images | list of {sha256, media_type: string; size: int64; start, end: int32 or null} | the pictures: spans of \
`prompt_ids`, then `response_ids`; null: not known |
| state, boundary, outcome | string | how the rollout ended, and why (`completed`, `none`, `ok`) |
| unused | string or null | why it must not be trained on, only with `--all`; then `loss_mask` is 0 throughout |

The pictures themselves lie beside the file: `<file>.images/<sha256>`, as they were sent. A trace's messages and lineage
are in the formats `polar` and `atif` and in the archive. Files of `polarq.rows/1`, which have no turns and images, are
read too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from pydantic import ValidationError

from polarq.contracts.completion import Image, VersionSpan
from polarq.contracts.rollout import Outcome, Reward, RolloutResult
from polarq.contracts.trajectory import Fidelity, Trace, Trajectory, Turn
from polarq.errors import InvalidInput
from polarq.export.base import NOTHING_SAMPLED, Record, Skip, needed, problem_of, why_not
from polarq.trainers.rows import Row, row_of, rows, written_out
from polarq.trajectory.images import picture_bytes

SCHEMA = "polarq.rows/2"
READ = frozenset({SCHEMA, "polarq.rows/1"})
_INT32 = 2**31
_ROW = (
    "group", "rollout", "rollout_id", "trace", "prompt_ids", "response_ids", "loss_mask", "logprobs", "reward",
    "weight", "oldest", "newest", "finish_reason", "teacher_logprobs",
)  # fmt: skip

_KINDS = {
    "group": str, "rollout_id": str, "rollout": int, "trace": int, "oldest": int | None, "newest": int | None,
    "finish_reason": str | None,
}  # fmt: skip
"""Of columns that nothing else checks."""


def row_records(result: RolloutResult, *, everything: bool) -> list[Record]:
    """The rollout's rows as records; with `everything` also what must not be trained on. Raises `Skip`."""
    trajectory = written_out(needed(result))
    whole = result.model_copy(update={"trajectory": trajectory})
    made = {row.trace: _record(whole, row, None) for row in rows(whole)}
    if everything:
        made |= {trace.index: _unused(result, trace) for trace in trajectory.traces if trace.index not in made}
    if not made:
        nothing = not everything and trajectory.fidelity.sampled_tokens == 0
        raise Skip(NOTHING_SAMPLED if everything or nothing else why_not(result.outcome))
    return [made[trace] for trace in sorted(made)]


def _unused(result: RolloutResult, trace: Trace) -> Record:
    """A trace that must not be trained on, under a mask that says so."""
    length = len(trace.response_ids)
    nothing = {"loss_mask": [0] * length, "logprobs": [0.0] * length, "teacher_logprobs": None}
    why = trace.untrainable or why_not(result.outcome)
    return _record(result, row_of(result, trace.model_copy(update=nothing), 0.0), why)


def _record(result: RolloutResult, row: Row, unused: str | None) -> Record:
    return {
        "schema": SCHEMA,
        "run": result.run_id,
        **{name: getattr(row, name) for name in _ROW},
        "versions": [span.model_dump() for span in row.versions],
        "turns": [turn.model_dump() for turn in row.turns],
        "images": [image.model_dump() for image in row.images],
        "outcome_reward": None if result.reward is None else result.reward.outcome,
        "state": result.outcome.state.value,
        "boundary": result.outcome.boundary.value,
        "outcome": result.outcome.reason,
        "unused": unused,
    }


def row_images(result: RolloutResult, records: Sequence[Record]) -> dict[str, bytes]:
    """sha256 -> the picture, of those that the rollout's records tell of."""
    wanted = {image["sha256"] for record in records for image in record["images"]}
    if not wanted or result.trajectory is None:
        return {}
    found = {name: data for trace in result.trajectory.traces for name, data in picture_bytes(trace).items()}
    return {name: data for name, data in found.items() if name in wanted}


def read_row(record: Record) -> Row:
    """The row that a record was made of. Raises `InvalidInput` for what is none."""
    try:
        record = {"teacher_logprobs": None, **record}  # files of before have none
        _check(record)
        return Row(
            versions=[VersionSpan.stored(span) for span in record["versions"]],
            turns=[Turn.stored(turn) for turn in record.get("turns", [])],
            images=[Image.stored(image) for image in record.get("images", [])],
            **{name: record[name] for name in _ROW},
        )
    except (KeyError, OverflowError, TypeError, ValueError) as exc:
        raise InvalidInput("import", [f"this is no row of {SCHEMA}: {problem_of(exc)}"]) from None


def _check(record: Record) -> None:
    if record["schema"] not in READ:
        raise ValueError(f"its schema is {record['schema']!r}")
    length = len(record["response_ids"])
    if len(record["loss_mask"]) != length or len(record["logprobs"]) != length:
        raise ValueError("response_ids, loss_mask and logprobs differ in length")
    if record["teacher_logprobs"] is not None and len(record["teacher_logprobs"]) != length:
        raise ValueError("response_ids and teacher_logprobs differ in length")
    for name in ("prompt_ids", "response_ids"):
        ids = np.asarray(record[name] or [0])
        if not isinstance(record[name], list) or ids.dtype.kind != "i" or ids.min() < -_INT32 or ids.max() >= _INT32:
            raise ValueError(f"{name} holds something other than 32-bit whole numbers")
    if not {(type(bit), bit) for bit in record["loss_mask"]} <= {(int, 0), (int, 1)}:
        raise ValueError("loss_mask holds something other than 0 and 1")
    for name in ("logprobs", "teacher_logprobs"):
        values = np.asarray(record[name] or [0.0])
        if values.dtype.kind not in "if" or not np.isfinite(values).all():
            raise ValueError(f"{name} holds something other than finite numbers")
    for name in ("reward", "weight"):
        _check_number(name, record[name], optional=name == "reward")
    told = {name: record[name] for name in _KINDS}
    odd = [n for n, value in told.items() if isinstance(value, bool) or not isinstance(value, _KINDS[n])]
    odd += [n for n in ("rollout", "trace") if n not in odd and not 0 <= told[n] < _INT32]
    if odd:
        raise ValueError(f"{odd[0]} holds {str(told[odd[0]])[:40]!r}")
    for name in ("turn", "version"):
        for span in record.get(f"{name}s", []):
            if not 0 <= span["start"] <= span["end"] <= length:
                raise ValueError(f"a {name} is from {span['start']} to {span['end']} of {length} response_ids")


def _check_number(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is no finite number: {value!r}")


def results_of_rows(records: Iterable[Record]) -> Iterator[RolloutResult]:
    """The rollouts that rows were made of, with what the rows have of them. Rows of a rollout have to be together, in
    the order of their traces. Raises `InvalidInput`."""
    seen: set[str] = set()
    for rollout_id, some in groupby(records, key=lambda record: record.get("rollout_id")):
        if rollout_id in seen:
            raise InvalidInput("import", [f"rows of rollout '{rollout_id}' are not together: sort them by rollout_id"])
        seen.add(str(rollout_id))
        yield _result(list(some))


def _result(records: list[Record]) -> RolloutResult:
    made = [read_row(record) for record in records]
    first, head = made[0], records[0]
    if any(later.trace <= row.trace for row, later in pairwise(made)):
        told = f"rows of rollout '{first.rollout_id}' are not in the order of their traces, each once"
        raise InvalidInput("import", [told])
    try:
        traces = [_trace(row, record["unused"]) for row, record in zip(made, records, strict=True)]
        verdict = head["outcome_reward"]
        trainable = any(record["unused"] is None for record in records)
        outcome = Outcome(state=head["state"], boundary=head["boundary"], reason=head["outcome"], trainable=trainable)
        fidelity = _fidelity(traces)
        return RolloutResult(
            rollout_id=first.rollout_id,
            task_id=first.group,
            run_id=head["run"],
            index=first.rollout,
            versions=fidelity.versions,
            outcome=outcome,
            reward=None if verdict is None else Reward(outcome=verdict, evaluator=""),
            trajectory=Trajectory(builder="", traces=traces, fidelity=fidelity),
        )
    except (KeyError, ValidationError) as exc:
        told = f"rows of rollout '{first.rollout_id}' make no result: {problem_of(exc)}"
        raise InvalidInput("import", [told]) from None


def _trace(row: Row, unused: str | None) -> Trace:
    return Trace(
        index=row.trace,
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        teacher_logprobs=row.teacher_logprobs,
        weight_versions=row.versions,
        finish_reason=row.finish_reason,
        reward=row.reward,
        weight=row.weight,
        turns=row.turns,
        images=row.images,
        completion_seqs=[turn.seq for turn in row.turns],
        untrainable=unused,
    )


def _fidelity(traces: Sequence[Trace]) -> Fidelity:
    """What can be told of traces alone."""
    trainable = sum(trace.trainable_tokens for trace in traces)
    sampled = max(trainable, sum(turn.end - turn.start for trace in traces for turn in trace.turns))
    images = [image for trace in traces for image in trace.images]
    turns = [turn for trace in traces for turn in trace.turns]
    return Fidelity(
        calls=len(turns),
        traces=len(traces),
        sampled_tokens=sampled,
        trainable_tokens=trainable,
        masked_tokens=sampled - trainable,
        untrainable={str(turn.seq): turn.untrainable for turn in turns if turn.untrainable is not None},
        versions=list(dict.fromkeys(span.version for trace in traces for span in trace.weight_versions)),
        images=len(images),
        unplaced_images=sum(1 for image in images if image.start is None),
    )
