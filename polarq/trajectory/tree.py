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
    asked: bytes
    """The same for nodes that were asked the same: a hash of the prompt's ids."""
    children: list[Node] = field(default_factory=list)
    untrainable: str | None = None
    below: int = 0
    """Trainable ids on the best way from here to a leaf, its own included."""
    trunk: Node | None = None
    """The child that the trace of this call goes on with: the one with the most to train on below it, the earliest of
    equals."""

    @property
    def length(self) -> int:
        """Ids of its prompt and its sample."""
        return len(self.completion.prompt_ids) + len(self.completion.sampled_ids)


def token_tree(completions: Sequence[Completion]) -> list[Node]:
    """A node for each call that sampled something, in the order given (that of the requests)."""
    nodes: list[Node] = []
    ended: dict[bytes, list[Node]] = {}
    lengths: list[int] = []
    for completion in completions:
        if not completion.sampled_ids:
            continue
        parent, asked, digest = _placed(completion, ended, lengths)
        node = Node(completion, parent, asked, untrainable=why_untrainable(completion))
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
        node.trunk = max(node.children, key=lambda child: child.below, default=None)
        node.below = own + (node.trunk.below if node.trunk is not None else 0)
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


def pictures_of(completion: Completion) -> tuple[str, ...]:
    """Which pictures the prompt shows, in order."""
    return tuple(image.sha256 for image in completion.images)


def _same_pictures(one: Completion, other: Completion) -> bool:
    return pictures_of(one) == pictures_of(other)


def _placed(
    completion: Completion, ended: dict[bytes, list[Node]], lengths: list[int]
) -> tuple[Node | None, bytes, bytes]:
    """The parent, and the hashes of what the call saw, and of that and what it sampled."""
    prompt = memoryview(packed(completion.prompt_ids))
    hashed = hashlib.blake2b(digest_size=16)
    begun: list[list[Node]] = []
    done = 0
    for length in lengths[: bisect_right(lengths, len(completion.prompt_ids))]:
        hashed.update(prompt[done * ID_BYTES : length * ID_BYTES])
        done = length
        if (here := ended.get(hashed.digest())) is not None:
            begun.append(here)
    parent = next((node for here in reversed(begun) for node in here if _goes_on(node, completion)), None)
    hashed.update(prompt[done * ID_BYTES :])
    asked = hashed.digest()
    hashed.update(packed(completion.sampled_ids))
    return parent, asked, hashed.digest()
