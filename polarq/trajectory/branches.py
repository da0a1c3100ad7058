"""Why a trace begins where it does: which call it branched off from, how many ids the two share, and the cause."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from polarq.contracts.completion import Completion, CompletionLabel
from polarq.contracts.trajectory import BranchCause
from polarq.trajectory.breaks import continued
from polarq.trajectory.tree import Node, same_prompt, shared_context


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
        pairs = continued([node.completion for node in nodes])
        self._continued = {call.seq: nodes[self._position[earlier.seq]] for call, earlier in pairs}
        self._roots = [node for node in nodes if node.parent is None]

    def of(self, node: Node) -> Branch | None:
        """None for the first: it branched off from nothing. `node` is not the trunk of its parent."""
        if node is self._nodes[0]:
            return None
        if (twin := self._twin(node)) is not None:
            return _branch(node, twin, BranchCause.PARALLEL if _together(node, twin) else BranchCause.RETRY)
        earlier = self._continued.get(node.completion.seq)
        if earlier is not None and node.parent is not earlier:
            return _branch(node, earlier, BranchCause.DRIFT)
        if node.parent is not None:
            parallel = any(_together(node, child) for child in node.parent.children if child is not node)
            return _branch(node, node.parent, BranchCause.PARALLEL if parallel else BranchCause.FORK)
        return self._anew(node)

    def _anew(self, node: Node) -> Branch:
        """Of a root: nothing of it was seen before."""
        before = self._nodes[: self._position[node.completion.seq]]
        setting = self._settings[node.completion.seq]
        alike = [one for one in before if self._settings[one.completion.seq] == setting]
        if not alike:
            return _branch(node, before[-1], BranchCause.SUB_AGENT)
        if _together(node, alike[-1]):
            return _branch(node, alike[-1], BranchCause.PARALLEL)
        return _branch(node, alike[-1], BranchCause.COMPACTION if setting == self._main else BranchCause.SUB_AGENT)

    @cached_property
    def _settings(self) -> dict[int, str]:
        return {node.completion.seq: _setting(node.completion) for node in self._nodes}

    @cached_property
    def _main(self) -> str | None:
        """The setting of the agent that the task was given to."""
        steps = (node.completion for node in self._nodes if node.completion.label is not CompletionLabel.SIDE)
        first = next(steps, None)
        return None if first is None else self._settings[first.seq]

    def _twin(self, node: Node) -> Node | None:
        """The latest earlier call with the same prompt."""
        siblings = self._roots if node.parent is None else node.parent.children
        earlier = siblings[: siblings.index(node)]
        same = (one for one in reversed(earlier) if same_prompt(one.completion, node.completion))
        return next(same, None)


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
