"""What every contract shares: frozen, strict about keys, and errors that name the key.

`Contract` refuses unknown keys with the nearest known one, because a key that is silently dropped (Polar drops
`num_rollouts`, and the caller gets one sample) costs its user days. What another polarq process recorded is read with
`stored`, which leaves out keys that only a later version knows: results outlive the update of a fleet.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError, to_json

from polarq.errors import InvalidInput, InvalidTask

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
"""Task, run and node ids: safe as file name, Redis key part, queue name and URL path segment."""


_STORED = {"polarq": "stored"}


def check_id(what: str, value: str) -> str:
    """The id, if it can be one. Raises `InvalidInput`."""
    if not re.fullmatch(ID_PATTERN, value):
        shown = f"{value[:60]}..." if len(value) > 60 else value
        raise InvalidInput(what, [f"'{shown}' is no id: letters, digits, '.', '_' and '-', at most 128, no blanks"])
    return value


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(json.loads(to_json(value, inf_nan_mode="constants")), allow_nan=False)
    except ValueError as exc:
        raise ValueError(f"cannot be written as JSON: {exc}") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
"""An object of somebody else's making. What JSON cannot hold is refused: on the wire a NaN would become null."""


class Contract(BaseModel):
    """Base of all frozen models that cross a boundary (JSON in, JSON out)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """Old or foreign spellings that are accepted: {foreign: ours}."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = cls.model_fields
        if info.context is _STORED:
            return {key: value for key, value in data.items() if key in known}
        values = dict(data)
        for foreign, ours in cls.renamed_keys.items():
            if foreign in values:
                if ours in values:
                    raise PydanticCustomError("two_spellings", f"'{foreign}' and '{ours}' are the same; give one")
                values[ours] = values.pop(foreign)
        unknown = [key for key in values if key not in known]
        if unknown:
            told = {str(key): _unknown(key, list(known)) for key in unknown}
            raise PydanticCustomError("unknown_key", "{text}", {"text": "; ".join(told.values()), "keys": told})
        return values

    @classmethod
    def stored(cls, data: str | bytes | Mapping[str, Any]) -> Self:
        """Reads a record (JSON or a mapping) that a polarq process wrote, which may be of a later version: what is
        unknown here is left out. Raises pydantic's `ValidationError`. Not for requests: what is asked for is done or
        refused.
        """
        if isinstance(data, Mapping):
            return cls.model_validate(data, context=_STORED)
        return cls.model_validate_json(data, context=_STORED)

    @classmethod
    def parse(cls, data: Any, *, what: str | None = None, error: type[InvalidInput] = InvalidTask) -> Self:
        """Validates `data` (a mapping or a model); raises `error` with one line per mistake."""
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise error(what or cls.__name__.lower(), problems_of(exc)) from None


C = TypeVar("C", bound=Contract)


def _unknown(key: object, known: list[str]) -> str:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return f"unknown key '{key}'" + (f", did you mean '{near[0]}'?" if near else f" (known: {', '.join(known)})")


def problems_of(exc: ValidationError) -> list[str]:
    """One line per mistake of a pydantic error: the key's path, then what is wrong with it."""
    lines = []
    for error in exc.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part) for part in error["loc"])
        message = error["msg"].removeprefix("Value error, ")
        lines.append(f"{path}: {message}" if path else message)
    return lines
