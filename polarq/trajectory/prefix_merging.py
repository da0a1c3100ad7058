"""`prefix_merging`: calls that go on, id for id, from what an earlier one saw and sampled become one trace with it.

Calls form a tree by exact token prefix (`polarq.trajectory.tree`). Each trace is a way down in it, so it is exactly a
sequence that the engine saw. Where several calls go on from one, the trace goes on with the one that has the most to
train on, and each other call begins a trace: its prompt holds what is trained on elsewhere. A call that does not go on
from any begins one as well, so nothing that was sampled is ever dropped.

Settings: `emit`: `paths` (as above), `tree` (a trace leaves out the ids that its parent has), or `last_path` (one
trace: the way to the last call that may be trained on; what is not on it is not there).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from polarq.contracts.base import Contract
from polarq.contracts.completion import Completion, Image, VersionSpan
from polarq.contracts.trajectory import Trace, Turn
from polarq.trajectory.base import Builder, trained_logprobs, turn
from polarq.trajectory.branches import Branch, Branches
from polarq.trajectory.trainable import versions_of
from polarq.trajectory.tree import Node, token_tree


class Emit(StrEnum):
    """Which traces are made of the tree."""

    PATHS = "paths"
    TREE = "tree"
    LAST_PATH = "last_path"


class PrefixMergingSettings(Contract):
    """`builder.config` of `prefix_merging`."""

    emit: Emit = Emit.PATHS


class PrefixMergingBuilder(Builder):
    """See the module."""

    name = "prefix_merging"

    def __init__(self, config: dict[str, Any]) -> None:
        self._emit = PrefixMergingSettings.parse(config, what="builder.config").emit

    def traces(self, completions: Sequence[Completion]) -> list[Trace]:
        nodes = token_tree(completions)
        if self._emit is Emit.LAST_PATH:
            return [_trace(0, path) for path in _last_path(nodes)]
        branches = Branches(nodes)
        traces: list[Trace] = []
        trace_of: dict[int, int] = {}
        for node in nodes:
            if node.parent is not None and node.parent.trunk is node:
                continue
            path = _trunk(node)
            trace_of.update((one.completion.seq, len(traces)) for one in path)
            traces.append(self._branched(_trace(len(traces), path), node, branches.of(node), trace_of))
        return traces

    def _branched(self, trace: Trace, node: Node, branch: Branch | None, trace_of: dict[int, int]) -> Trace:
        if branch is None:
            return trace
        parent = trace_of[branch.other.completion.seq]
        left_out = branch.shared if self._emit is Emit.TREE else 0
        return trace.model_copy(
            update={
                "parent": parent,
                "shared": branch.shared,
                "cause": branch.cause,
                "left_out": left_out,
                "prompt_ids": trace.prompt_ids[left_out:],
            }
        )


def _trunk(node: Node) -> list[Node]:
    path = [node]
    while (after := path[-1].trunk) is not None:
        path.append(after)
    return path


def _last_path(nodes: Sequence[Node]) -> list[list[Node]]:
    last = next((node for node in reversed(nodes) if node.untrainable is None), None)
    if last is None:
        return []
    path = [last]
    while (before := path[-1].parent) is not None:
        path.append(before)
    return [path[::-1]]


def _trace(index: int, path: Sequence[Node]) -> Trace:
    first, last = path[0].completion, path[-1].completion
    begin = len(first.prompt_ids)
    # The last prompt begins with all that was seen and sampled before it.
    response = [*last.prompt_ids[begin:], *last.sampled_ids]
    mask, logprobs = [0] * len(response), [0.0] * len(response)
    turns: list[Turn] = []
    versions: list[VersionSpan] = []
    for node in path:
        call = node.completion
        start, end = len(call.prompt_ids) - begin, node.length - begin
        mask[start:end] = [0 if node.untrainable else 1] * (end - start)
        logprobs[start:end] = trained_logprobs(call, node.untrainable)
        versions += [
            VersionSpan(version=span.version, start=start + span.start, end=start + span.end)
            for span in versions_of(call)
        ]
        turns.append(turn(call, start, node.untrainable))
    return Trace(
        index=index,
        prompt_ids=first.prompt_ids,
        response_ids=response,
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        images=_images(path),
        prompt_messages=first.messages,
        response_messages=_response_messages(path),
        tools=last.tools,
        finish_reason=last.finish_reason,
        completion_seqs=[node.completion.seq for node in path],
        turns=turns,
        untrainable=path[0].untrainable if all(node.untrainable for node in path) else None,
        metadata={"completion_ids": [node.completion.completion_id for node in path]},
    )


def _images(path: Sequence[Node]) -> list[Image]:
    """Those of the last prompt; a place that it does not tell, an earlier one may have told."""
    images: list[Image] = []
    for node in path:
        told = node.completion.images
        kept = [old if old.start is not None else new for old, new in zip(images, told, strict=False)]
        images = [*kept, *told[len(kept) :]]
    return images


def _response_messages(path: Sequence[Node]) -> list[dict[str, Any]]:
    """Answers, and what the harness said between them."""
    messages: list[dict[str, Any]] = []
    known = len(path[0].completion.messages)
    for node in path:
        call = node.completion
        messages += call.messages[known:]
        messages += [call.reply] if call.reply else []
        known = len(call.messages) + bool(call.reply)
    return messages
