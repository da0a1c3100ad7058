"""Why a trace begins where it does: which call it branched off from, how many ids the two share, and the cause."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.trajectory import BranchCause
from polarq.trajectory.breaks import continued
from polarq.trajectory.tree import Node, pictures_of, shared_context


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a trace's first call left an earlier one."""

    other: Node
    shared: int
    """Leading ids of the call's prompt that are those of the other's prompt and sample."""
    cause: BranchCause


class Branches:
    """Of one rollout's token tree, nodes in request order."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._position = {node.completion.seq: position for position, node in enumerate(nodes)}
        self._parallel: dict[int, set[int]] = {}

    def of(self, node: Node) -> Branch | None:
        """None for the first: it branched off from nothing. `node` is not the trunk of its parent."""
        if node is self._nodes[0]:
            return None
        if (twin := self._twins.get(node.completion.seq)) is not None:
            return _branch(node, twin, BranchCause.PARALLEL if _together(node, twin) else BranchCause.RETRY)
        earlier = self._continued.get(node.completion.seq)
        if earlier is not None and node.parent is not earlier:
            return _branch(node, earlier, BranchCause.DRIFT)
        if node.parent is not None:
            parallel = node.completion.seq in self._beside(node.parent)
            return _branch(node, node.parent, BranchCause.PARALLEL if parallel else BranchCause.FORK)
        return self._anew(node)

    def _beside(self, parent: Node) -> set[int]:
        """seq of its children that were asked while another of them was on its way."""
        if (known := self._parallel.get(parent.completion.seq)) is not None:
            return known
        calls = sorted((child.completion for child in parent.children), key=lambda call: call.requested_at)
        found: set[int] = set()
        until = calls[0].requested_at
        for call, later in zip(calls, [*calls[1:], None], strict=True):
            if call.requested_at < until or (later is not None and later.requested_at < call.answered_at):
                found.add(call.seq)
            until = max(until, call.answered_at)
        self._parallel[parent.completion.seq] = found
        return found

    def _anew(self, node: Node) -> Branch:
        """Of a root: nothing of it was seen before."""
        alike = self._alike.get(node.completion.seq)
        if alike is None:
            before = self._nodes[self._position[node.completion.seq] - 1]
            return _branch(node, before, BranchCause.SUB_AGENT)
        if _together(node, alike):
            return _branch(node, alike, BranchCause.PARALLEL)
        main = self._settings[node.completion.seq] == self._main
        return _branch(node, alike, BranchCause.COMPACTION if main else BranchCause.SUB_AGENT)

    @cached_property
    def _continued(self) -> dict[int, Node]:
        """seq -> the node that its messages go on from."""
        pairs = continued([node.completion for node in self._nodes])
        return {call.seq: self._nodes[self._position[earlier.seq]] for call, earlier in pairs}

    @cached_property
    def _twins(self) -> dict[int, Node]:
        """seq -> the latest earlier node that was asked the same."""
        asked = [(id(node.parent), node.asked, pictures_of(node.completion)) for node in self._nodes]
        return _latest_alike(self._nodes, asked)

    @cached_property
    def _settings(self) -> dict[int, str]:
        return {node.completion.seq: _setting(node.completion) for node in self._nodes}

    @cached_property
    def _alike(self) -> dict[int, Node]:
        """seq -> the latest earlier node of the same setting."""
        return _latest_alike(self._nodes, [self._settings[node.completion.seq] for node in self._nodes])

    @cached_property
    def _main(self) -> str | None:
        """The setting of the agent that the task was given to."""
        steps = (node.completion for node in self._nodes if node.completion.label is not CompletionLabel.SIDE)
        first = next(steps, None)
        return None if first is None else self._settings[first.seq]


def _latest_alike(nodes: Sequence[Node], keys: Sequence[Hashable]) -> dict[int, Node]:
    """seq -> the latest earlier node with the same key, of those that have one."""
    latest: dict[Hashable, Node] = {}
    found = {}
    for node, key in zip(nodes, keys, strict=True):
        if key in latest:
            found[node.completion.seq] = latest[key]
        latest[key] = node
    return found


def _branch(node: Node, other: Node, cause: BranchCause) -> Branch:
    if node.completion.label is CompletionLabel.SIDE:
        cause = BranchCause.SIDE
    return Branch(other, shared_context(other.completion, node.completion), cause)


def _together(one: Node, other: Node) -> bool:
    first, second = one.completion, other.completion
    return first.requested_at < second.answered_at and second.requested_at < first.answered_at


def _setting(completion: Completion) -> str:
    """What an agent is, for telling it from others: its system prompt and its tools."""
    system = [message.get("content") for message in completion.messages if message.get("role") == "system"]
    return hashlib.sha256(json.dumps([system, completion.tools], sort_keys=True).encode()).hexdigest()
