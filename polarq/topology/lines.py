"""Where in the file a mistake is: every problem of a topology with its line.

The file is read twice: as plain data for the models, and as YAML's own tree, which knows lines. A mistake's path leads
through the tree to the line of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from polarq.errors import InvalidTopology
from polarq.topology.models import Topology

Location = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong in the file. `line` counts from 1; None: about the file as a whole."""

    line: int | None
    path: str
    message: str

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.path}: {self.message}" if self.path else f"{where}{self.message}"


def read_topology(path: Path) -> Topology:
    """The topology in a file. Raises `InvalidTopology`, every problem with its line."""
    topology, mistakes = check_topology(path)
    if topology is None:
        raise InvalidTopology(str(path), [str(mistake) for mistake in mistakes])
    return topology


def check_topology(path: Path) -> tuple[Topology | None, list[Mistake]]:
    """The topology, or None and every mistake in the order of lines. Raises `InvalidTopology` for no usable file."""
    text = _text(path)
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark is not None else None
        return None, [Mistake(line, "", f"is not YAML: {exc.problem or exc.context}")]
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        return None, [Mistake(None, "", f"is not YAML: {' '.join(str(exc).split())}")]
    if tree is None or data is None:
        return Topology(), []
    if not isinstance(data, dict):
        return None, [Mistake(1, "", "must hold a mapping at its top level")]
    mistakes = list(_doubled(tree, ()))
    try:
        topology = Topology.model_validate(data)
    except ValidationError as exc:
        mistakes += _mistakes(tree, exc)
        return None, sorted(set(mistakes), key=lambda m: (m.line or 0, m.path))
    return (None, mistakes) if mistakes else (topology, [])


def _text(path: Path) -> str:
    what = f"topology file {path}"
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InvalidTopology(what, ["there is no such file"]) from None
    except OSError as exc:
        raise InvalidTopology(what, [f"cannot be read: {exc.strerror}"]) from None
    except UnicodeDecodeError as exc:
        raise InvalidTopology(what, [f"is not UTF-8 text (byte {exc.start})"]) from None


def _mistakes(tree: Node, exc: ValidationError) -> list[Mistake]:
    """Each error at its line. Of a union, only the branch that the file's own shape means is told."""
    possible: list[Mistake] = []
    impossible: list[Mistake] = []
    for error in exc.errors(include_url=False, include_input=False):
        place = _place(tree, error["loc"])
        told = error.get("ctx", {}).get("keys") or {None: error["msg"]}
        for key, message in told.items():
            line = _key_line(place.node, key) or place.line
            mistake = Mistake(line, place.path, message.removeprefix("Value error, "))
            (impossible if place.impossible else possible).append(mistake)
    return possible or impossible


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an error's location leads: the deepest node on the way, the line of its key."""

    node: Node
    line: int
    path: str
    impossible: bool
    """The location goes through a branch of a union that the file cannot have meant."""


def _place(tree: Node, location: Location) -> _Place:
    node, line, path, impossible = tree, tree.start_mark.line + 1, "", False
    for part in location:
        inside = _child(node, part)
        if inside is not None:
            line, node = inside
            path += f".{part}" if path else str(part)
        elif isinstance(part, str) and _is_branch(part):
            impossible = impossible or part.startswith("list[") != isinstance(node, SequenceNode)
        else:
            path += f".{part}" if path else str(part)
    return _Place(node, line, path, impossible)


def _is_branch(part: str) -> bool:
    """Pydantic names the branch of a union in the location; the topology's own keys are never spelt like a class."""
    return part.startswith("list[") or part[:1].isupper()


def _child(node: Node, part: str | int) -> tuple[int, Node] | None:
    """(line, node) of a key or an item."""
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item.start_mark.line + 1, item
    if isinstance(node, MappingNode):
        for key, value in _entries(node):
            if key.value == str(part):
                return key.start_mark.line + 1, value
    return None


def _entries(node: MappingNode) -> Iterator[tuple[ScalarNode, Node]]:
    """The mapping's keys, own ones first, then those merged in with `<<`."""
    merged: list[Node] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            if key.tag == "tag:yaml.org,2002:merge":
                merged += value.value if isinstance(value, SequenceNode) else [value]
            else:
                yield key, value
    for other in merged:
        if isinstance(other, MappingNode):
            yield from _entries(other)


def _key_line(node: Node, key: Any) -> int | None:
    """The line of a key, or of the last key on a way (a tuple) that the file has; None: it has none of it."""
    line: int | None = None
    for part in key if isinstance(key, tuple) else () if key is None else (key,):
        inside = _child(node, part)
        if inside is None:
            break
        line, node = inside
    return line


def _doubled(node: Node, path: tuple[str, ...]) -> Iterator[Mistake]:
    """Keys that stand twice in one mapping: YAML takes the last one and says nothing."""
    if isinstance(node, MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                continue
            here = key.start_mark.line + 1
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                yield Mistake(here, ".".join((*path, key.value)), f"stands twice (first in line {seen[key.value]})")
            seen[key.value] = here
            yield from _doubled(value, (*path, key.value))
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _doubled(item, (*path, str(index)))
