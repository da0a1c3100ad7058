"""Small trajectories for evaluators that look at them."""

from __future__ import annotations

from typing import Any

from polarq.contracts.trajectory import Trace, Trajectory, Turn


def trace(index: int, *messages: dict[str, Any], prompt: str = "do it", **fields: Any) -> Trace:
    """One that sampled two tokens for each message of the assistant."""
    said = [message for message in messages if message["role"] == "assistant"]
    length = 2 * len(said)
    whole: dict[str, Any] = {
        "prompt_ids": [1],
        "response_ids": list(range(length)),
        "loss_mask": [1] * length,
        "logprobs": [-0.5] * length,
        "prompt_messages": [{"role": "user", "content": prompt}],
        "response_messages": list(messages),
        "completion_seqs": [index],
        "turns": [Turn(seq=number, start=2 * number, end=2 * number + 2) for number in range(len(said))],
        **fields,
    }
    return Trace(index=index, **whole)


def trajectory(*answers: Any, **fields: Any) -> Trajectory:
    """One trace per answer of the assistant."""
    traces = [trace(index, {"role": "assistant", "content": text}, **fields) for index, text in enumerate(answers)]
    return Trajectory(builder="per_request", traces=traces)
