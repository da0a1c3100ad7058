"""`polar`: Polar's SessionResult, one a line, with polarq's own keys beside Polar's as the HTTP shim writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from polarq.contracts.rollout import RolloutResult
from polarq.errors import InvalidInput
from polarq.export.base import Record, problem_of
from polarq.export.jsonl import Lines
from polarq.http.polar_json import session_result
from polarq.http.polar_results import result_of, result_of_polar

SCHEMA = "polar.SessionResult"


class Polar(Lines):
    """See the module. Every ended rollout is in it, whatever its outcome."""

    name = "polar"

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": SCHEMA}

    def records(self, result: RolloutResult) -> list[Record]:
        return [cast("Record", session_result(result))]


def results_of_sessions(sessions: Iterable[Record]) -> Iterator[RolloutResult]:
    """The rollouts of sessions that polarq or Polar wrote. Polar's have no index: they are numbered within their task
    as they come. Raises `InvalidInput`."""
    of_task: Counter[str] = Counter()
    for number, session in enumerate(sessions, 1):
        try:
            if "rollout" in session and "outcome" in session:
                yield result_of(session)
            else:
                task_id = str(session["task_id"])
                yield result_of_polar(session, of_task[task_id])
                of_task[task_id] += 1
        except (KeyError, TypeError, ValueError) as exc:
            raise InvalidInput("import", [f"session {number} is no SessionResult: {problem_of(exc)}"]) from None
