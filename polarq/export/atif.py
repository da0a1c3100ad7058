"""`atif`: the Agent Trajectory Interchange Format, one document per rollout, made and checked by the models of `atif`.

The document is the rollout's first trace; its other traces (sub-agents, compactions, retries, ...) are embedded as
`subagent_trajectories`. A step that the policy sampled has its ids and log-probabilities in `metrics`. The prompt's ids
stand whole at a trace's first such step; at later ones `metrics.extra.new_prompt_token_ids` are what came since the
sample before, so that a document grows with its tokens. `extra.polarq` has what ATIF has no place for; of a trace whose
sampled answers cannot be told from others of its messages, also the ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec
from pydantic import ValidationError

from polarq.contracts.rollout import RolloutResult
from polarq.contracts.trajectory import Trace, Turn
from polarq.export.base import NOTHING_SAMPLED, Format, MissingPackage, Record, Skip, needed
from polarq.export.replies import sampled_by
from polarq.trainers.rows import written_out

VERSION = "ATIF-v1.8"
KEPT = {
    "index", "parent", "shared", "cause", "reward", "weight", "finish_reason", "completion_seqs", "untrainable",
    "images", "teacher_logprobs", "metadata",
}  # fmt: skip
"""Of a trace, in `extra.polarq.trace`."""
UNTOLD = {"prompt_ids", "response_ids", "loss_mask", "logprobs", "turns", "weight_versions"}
"""There as well, where no step could have them."""
REFUSED = "refused by the models of ATIF"
_DEPTH = 64
"""Of arguments; what is nested deeper stays text."""
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class Atif(Format):
    """See the module. Every rollout that sampled something is in it, whatever its outcome."""

    name = "atif"
    suffix = ".json"
    one_each = True

    def __init__(self) -> None:
        atif_models()

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"schema": VERSION}

    def records(self, result: RolloutResult) -> list[Record]:
        trajectory = needed(result)
        traces = written_out(trajectory).traces
        if not traces:
            raise Skip(NOTHING_SAMPLED)
        first, *others = (_document(result, trace) for trace in traces)
        first["session_id"] = result.rollout_id
        first["subagent_trajectories"] = others or None
        first["extra"]["polarq"] |= {
            "result": result.model_dump(mode="json", exclude={"payload", "trajectory"}),
            "builder": trajectory.builder,
            "metadata": trajectory.metadata,
            "fidelity": trajectory.fidelity.model_dump(mode="json"),
        }
        try:
            return [atif_models().Trajectory.model_validate(first).to_json_dict()]
        except ValidationError:  # messages are whatever an agent sent: they must not hold up the other rollouts
            raise Skip(REFUSED) from None

    def write(self, file: IO[bytes], records: Sequence[Record]) -> None:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n")

    def join(self, parts: Sequence[Path], file: IO[bytes]) -> None:
        raise NotImplementedError("each rollout has a file of its own")


def atif_models() -> Any:
    """The package. Raises `MissingPackage`."""
    try:
        import atif
    except ImportError:
        raise MissingPackage("the package atif") from None
    return atif


def _document(result: RolloutResult, trace: Trace) -> Record:
    steps: list[Record] = []
    sampled = sampled_by(trace)
    for message in trace.prompt_messages:
        # Of a trace that branched off, all of this is in another one; an answer here was not sampled in this one.
        _add(steps, message, None, copied=trace.parent is not None or message.get("role") == "assistant")
    seen = 0
    for position, message in enumerate(trace.response_messages):
        turn = sampled[position] if sampled is not None else None
        metrics = None if turn is None else _metrics(trace, turn, seen)
        seen = seen if turn is None else turn.end
        _add(steps, message, metrics, copied=False)
    return {
        "schema_version": VERSION,
        "trajectory_id": f"{result.rollout_id}:{trace.index}",
        "agent": {
            "name": result.harness.name if result.harness is not None else "unknown",
            "version": "unknown",
            "tool_definitions": trace.tools,
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_completion_tokens": sum(turn.end - turn.start for turn in trace.turns),
            "total_steps": len(steps),
        },
        "notes": None if sampled is not None else "no step has ids: sampled answers cannot be told from others",
        "extra": {"polarq": {"trace": trace.model_dump(mode="json", include=KEPT if sampled else KEPT | UNTOLD)}},
    }


def _metrics(trace: Trace, turn: Turn, seen: int) -> Record:
    """`seen`: where the sample before it ended in the response."""
    first = turn is trace.turns[0]
    versions = [
        {"version": span.version, "start": span.start - turn.start, "end": span.end - turn.start}
        for span in trace.weight_versions
        if turn.start <= span.start and span.end <= turn.end
    ]
    return {
        "prompt_tokens": len(trace.prompt_ids) + turn.start,
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": [*trace.prompt_ids, *trace.response_ids[: turn.start]] if first else None,
        "completion_token_ids": trace.response_ids[turn.start : turn.end],
        "logprobs": None if turn.untrainable else trace.logprobs[turn.start : turn.end],
        "extra": {
            "turn": turn.model_dump(mode="json"),
            "new_prompt_token_ids": None if first else trace.response_ids[seen : turn.start],
            "weight_versions": versions,
        },
    }


def _add(steps: list[Record], message: Mapping[str, Any], metrics: Record | None, *, copied: bool) -> None:
    """A message as a step; a tool's answer as an observation of the step that called it."""
    role = message.get("role")
    if role == "tool":
        _observe(steps, message)
        return
    step: Record = {"source": {"assistant": "agent", "system": "system"}.get(str(role), "user")}
    if role == "developer":
        step["source"] = "system"
    step["message"] = _content(message.get("content"))
    if role == "assistant":
        called = message.get("tool_calls")
        calls = [_tool_call(number, call) for number, call in enumerate(called if isinstance(called, list) else [])]
        thought = message.get("reasoning_content") or message.get("reasoning")
        step |= {
            "reasoning_content": thought if thought is None else _text(thought),
            "tool_calls": calls or None,
            "metrics": metrics,
            "is_copied_context": True if copied else None,
            "llm_call_count": 1 if metrics is not None else None,
        }
    elif copied:
        step["is_copied_context"] = True
    steps.append(step)


