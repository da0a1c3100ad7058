"""The token tree of a rollout: which call's prompt goes on, id for id, from what an earlier call saw and sampled.

A call is a child of the earlier call whose prompt and sampled ids are the longest that its own prompt begins with. Only
ids decide, and which pictures they stand for. Cost is linear in ids: prompts are hashed once, with a look at each
length at which an earlier call ended.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from polarq.contracts.completion import Completion
from polarq.trajectory.images import alike_until
from polarq.trajectory.trainable import why_untrainable

ID_BYTES = array("I").itemsize


@dataclass(eq=False, slots=True)
class Node:
    """One call that sampled something."""

    completion: Completion
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    untrainable: str | None = None
    below: int = 0
    """Trainable ids on the best way from here to a leaf, its own included."""

    @property
    def length(self) -> int:
        """Ids of its prompt and its sample."""
        return len(self.completion.prompt_ids) + len(self.completion.sampled_ids)

    @property
    def trunk(self) -> Node | None:
        """The child that the trace of this call goes on with: the one with the most to train on below it, the earliest
        of equals."""
        return max(self.children, key=lambda child: child.below, default=None)


def token_tree(completions: Sequence[Completion]) -> list[Node]:
    """A node for each call that sampled something, in the order given (that of the requests)."""
    nodes: list[Node] = []
    ended: dict[bytes, list[Node]] = {}
    lengths: list[int] = []
    for completion in completions:
        if not completion.sampled_ids:
            continue
        parent, digest = _placed(completion, ended, lengths)
        node = Node(completion, parent, untrainable=why_untrainable(completion))
        if parent is not None:
            parent.children.append(node)
        nodes.append(node)
        # Of calls that saw and sampled the same, the later one is what the harness goes on from.
        ended[digest] = [
            node,
            *(one for one in ended.get(digest, ()) if not _same_pictures(one.completion, completion)),
        ]
        if (at := bisect_right(lengths, node.length)) == 0 or lengths[at - 1] != node.length:
            insort(lengths, node.length)
    for node in reversed(nodes):
        own = 0 if node.untrainable else len(node.completion.sampled_ids)
        node.below = own + max((child.below for child in node.children), default=0)
    return nodes


def packed(ids: Sequence[int]) -> bytes:
    """The ids as bytes, `ID_BYTES` each: compared and hashed as fast as memory is read."""
    return array("I", ids).tobytes()


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    one, other = packed(first), packed(second)
    low, high = 0, min(len(first), len(second))
    # The first `low` ids are known to be equal, and never more than `high` can be.
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * ID_BYTES, middle * ID_BYTES)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_context(earlier: Completion, later: Completion) -> int:
    """Number of leading ids of `later`'s prompt that are those of what `earlier` saw and sampled, and stand for the
    same pictures."""
    length = shared_length([*earlier.prompt_ids, *earlier.sampled_ids], later.prompt_ids)
    return alike_until(earlier.images, later.images, length)


def _goes_on(node: Node, completion: Completion) -> bool:
    """Whether a prompt that begins with the node's ids begins with its pictures too."""
    mine, theirs = node.completion.images, completion.images
    return len(mine) <= len(theirs) and alike_until(mine, theirs, node.length) == node.length


def same_prompt(one: Completion, other: Completion) -> bool:
    """Whether two prompts are the same, pictures included."""
    return one.prompt_ids == other.prompt_ids and _same_pictures(one, other)


def _same_pictures(one: Completion, other: Completion) -> bool:
    return [image.sha256 for image in one.images] == [image.sha256 for image in other.images]


def _placed(completion: Completion, ended: dict[bytes, list[Node]], lengths: list[int]) -> tuple[Node | None, bytes]:
    """The parent, and the hash of all that the call saw and sampled."""
    prompt = memoryview(packed(completion.prompt_ids))
    hashed = hashlib.blake2b(digest_size=16)
    parent, done = None, 0
    for length in lengths[: bisect_right(lengths, len(completion.prompt_ids))]:
        hashed.update(prompt[done * ID_BYTES : length * ID_BYTES])
        done = length
        here = ended.get(hashed.digest(), ())
        parent = next((node for node in here if _goes_on(node, completion)), parent)
    hashed.update(prompt[done * ID_BYTES :])
    hashed.update(packed(completion.sampled_ids))
    return parent, hashed.digest()
