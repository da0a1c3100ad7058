"""The token tree of a rollout: which call's prompt goes on, id for id, from what an earlier call saw and sampled.

A call is a child of the earlier call whose prompt and sampled ids are the longest that its own prompt begins with. Only
ids decide, and which pictures they stand for. Ids are compared, never trusted to a hash.

Cost is linear in ids, and nearly so in calls: all sequences are sorted, so that each stands behind those that it begins
with, and are walked once. That gives the places where one ends, each below the longest place that it goes on from.
Calls then leave their places from the last to the first: where none is left, nobody looks again. While they are sorted,
the sequences are in memory once more, as bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from polarq.contracts.completion import Completion
from polarq.trajectory.images import alike_until
from polarq.trajectory.trainable import why_untrainable

ID_BYTES = array("I").itemsize


@dataclass(eq=False, slots=True)
class Place:
    """Where a prompt or a call ends: the same place for the same ids."""

    length: int
    above: Place | None
    """That of the longest sequence that this one begins with; later, the nearest that is not known to be left."""
    ended: defaultdict[tuple[str, ...], list[Node]] = field(default_factory=lambda: defaultdict(list))
    """The calls that ended here, in request order, by the pictures they saw."""


@dataclass(eq=False, slots=True)
class Node:
    """One call that sampled something."""

    completion: Completion
    untrainable: str | None
    parent: Node | None = None
    asked: Place | None = None
    """Where its prompt ends: the same for nodes that were asked the same."""
    children: list[Node] = field(default_factory=list)
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
    nodes = [Node(completion, why_untrainable(completion)) for completion in completions if completion.sampled_ids]
    ends = _places(nodes)
    for node, end in zip(nodes, ends, strict=True):
        end.ended[pictures_of(node.completion)].append(node)
    for node, end in zip(reversed(nodes), reversed(ends), strict=True):
        _leave(end, node)
        node.parent = _before(node)
    for node in nodes:
        if node.parent is not None:
            node.parent.children.append(node)
    for node in reversed(nodes):
        own = 0 if node.untrainable else len(node.completion.sampled_ids)
        node.trunk = max(node.children, key=lambda child: child.below, default=None)
        node.below = own + (node.trunk.below if node.trunk is not None else 0)
    return nodes


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading ids that are equal."""
    low, high = 0, min(len(first), len(second))
    # The first `low` ids are known to be equal, and never more than `high` can be.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_context(earlier: Completion, later: Completion) -> int:
    """Number of leading ids of `later`'s prompt that are those of what `earlier` saw and sampled, and stand for the
    same pictures."""
    length = shared_length([*earlier.prompt_ids, *earlier.sampled_ids], later.prompt_ids)
    return alike_until(earlier.images, later.images, length)


def pictures_of(completion: Completion) -> tuple[str, ...]:
    """Which pictures the prompt shows, in order."""
    return tuple(image.sha256 for image in completion.images)


def _places(nodes: Sequence[Node]) -> list[Place]:
    """Where each node ends; tells each where its prompt does."""
    # As bytes, ids are compared as fast as memory is read.
    wholes = [
        array("I", [*call.prompt_ids, *call.sampled_ids]).tobytes() for call in (node.completion for node in nodes)
    ]
    ends: dict[int, Place] = {}
    way: list[Place] = []
    before = b""
    for at in sorted(range(len(nodes)), key=wholes.__getitem__):
        # Those that begin with a sequence stand right behind it: what is not shared with the one before is over.
        del way[bisect_right(way, shared_length(before, wholes[at]) // ID_BYTES, key=_LENGTH) :]
        nodes[at].asked = _place(way, len(nodes[at].completion.prompt_ids))
        ends[at] = _place(way, nodes[at].length)
        before = wholes[at]
    return [ends[at] for at in range(len(nodes))]


_LENGTH = attrgetter("length")


def _place(way: list[Place], length: int) -> Place:
    """That of the length, on the way to a sequence."""
    at = bisect_left(way, length, key=_LENGTH)
    if at == len(way) or way[at].length != length:
        # Those further on were there without it: it is where a prompt ends and no call does, so that none looks for it.
        way.insert(at, Place(length, way[at - 1] if at else None))
    return way[at]


def _leave(place: Place, node: Node) -> None:
    """`node` is the last that is left there."""
    pictures = pictures_of(node.completion)
    place.ended[pictures].pop()
    if not place.ended[pictures]:
        del place.ended[pictures]


def _before(node: Node) -> Node | None:
    """The one that ended furthest on the way to what `node` was asked, of those that are left."""
    place = _occupied(node.asked)
    while place is not None:
        if (found := _ended(place, node.completion)) is not None:
            return found
        place = _occupied(place.above)
    return None


def _occupied(place: Place | None) -> Place | None:
    """The nearest from there on up where a call is left."""
    while place is not None and not place.ended:
        if place.above is not None and not place.above.ended:
            place.above = place.above.above
        place = place.above
    return place


def _ended(place: Place, completion: Completion) -> Node | None:
    """The latest call that ended there with the pictures that the prompt shows up to there. What has no place in the
    prompt may be before it or behind."""
    shown = pictures_of(completion)
    for number in range(len(shown), -1, -1):
        if (fit := place.ended.get(shown[:number])) is not None:
            # Of calls that saw and sampled the same, the later one is what the harness goes on from.
            return fit[-1]
        if number and (start := completion.images[number - 1].start) is not None and start < place.length:
            return None
    return None
