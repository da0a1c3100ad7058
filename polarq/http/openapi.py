"""`/openapi.json`: the routes of the table, with schemas made from the models that serve them."""

from __future__ import annotations

import re
from typing import Any

from pydantic import TypeAdapter

from polarq.contracts.base import Contract
from polarq.http import polar_shapes
from polarq.http.routes import ROUTES, Route

_REF = "#/components/schemas/{model}"
_REASONS = {
    400: "The body is not JSON in UTF-8",
    401: "The token is missing or wrong",
    404: "Not found",
    409: "The task_id is taken by a different request",
    413: "The body is too large",
    422: "A parameter or field cannot be used",
    429: "The queue is full",
    501: "Not in this version",
    504: "Not within the time asked for",
    503: "Redis cannot be used",
}
_ALWAYS = (401, 422, 503)


def openapi(version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    wanted: list[Any] = [polar_shapes.ErrorAnswer]
    for route in ROUTES:
        wanted += [shape for shape in (route.answer, route.body) if shape is not None and not isinstance(shape, str)]
    # Requests are described as they are validated, answers too: both are what crosses the wire.
    adapters = [(str(n), "validation", TypeAdapter(shape)) for n, shape in enumerate(wanted)]
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template=_REF)  # type: ignore[arg-type]
    of_shape = {repr(shape): schemas[(str(n), "validation")] for n, shape in enumerate(wanted)}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, of_shape)
    return {
        "openapi": "3.1.0",
        "info": {"title": "polarq", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "polar": {"type": "apiKey", "in": "header", "name": "X-Polar-Control-Token"},
            },
        },
        "security": [{"bearer": []}, {"polar": []}, {}],
    }


def _operation(route: Route, of_shape: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {
            "description": _REASONS[status],
            "content": {"application/json": {"schema": of_shape[repr(polar_shapes.ErrorAnswer)]}},
        }
        for status in sorted({*_ALWAYS, *route.refusals})
    }
    if isinstance(route.answer, str):
        responses["200"] = {"description": "OK", "content": {route.answer: {"schema": {"type": "string"}}}}
    elif route.answer is not None:
        schema = of_shape[repr(route.answer)]
        responses["200"] = {"description": "OK", "content": {"application/json": {"schema": schema}}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.handler.__name__}{'_' + route.path.rpartition('/')[2] if route.answer is None else ''}",
        "parameters": [*_path_parameters(route.path), *_query_parameters(route.query)],
        "responses": responses,
    }
    if route.path == "/health":
        operation["security"] = []
    if route.body is not None:
        schema = of_shape[repr(route.body)]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(model: type[Contract]) -> list[dict[str, Any]]:
    schema = model.model_json_schema(ref_template=_REF)
    definitions = schema.get("$defs", {})
    parameters = []
    for name, properties in schema.get("properties", {}).items():
        inlined = dict(properties)
        ref = inlined.pop("$ref", None)
        if ref is not None:
            inlined = {**definitions[ref.rpartition("/")[2]], **inlined}
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": name in schema.get("required", ()),
                "description": inlined.pop("description", ""),
                "schema": inlined,
            }
        )
    return parameters
