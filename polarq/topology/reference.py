"""The reference of the topology, made from the models: as Markdown, and as a file with every default in it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from polarq.contracts.specs import RuntimeSpec
from polarq.settings import Settings
from polarq.topology.models import Topology

POLARS = "Accepted from Polar's files"
"""How the description of a key begins that polarq takes and does not need."""

_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_FROM_TASKS: frozenset[type[BaseModel]] = frozenset({RuntimeSpec})
"""Models of the task contract that a topology holds: their keys are listed here and explained with the task."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of the file: where it stands, what it is, its keys."""

    path: str
    meaning: str
    keys: tuple[Key, ...]
    explained: bool = True
    """Whether each key has a meaning of its own here."""


def sections() -> Iterator[Section]:
    """Every mapping of the file, outer ones first."""
    yield from _sections(Topology, "", set())


def _sections(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[Section]:
    seen.add(model)
    keys = tuple(_key(name, field) for name, field in model.model_fields.items())
    if model in _FROM_TASKS:
        yield Section(path, f"{_sentence(model)} The same keys as `runtime` in a task.", keys, explained=False)
        return
    yield Section(path, _sentence(model), keys)
    for name, field in model.model_fields.items():
        for inner, listed in _models(field.annotation):
            if inner not in seen:
                below = f"{path}.{name}" if path else name
                yield from _sections(inner, f"{below}[]" if listed else below, seen)


def _models(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """The models a field can hold, and whether in a list (a union of both counts as not)."""
    found: dict[type[BaseModel], bool] = {}
    for part in _parts(annotation):
        if inspect.isclass(part) and issubclass(part, BaseModel):
            found[part] = False
        elif get_origin(part) is list:
            for inner in _parts(get_args(part)[0]):
                if inspect.isclass(inner) and issubclass(inner, BaseModel):
                    found.setdefault(inner, True)
    yield from found.items()


def _parts(annotation: Any) -> list[Any]:
    """The members of a union, without None; Annotated is unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _parts(get_args(annotation)[0])
    if origin in {Union, types.UnionType}:
        return [part for arg in get_args(annotation) if arg is not type(None) for part in _parts(arg)]
    return [annotation]


def _key(name: str, field: FieldInfo) -> Key:
    words = [_words(part) for part in _parts(field.annotation)]
    limits = _limits(field)
    kind = " or ".join(dict.fromkeys(words)) + (f", {limits}" if limits else "")
    return Key(name, kind, default_text(field), field.description or "")


def _words(part: Any) -> str:
    origin, args = get_origin(part), get_args(part)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin is list:
        return f"list of {_words(_parts(args[0])[0])}"
    if origin is dict:
        return "mapping"
    if inspect.isclass(part) and issubclass(part, BaseModel):
        return "mapping"
    if inspect.isclass(part) and issubclass(part, StrEnum):
        return " or ".join(f"`{value}`" for value in part)
    return _PLAIN.get(part, "anything")


def _limits(field: FieldInfo) -> str:
    words = []
    for rule in field.metadata:
        match rule:
            case Ge(ge=low):
                words.append(f"at least {low}")
            case Gt(gt=low):
                words.append(f"more than {low}")
            case Le(le=high):
                words.append(f"at most {high}")
            case Lt(lt=high):
                words.append(f"less than {high}")
            case MinLen(min_length=low) | StringConstraints(min_length=int(low)):
                words.append("not empty" if low == 1 else f"at least {low} long")
            case MaxLen(max_length=high):
                words.append(f"at most {high} long")
            case _:
                pass
    return ", ".join(words)


def default_text(field: FieldInfo) -> str:
    """The default as it would stand in the file; of a mapping or list of mappings only that it is one."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "the host's name"
    value = field.default
    if isinstance(value, BaseModel) or (isinstance(value, list) and value and isinstance(value[0], BaseModel)):
        return "see below"
    return "none" if value is None else f"`{flow(value)}`"


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.1f}"
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=100_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _sentence(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").split())


def markdown() -> str:
    """The whole reference."""
    lines = [
        "# topology.yaml",
        "",
        "One file describes a deployment; every command reads the same one: `-c FILE`, else `POLARQ_TOPOLOGY`, else",
        "`./topology.yaml`, else the defaults. Unknown keys are refused. A topology of Polar's loads as it is.",
        "Made by `polarq config reference`.",
        "",
    ]
    for section in sections():
        lines += [f"## {section.path or 'Top level'}", "", section.meaning, ""]
        lines += [*_table(section), ""]
    lines += ["## Environment", "", inspect.cleandoc(Settings.__doc__ or "").partition("\n\n")[2], ""]
    return "\n".join(lines)


def _table(section: Section) -> Iterator[str]:
    heads = ["key", "type", "default", *(["meaning"] if section.explained else [])]
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for key in section.keys:
        cells = [f"`{key.name}`", key.type, key.default, *([key.meaning] if section.explained else [])]
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def example() -> str:
    """A topology file that holds every default and says what each value is."""
    lines = [
        "# Every key of a topology with its default. A file of yours needs only the keys that differ.",
        "# Keys that are taken from Polar's files and do nothing here are left out.",
        "# Made by `polarq config reference --yaml`.",
        "",
    ]
    for name, field in Topology.model_fields.items():
        lines += [f"# {field.description}", f"{name}:", *_yaml(field.get_default(call_default_factory=True), "  "), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _yaml(model: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        if (field.description or "").startswith(POLARS) or name == "completion_persistence":
            continue
        value = getattr(model, name)
        yield f"{indent}# {field.description}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _yaml(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            yield f"{indent}{name}:"
            for item in value:
                first, second, *rest = _yaml(item, indent + "    ")
                yield first
                yield f"{indent}  - {second.strip()}"
                yield from rest
        else:
            yield f"{indent}{name}: {flow(value)}"
