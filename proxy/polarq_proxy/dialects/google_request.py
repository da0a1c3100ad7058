"""Reads a Gemini request: contents, tools and generation settings, in either spelling of every field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarq_proxy.call import ModelCall
from polarq_proxy.dialects.google_contents import messages_of
from polarq_proxy.dialects.google_names import json_schema, named, whole_number
from polarq_proxy.dialects.openai_shapes import MAX_CHOICES, MAX_TOP_LOGPROBS
from polarq_proxy.faults import CallFault, FaultKind

_NUMBERS = {
    "temperature": "temperature",
    "topP": "top_p",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_WHOLE_NUMBERS = {"topK": "top_k", "maxOutputTokens": "max_tokens", "seed": "seed"}
_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high"}


@dataclass(frozen=True, slots=True)
class GoogleAsk:
    """What the answer's form depends on."""

    sse: bool
    """Streamed as events; else as one JSON array that grows."""
    thoughts: bool
    """Thinking is shown as parts of its own. Its signature is given in any case."""


def call_of(body: Any, *, model: str, stream: bool, sse: bool) -> ModelCall:
    """Raises `CallFault`."""
    if isinstance(body, dict):
        inner = named(body, "generateContentRequest")  # how countTokens may wrap a whole request
        body = inner if isinstance(inner, dict) else body
    if not isinstance(body, dict):
        raise CallFault(FaultKind.BAD_REQUEST, "the request body must be a JSON object")
    if named(body, "cachedContent"):
        text = "there is no cached content here: send the whole contents instead of 'cachedContent'"
        raise CallFault(FaultKind.BAD_REQUEST, text, param="cachedContent")
    settings = named(body, "generationConfig")
    settings = settings if isinstance(settings, dict) else {}
    thinking = named(settings, "thinkingConfig")
    thinking = thinking if isinstance(thinking, dict) else {}
    options = _options(settings, thinking)
    tools = _choose(_tools(body.get("tools")), named(body, "toolConfig"), options)
    choices = whole_number(named(settings, "candidateCount")) or 1
    if not 1 <= choices <= MAX_CHOICES:
        text = f"'candidateCount' must be a number from 1 to {MAX_CHOICES}"
        raise CallFault(FaultKind.BAD_REQUEST, text, param="generationConfig.candidateCount")
    if choices > 1:
        options["n"] = choices
    return ModelCall(
        messages=messages_of(body.get("contents"), named(body, "systemInstruction")),
        tools=tools or None,
        options=options,
        model=model,
        stream=stream,
        choices=choices,
        wants_logprobs=named(settings, "responseLogprobs") is True,
        native=GoogleAsk(sse, named(thinking, "includeThoughts") is True),
    )


def _options(settings: dict[str, Any], thinking: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, inner in _NUMBERS.items():
        value = named(settings, name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            options[inner] = value
    for name, inner in _WHOLE_NUMBERS.items():
        number = whole_number(named(settings, name))
        if number is not None:
            options[inner] = number
    stops = named(settings, "stopSequences")
    stops = [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []
    if texts := [stop for stop in stops if isinstance(stop, str) and stop]:
        options["stop"] = texts
    if named(settings, "responseLogprobs") is True:
        options["top_logprobs"] = min(max(whole_number(settings.get("logprobs")) or 0, 0), MAX_TOP_LOGPROBS)
    options.update(_format(settings))
    if whole_number(named(thinking, "thinkingBudget")) == 0:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    level = named(thinking, "thinkingLevel")
    if isinstance(level, str) and level.lower() in _EFFORTS:
        options["reasoning_effort"] = _EFFORTS[level.lower()]
    return options


def _format(settings: dict[str, Any]) -> dict[str, Any]:
    """The form of the answer that is asked for."""
    kind = named(settings, "responseMimeType")
    schema = named(settings, "responseJsonSchema") or settings.get("_responseJsonSchema")
    if not isinstance(schema, dict):
        own = named(settings, "responseSchema")
        schema = json_schema(own) if isinstance(own, dict) else None
    if kind == "text/x.enum" and schema is not None and isinstance(schema.get("enum"), list):
        return {"structured_outputs": {"choice": [str(value) for value in schema["enum"]]}}
    if kind != "application/json":
        return {}
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}}


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Functions. What only the API's own servers can run (search, code execution, URL contexts) is left out."""
    found: list[Any] = []
    for tool in [tools] if isinstance(tools, dict) else tools if isinstance(tools, list) else []:
        declared = named(tool, "functionDeclarations") if isinstance(tool, dict) else None
        found += [declared] if isinstance(declared, dict) else declared if isinstance(declared, list) else []
    functions = [item for item in found if isinstance(item, dict) and isinstance(item.get("name"), str)]
    return [{"type": "function", "function": _function(item)} for item in functions if item["name"]]


def _function(declared: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": declared["name"]}
    if isinstance(declared.get("description"), str):
        function["description"] = declared["description"]
    parameters = named(declared, "parametersJsonSchema")
    if not isinstance(parameters, dict):
        own = declared.get("parameters")
        parameters = json_schema(own) if isinstance(own, dict) else {"type": "object", "properties": {}}
    function["parameters"] = parameters
    return function


def _choose(tools: list[dict[str, Any]], config: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Sets the tool choice; returns the tools that may be called."""
    calling = named(config, "functionCallingConfig") if isinstance(config, dict) else None
    if not isinstance(calling, dict) or not tools:
        return tools
    mode = calling.get("mode")
    mode = mode.upper() if isinstance(mode, str) else ""
    allowed = named(calling, "allowedFunctionNames")
    names = {name for name in allowed if isinstance(name, str)} if isinstance(allowed, list) else set()
    if names and mode in {"ANY", "VALIDATED"}:
        tools = [tool for tool in tools if tool["function"]["name"] in names] or tools
    if mode == "NONE":
        options["tool_choice"] = "none"
    elif mode == "ANY" and len(tools) == 1 and names:
        options["tool_choice"] = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    elif mode == "ANY":
        options["tool_choice"] = "required"
    elif mode in {"AUTO", "VALIDATED"}:
        options["tool_choice"] = "auto"
    return tools
