"""Messages and tools to prompt text, by the shipped chat template, as a real engine renders its model's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polarq.errors import PolarqError


class CannotRender(PolarqError):
    """The messages do not fit the chat template."""


def to_json(value: Any) -> str:
    """JSON as chat templates write it: one line, blanks after separators, nothing escaped that need not be."""
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    return environment.from_string(files("polarq.testing.inference").joinpath("chat_template.jinja").read_text("utf-8"))


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    keep_thinking: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text. `keep_thinking=False` drops the thinking of earlier turns, as many models' templates do
    (and with it the exact prefix). `template_kwargs` is the request's `chat_template_kwargs`.

    Raises `CannotRender`.
    """
    values: dict[str, Any] = {
        "keep_thinking": keep_thinking,
        **(template_kwargs or {}),
        "messages": [_with_parsed_arguments(message) for message in messages],
        "tools": list(tools or []),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    try:
        return _template().render(values)
    except (TemplateError, TypeError) as exc:
        raise CannotRender(f"the messages cannot be rendered by the chat template: {exc}") from exc


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tool arguments travel as JSON text and are rendered from the parsed value: a harness that re-orders keys
    or changes blanks is rendered back as it sent them, not as they were sampled."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
            except ValueError:
                function["arguments"] = arguments
        parsed.append({**call, "function": function})
    return {**message, "tool_calls": parsed}
