"""What a deployment's settings come to, and where each value came from. Secrets are masked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from polarq.settings import Settings
from polarq.topology.models import Topology
from polarq.topology.redis_address import without_password

Origin = Literal["default", "file", "env"]

MASK = "***"
_IN_QUERY = re.compile(r"([?&]password=)[^&]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Value:
    """One setting. `key` is its path in the file."""

    key: str
    value: Any
    origin: Origin


def effective(topology: Topology, settings: Settings) -> Iterator[Value]:
    """Every value that holds, in the order of the file."""
    for value in _values(topology, "", in_file=True):
        if value.key == "redis.url" and settings.redis_url is not None:
            yield Value(value.key, masked("url", settings.redis_url), "env")
        else:
            yield value


def _values(model: BaseModel, path: str, *, in_file: bool) -> Iterator[Value]:
    for name in type(model).model_fields:
        given = in_file and name in model.model_fields_set
        yield from _value(getattr(model, name), f"{path}.{name}" if path else name, name, given)


def _value(value: Any, path: str, name: str, given: bool) -> Iterator[Value]:
    if isinstance(value, BaseModel):
        yield from _values(value, path, in_file=given)
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}.{index}", in_file=given)
    else:
        yield Value(path, masked(name, value), "file" if given else "default")


def masked(name: str, value: Any) -> Any:
    """The value fit to be shown: no password of an address, no environment variable that is named like a secret."""
    if isinstance(value, str):
        return _address(value) if "://" in value else value
    if isinstance(value, dict):
        hide = name == "env"
        return {k: MASK if hide and _SECRET_NAME.search(str(k)) else masked(str(k), v) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(name, item) for item in value]
    return value


def _address(value: str) -> str:
    try:
        return _IN_QUERY.sub(rf"\1{MASK}", without_password(value))
    except ValueError:
        return MASK  # not an address after all; who knows what it holds
