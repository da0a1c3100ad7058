"""How Gemini spells things: every field in camelCase or snake_case, numbers maybe as text, schemas with types in
capitals, bytes in either alphabet of base64."""

from __future__ import annotations

import base64
import binascii
import re
from functools import cache
from typing import Any

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "prefixItems"})
_DROPPED = frozenset({"nullable", "propertyOrdering", "example"})
_SPELLINGS = {"any_of": "anyOf", "prefix_items": "prefixItems", "additional_properties": "additionalProperties"}
_SPELLINGS |= {"property_ordering": "propertyOrdering", "defs": "$defs", "ref": "$ref"}
_SPELLINGS |= {"min_items": "minItems", "max_items": "maxItems", "min_length": "minLength", "max_length": "maxLength"}
_SPELLINGS |= {"min_properties": "minProperties", "max_properties": "maxProperties"}

SIGNED = b"polarq.1:"
"""What begins a thought signature of polarq; the thinking follows."""


@cache
def snake(name: str) -> str:
    return _HUMP.sub("_", name).lower()


def named(tree: dict[str, Any], name: str) -> Any:
    """The field of that camelCase name in either spelling; None when it is not there."""
    value = tree.get(name)
    return tree.get(snake(name)) if value is None else value


def whole_number(value: Any) -> int | None:
    """An int64 as JSON may carry it: a number, or its digits in a string."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def json_schema(schema: Any) -> Any:
    """A Gemini schema as JSON Schema. What is one already stays one."""
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for written, value in schema.items():
        name = _SPELLINGS.get(written) or written
        if value is None or name in _DROPPED:
            continue
        changed[name] = _schema_value(name, value)
    kind = changed.get("type")
    if kind is None or kind == "type_unspecified":
        changed.pop("type", None)
    elif named(schema, "nullable") is True and isinstance(kind, str):
        changed["type"] = [kind, "null"]
    return changed


def _schema_value(name: str, value: Any) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name in _COUNTS:
        number = whole_number(value)
        return value if number is None else number
    if name in {"properties", "$defs"} and isinstance(value, dict):
        return {key: json_schema(item) for key, item in value.items()}
    if name in _SCHEMA_LISTS and isinstance(value, list):
        return [json_schema(item) for item in value]
    return json_schema(value) if name in _SCHEMAS else value


def standard_base64(data: str) -> str | None:
    """The same bytes in the standard alphabet and padded, as engines read them; None when it is not base64."""
    text = "".join(data.split()).replace("-", "+").replace("_", "/").rstrip("=")
    text += "=" * (-len(text) % 4)
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return text


def signature_of(thinking: str) -> str:
    """A thought signature that holds the thinking itself: harnesses give signatures back, but not thoughts."""
    return base64.b64encode(SIGNED + thinking.encode()).decode()


def thinking_in(signature: Any) -> str | None:
    """The thinking in a signature of polarq; None for anybody else's."""
    text = standard_base64(signature) if isinstance(signature, str) else None
    data = base64.b64decode(text) if text else b""
    return data[len(SIGNED) :].decode("utf-8", "replace") if data.startswith(SIGNED) else None
