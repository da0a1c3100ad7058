"""Which messages of a trace the policy sampled."""

from __future__ import annotations

from polarq.contracts.trajectory import Trace, Turn


def sampled_by(trace: Trace) -> list[Turn | None] | None:
    """For each of `response_messages` the turn that it is the answer of, None for what was not sampled.

    None for all where that cannot be told: a harness put in an answer of its own, or a turn had none.
    """
    answers = [message.get("role") == "assistant" for message in trace.response_messages]
    if sum(answers) != len(trace.turns):
        return None
    turns = iter(trace.turns)
    return [next(turns) if is_answer else None for is_answer in answers]