def _observe(steps: list[Record], message: Mapping[str, Any]) -> None:
    caller = next((step for step in reversed(steps) if step["source"] == "agent"), None)
    if caller is None:
        caller = {"source": "system", "message": ""}
        steps.append(caller)
    known = {call["tool_call_id"] for call in caller.get("tool_calls") or []}
    call_id = message.get("tool_call_id")
    told = call_id if isinstance(call_id, str) and call_id in known else None
    result = {"source_call_id": told, "content": _content(message.get("content"))}
    caller.setdefault("observation", {"results": []})["results"].append(result)


def _tool_call(number: int, call: Any) -> Record:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else {"arguments": function}
    given = function.get("arguments")
    arguments = _arguments(given)
    return {
        "tool_call_id": str(call.get("id") or f"call-{number}"),
        "function_name": str(function.get("name", "")),
        "arguments": {} if arguments is None else arguments,
        "extra": {"arguments_text": given} if arguments is None else None,
    }


def _arguments(given: Any) -> dict[str, Any] | None:
    """None for what is no object that a document can hold: halves of characters, no numbers, nested beyond measure."""
    try:
        found = msgspec.json.decode(given) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and _flat(found, _DEPTH) else None


def _flat(value: Any, most: int) -> bool:
    """Whether it is nested `most` levels deep at most."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most > 0 and all(_flat(one, most - 1) for one in inner)


def _content(content: Any) -> str | list[Record]:
    return [_part(part) for part in content] if isinstance(content, list) else _text(content)


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)


def _part(part: Any) -> Record:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    address = part.get("image_url") if isinstance(part, dict) else None
    address = address.get("url") if isinstance(address, dict) else address
    if isinstance(address, str):
        kind = address.removeprefix("data:").partition(";")[0] if address.startswith("data:") else None
        if kind in _IMAGES:
            return {"type": "image", "source": {"media_type": kind, "path": address}}
    return {"type": "text", "text": json.dumps(part)}


def sampled_steps(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Steps of one document, without its embedded ones, that have ids."""
    return (step for step in document["steps"] if (step.get("metrics") or {}).get("completion_token_ids"))


def embedded(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The document and those that are embedded in it."""
    return chain([document], *(embedded(one) for one in document.get("subagent_trajectories") or []))
