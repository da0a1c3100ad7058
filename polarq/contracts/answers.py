"""Settings of the evaluators that judge a final answer: `exact_match`, `json_schema`, `math_verify`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, StringConstraints, field_validator, model_validator

from polarq.contracts.base import Contract
from polarq.contracts.specs import NonBlank


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Accepted = Annotated[list[NonBlank], BeforeValidator(_as_list), Field(min_length=1)]
"""A text or a list of texts, of which any will do. None is blank: no answer at all would fit it."""
Marker = Annotated[str, StringConstraints(min_length=1)]


class AnswerConfig(Contract):
    """Where the answer is. What the answer is not in is no answer, and gets 0.0."""

    answer_file: NonBlank | None = None
    """A UTF-8 file in the sandbox; without it, the last message of the assistant counts."""
    answer_after: Marker | None = None
    """The answer begins behind the last one of these."""
    answer_before: Marker | None = None
    """The answer ends at the first one of these."""


class ExactMatchConfig(AnswerConfig):
    """`exact_match`: 1.0 when the answer is one of the expected texts, else 0.0. Blanks at its ends never count."""

    expected: Accepted
    ignore_case: bool = False
    ignore_blanks: bool = False
    """Any run of blanks and line ends is as good as one blank."""


class JsonSchemaConfig(AnswerConfig):
    """`json_schema`: 1.0 when the answer is JSON that fits the schema, else 0.0."""

    renamed_keys: ClassVar[dict[str, str]] = {"schema": "json_schema"}

    json_schema: dict[str, Any]
    """Draft 2020-12 where `$schema` names no other. It refers to nothing outside itself."""
    fenced: bool = False
    """The JSON may stand in one Markdown fence, with text around it."""

    @field_validator("json_schema")
    @classmethod
    def _a_schema(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not value:
            raise ValueError("is empty: any JSON at all would fit it")
        if importlib.util.find_spec("jsonschema") is not None:
            _check_schema(value)
        return value


class MathVerifyConfig(AnswerConfig):
    """`math_verify`: 1.0 when the answer is mathematically one of the expected ones, else 0.0."""

    expected: Accepted
    """LaTeX (in $ or \\boxed{}) or a plain expression."""
    float_rounding: int = Field(6, ge=0, le=30)
    """Decimals that count when numbers are compared."""
    strict: bool = True
    """Variables have names that count, and a set is no tuple."""

    @model_validator(mode="after")
    def _expected_says_something(self) -> Self:
        if any(not any(char.isalnum() or char == "\\" for char in text) for text in self.expected):
            raise ValueError("expected: has an entry with no number, letter or command in it")
        return self


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError. Where the library is not installed, the node that judges has it and checks."""
    validators = importlib.import_module("jsonschema.validators")
    errors = importlib.import_module("jsonschema.exceptions")
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except errors.SchemaError as exc:
        place = "/".join(map(str, exc.absolute_path))
        raise ValueError(f"is no JSON schema{f' at {place}' if place else ''}: {exc.message}") from None
