"""Texts that a sandbox can be told: each may become an argument, a variable, a path or a line of a file. What stands
beside them in settings of a program's own has to reach it by JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

Model = TypeVar("Model", bound=BaseModel)

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_texts(model: Model) -> Model:
    """The model, if all in it can be told. Raises `ValueError`, which names the first that cannot."""
    if problem := next(unusable(dict(model)), ""):
        raise ValueError(problem)
    return model


def unusable(value: Any, at: str = "") -> Iterator[str]:
    """What of it no program can be told, keys among it: where, and why."""
    if isinstance(value, str):
        if "\0" in value:
            yield f"{at}: has a NUL byte"
        elif not value.isascii() and (lone := _LONE_SURROGATE.search(value)):
            yield f"{at}: is not valid Unicode text (lone surrogate at {lone.start()})"
    elif isinstance(value, BaseModel):
        yield from unusable(dict(value), at)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from unusable(key, f"a key of {at or 'it'}")
            yield from unusable(part, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from unusable(part, f"{at}.{number}")
    elif isinstance(value, float):
        if not math.isfinite(value):  # on the wire it would become null
            yield f"{at}: cannot be written as JSON: {value}"
    elif problem := _unwritable(value):
        yield f"{at}: cannot be written as JSON: {problem}"


def _unwritable(value: Any) -> str:
    try:
        to_json(value)
    except ValueError as exc:
        return str(exc)
    return ""
