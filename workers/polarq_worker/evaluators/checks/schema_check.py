"""Whether a text is JSON that fits a schema. Request: {answer, schema}; reply: {fits, problems}."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

SHOWN = 10


def refuse_constant(word: str) -> Any:
    raise ValueError(f"'{word}' is no JSON")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def check(request: dict[str, Any]) -> dict[str, Any]:
    schema = request["schema"]
    try:
        value = json.loads(request["answer"], parse_constant=refuse_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as exc:
        return {"fits": False, "problems": [f"it is no JSON: {exc}"]}
    # An empty registry: a schema is not fetched from anywhere.
    validator = validator_for(schema, default=Draft202012Validator)(schema, registry=Registry())
    errors = itertools.islice(validator.iter_errors(value), SHOWN)
    found = [f"{error.json_path}: {error.message[:200]}" for error in errors]
    return {"fits": not found, "problems": found}


if __name__ == "__main__":
    try:
        json.dump(check(json.load(sys.stdin)), sys.stdout)
    except MemoryError:
        sys.exit(87)
